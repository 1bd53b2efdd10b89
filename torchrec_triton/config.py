"""What a run is, as frozen dataclasses read from YAML: tables, kernels, optimizer, model, data, steps, seed, and what
an A/B comparison measures and allows.

A wrong file is answered with its path, the key, the nearest valid key and the allowed values, before anything is built.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

import yaml

T = TypeVar("T")

ComputeKernel = Literal["auto", "fused", "fused_triton"]
DataType = Literal["FP32", "FP16", "BF16"]
Pooling = Literal["SUM", "MEAN"]
# TorchRec's ShardingType but for data_parallel: the dense layers' optimizer would train such tables.
ShardingTypeName = Literal["table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard"]
# FBGEMM's EmbOptimType; the Triton kernels take the first two, FBGEMM's the others too.
OptimizerName = Literal[
    "EXACT_ROWWISE_ADAGRAD",
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "ADAM",
    "LAMB",
    "LARS_SGD",
    "PARTIAL_ROWWISE_ADAM",
    "PARTIAL_ROWWISE_LAMB",
    "ENSEMBLE_ROWWISE_ADAGRAD",
    "EMAINPLACE_ROWWISE_ADAGRAD",
]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and what is allowed."""


@dataclass(frozen=True)
class Bounds:
    """Numbers from `least` up, below `below`, and multiples of `step`."""

    least: float = 0
    below: float = float("inf")
    step: int = 1

    def __contains__(self, value: float) -> bool:
        return self.least <= value < self.below and (self.step == 1 or value % self.step == 0)

    def __str__(self) -> str:
        limit = f" and below {self.below:g}" if self.below < float("inf") else ""
        step = f"multiples of {self.step}, " if self.step > 1 else ""
        return f"{step}{self.least:g} and above{limit}"


Count = Annotated[int, Bounds(1)]
NonNegative = Annotated[float, Bounds(0)]
Share = Annotated[float, Bounds(0, below=1)]  # of data sources' options


@dataclass(frozen=True, kw_only=True)
class Table:
    """One embedding table.

    name: unique; features: that look it up, by default one of the table's name; rows and dim: its size;
    pooling: of a bag; pooling_factor: mean lookups of a bag, for the planner and for synthetic data;
    data_type: of the weights; sharding: the types that the planner may choose from, by default all of them.
    """

    name: str
    rows: Count
    dim: Annotated[int, Bounds(4, step=4)]
    features: tuple[str, ...] = ()
    pooling: Pooling = "SUM"
    pooling_factor: NonNegative = 1.0
    data_type: DataType = "FP32"
    sharding: tuple[ShardingTypeName, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", self.features or (self.name,))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """tables: shell pattern over table names; compute_kernel: what the tables it matches get."""

    tables: str
    compute_kernel: ComputeKernel


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Of the embedding tables, applied inside their backward. name: FBGEMM's; eps: outside the square root."""

    name: OptimizerName = "EXACT_ROWWISE_ADAGRAD"
    learning_rate: NonNegative = 0.01
    eps: NonNegative = 1e-8


class FusedParams(TypedDict, total=False):
    """Further keywords of FBGEMM's operator, enum members by name: those that change what is computed from tables in
    device memory and can be written in a file."""

    output_dtype: Literal["FP32", "FP16", "BF16", "INT8"]
    stochastic_rounding: bool
    gradient_clipping: bool
    max_gradient: NonNegative
    max_norm: NonNegative
    weight_decay: NonNegative
    weight_decay_mode: Literal["NONE", "L2", "DECOUPLE", "COUNTER", "COWCLIP", "DECOUPLE_GLOBAL"]
    momentum: NonNegative
    eta: NonNegative
    beta1: NonNegative
    beta2: NonNegative
    bounds_check_mode: Literal["FATAL", "WARNING", "IGNORE", "NONE", "V2_FATAL", "V2_WARNING", "V2_IGNORE"]
    use_experimental_tbe: bool


# What FBGEMM takes beside them and a configuration sets in another place.
_ELSEWHERE = {
    "fused_params.optimizer": "optimizer.name",
    "fused_params.learning_rate": "optimizer.learning_rate",
    "fused_params.lr": "optimizer.learning_rate",
    "fused_params.eps": "optimizer.eps",
    "fused_params.embedding_specs": "model.tables (rows, dim)",
    "fused_params.table_names": "model.tables (name)",
    "fused_params.feature_table_map": "model.tables (features)",
    "fused_params.pooling_mode": "model.tables (pooling)",
    "fused_params.weights_precision": "model.tables (data_type)",
    "fused_params.data_type": "model.tables (data_type)",
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """tables; weighted: lookups carry per-sample weights; initial_range: table weights start uniform within it on both
    sides of 0, where 0 stands for 1/sqrt(rows) of each table; bottom: widths of the layers over the dense features;
    interaction: `dot` multiplies every two features, whose dims (and the last of bottom) must then be equal, `cat` sets
    them side by side; hidden: widths of the layers after it; dense_learning_rate: of Adam on all these layers."""

    tables: tuple[Table, ...]
    weighted: bool = False
    initial_range: NonNegative = 0.0
    bottom: tuple[Count, ...] = ()
    interaction: Literal["dot", "cat"] = "dot"
    hidden: tuple[Count, ...] = (64, 32)
    dense_learning_rate: NonNegative = 0.001


@dataclass(frozen=True, kw_only=True)
class Data:
    """batch_size: samples a step on each rank; source: `synthetic`, or FILE.py:CLASS, FILE as seen from the
    configuration file; options: the source's own, which it checks key by key when it is opened."""

    batch_size: Count = 512
    source: str = "synthetic"
    options: dict = field(default_factory=dict)  # type: ignore[type-arg]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far arm B may be from arm A before `torchrec-triton ab` fails; what is left out is not checked.

    loss_difference: largest at any one step; metric_difference: of the AUC and of the log loss, after training;
    weight_difference, state_difference: largest of all tables, as a share of the table's largest value;
    speed_ratio: least (median step time of A) / (that of B), of its confidence interval's lower end;
    memory_ratio: greatest (peak GPU memory of B) / (that of A).
    """

    loss_difference: NonNegative = float("inf")
    metric_difference: NonNegative = float("inf")
    weight_difference: NonNegative = float("inf")
    state_difference: NonNegative = float("inf")
    speed_ratio: NonNegative = 0.0
    memory_ratio: NonNegative = float("inf")


@dataclass(frozen=True, kw_only=True)
class AB:
    """Arm A against arm B, which is the configuration as it stands.

    baseline: A's compute kernel for every table, without rules; plan: `frozen` gives both arms one plan in which only
    the kernels differ, `replan` lets the planner choose for each; warmup: first steps that are trained but not timed;
    profile_steps: last steps, likewise, that the profiler watches, in two turns an arm; steps_a_turn: an arm's steps
    before it is the other arm's turn (with more than one the host may run ahead of the GPU, as it does in training).
    """

    baseline: ComputeKernel = "fused"
    plan: Literal["frozen", "replan"] = "frozen"
    warmup: Annotated[int, Bounds(0)] = 10
    profile_steps: Annotated[int, Bounds(0)] = 5
    steps_a_turn: Count = 1
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class Config:
    """compute_kernel: of the tables that no rule matches. `auto` takes Triton where it can and FBGEMM elsewhere;
    `fused_triton` is an error where Triton can't. rules: the first whose pattern matches a table decides.
    pipeline: TorchRec's TrainPipelineSparseDist or TrainPipelineBase. steps: of training. seed: of weights and order of
    samples. ab: read by `torchrec-triton ab` only."""

    model: Model
    compute_kernel: ComputeKernel = "auto"
    rules: tuple[Rule, ...] = ()
    optimizer: Optimizer = field(default_factory=Optimizer)
    fused_params: FusedParams = field(default_factory=FusedParams)
    data: Data = field(default_factory=Data)
    pipeline: Literal["sparse_dist", "base"] = "sparse_dist"
    steps: Count = 100
    seed: Annotated[int, Bounds(0)] = 0
    ab: AB = field(default_factory=AB)

    def __post_init__(self) -> None:
        tables = self.model.tables
        for key in ("tables", "hidden"):
            if not getattr(self.model, key):
                raise ConfigError(f"model.{key}: is empty; at least one is needed")
        for table in tables:
            if not table.name or "." in table.name:  # it names a module of PyTorch's
                raise ConfigError(f"model.tables: name: {table.name!r} is not allowed; give text without a dot")
        _distinct("model.tables: name", [table.name for table in tables])
        _distinct("model.tables: features", [feature for table in tables for feature in table.features])
        for at, rule in enumerate(self.rules):
            if not any(matches(table.name, rule.tables) for table in tables):
                names = ", ".join(table.name for table in tables)
                raise ConfigError(f"rules[{at}].tables: {rule.tables!r} matches no table; the tables are {names}")

    def kernel_of(self, table: str) -> str:
        """The compute kernel that this configuration asks for a table: the first matching rule, or the default."""
        matching = (rule.compute_kernel for rule in self.rules if matches(table, rule.tables))
        return next(matching, self.compute_kernel)

    def kernels(self) -> dict[str, str]:
        """Table -> the compute kernel that is asked for it, as `make_planner` takes them."""
        return {table.name: self.kernel_of(table.name) for table in self.model.tables}

    def operator_keywords(self) -> dict[str, Any]:
        """The optimizer and fused_params as FBGEMM's keywords, enum members still by name."""
        optimizer = self.optimizer
        own: dict[str, Any] = {
            "optimizer": optimizer.name,
            "learning_rate": optimizer.learning_rate,
            "eps": optimizer.eps,
        }
        return {**own, **self.fused_params}

    def torchrec_fused_params(self) -> dict[str, Any]:
        """`operator_keywords` with FBGEMM's enum members in place of their names, as TorchRec's sharders take them."""
        return {key: _enum_member(key, value) for key, value in self.operator_keywords().items()}


def matches(table: str, pattern: str) -> bool:
    """Whether a shell pattern is a table's name, or fits it."""
    return table == pattern or fnmatchcase(table, pattern)


def load_config(path: str | Path) -> Config:
    """Read and check a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a key or value in it is wrong.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
        config = build(Config, content)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
    file, colon, name = config.data.source.rpartition(":")
    if not colon:
        return config
    found = Path(os.path.normpath(Path(path).resolve().parent / file))
    with contextlib.suppress(OSError, ValueError):  # no working directory, or not below it
        found = found.relative_to(Path.cwd())  # reports show it
    return replace(config, data=replace(config.data, source=f"{found}:{name}"))


def build(kind: type[T], value: Any, at: str = "") -> T:
    """A dataclass `kind` from a mapping, checked key by key; `at` is the path of the mapping in the whole."""
    items = _items(kind, value, at)
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name not in items and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{_path(at, item.name)}: is missing")
    return kind(**items)


def _items(kind: type, value: Any, at: str) -> dict[str, Any]:
    """A mapping whose keys are annotated in `kind`, with every value converted."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{at or 'the file'}: expected keys and values, got {value!r}")
    hints = get_type_hints(kind, include_extras=True)
    for key in value:
        path = _path(at, key)
        if path in _ELSEWHERE:
            raise ConfigError(f"{path}: set it under {_ELSEWHERE[path]}, so that it has one value")
        if key not in hints:
            raise ConfigError(f"{path}: a configuration file has no such key; {_choices(key, hints)}")
    return {key: _convert(hints[key], item, _path(at, key)) for key, item in value.items()}


def _path(at: str, key: str) -> str:
    return f"{at}.{key}" if at else str(key)


def _convert(hint: Any, value: Any, at: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        number = _convert(arguments[0], value, at)
        if number not in arguments[1]:
            raise ConfigError(f"{at}: {value!r} is not allowed; allowed: {arguments[1]}")
        return number
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{at}: {value!r} is not allowed; {_choices(value, arguments)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{at}: expected a list, got {value!r}")
        return tuple(_convert(arguments[0], item, f"{at}[{i}]") for i, item in enumerate(value))
    if is_dataclass(hint):
        return build(hint, value, at)  # type: ignore[arg-type]
    if is_typeddict(hint):
        return _items(hint, value, at)
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):  # answered below
            value = float(value)  # YAML 1.1 reads 1e-8 as a string
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "keys and values"}
        raise ConfigError(f"{at}: expected {names[hint]}, got {value!r}")
    return value


def _choices(given: Any, allowed: Iterable[str]) -> str:
    allowed = list(allowed)
    lower = {name.lower(): name for name in allowed}
    near = difflib.get_close_matches(str(given).lower(), lower, n=1)
    hint = f"did you mean {lower[near[0]]}? " if near else ""
    return f"{hint}allowed: {', '.join(allowed)}"


def _distinct(at: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{at}: {name!r} is given more than once")


def _enum_member(key: str, value: Any) -> Any:
    # Imported here: only a run needs FBGEMM, a plan does not.
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    kinds = {
        "optimizer": EmbOptimType,
        "weight_decay_mode": fbgemm.WeightDecayMode,
        "output_dtype": fbgemm.SparseType,
        "bounds_check_mode": fbgemm.BoundsCheckMode,
    }
    return kinds[key].__members__[value] if key in kinds else value


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, of which PyYAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        nodes = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # <<: takes keys of another
        keys = [self.construct_object(key, deep=True) for key in nodes]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                raise ConfigError(f"{key}: is given more than once{nodes[at].start_mark}")
        return super().construct_mapping(node, deep)
