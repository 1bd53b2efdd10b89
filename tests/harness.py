"""Modules, batches and bounds for the operator's tests. Needs no hypothesis, so a GPU host can use it alone.

All contents of a batch are small multiples of a power of two: weights and gradients of 1/8, per-sample weights of 1/4.
They are exact in fp32, fp16 and bf16. A product is at most 4 and a multiple of 1/64, so sums of up to 2^16 products are
exact in fp32, in any order. Hence outputs under SUM, row gradients and per-sample weight gradients have one right
value, bit for bit. Row gradients do not read the weights, so theirs is exact in every step. What needs a tolerance is
MEAN, the optimizer, and what reads the rows after the first step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType as OptimType
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, WeightDecayMode
from torch import Tensor

from torchrec_triton import TritonTableBatchedEmbeddingBags
from torchrec_triton.kernels.reference import (
    lookup_reference,
    row_gradients_reference,
    update_reference,
    weight_gradients_reference,
)

DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
OPTIONS = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.1, "eps": 1e-4}
ENUMS = {
    "optimizer": OptimType,
    "weight_decay_mode": WeightDecayMode,
    "bounds_check_mode": BoundsCheckMode,
    "weights_precision": SparseType,
    "output_dtype": SparseType,
    "pooling_mode": PoolingMode,
}
# Unit roundoff of fp32: one rounding to nearest is wrong by at most U times its result.
U = 2.0**-24


@dataclass(frozen=True)
class Case:
    """One module and one batch. `batch_sizes` [F][ranks] is set under VBE only; `lengths` has one entry a bag."""

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    feature_table_map: tuple[int, ...]
    lengths: tuple[int, ...]
    batch_sizes: tuple[tuple[int, ...], ...] | None = None
    weighted: bool = False
    mean: bool = False
    ids: str = "uniform"  # uniform | equal | skewed | distinct
    pruned: bool = False
    weights_precision: str = "FP32"
    output_dtype: str = "FP32"
    index_dtype: torch.dtype = torch.int64
    offset_dtype: torch.dtype = torch.int64
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def feature_dims(self) -> list[int]:
        return [self.dims[t] for t in self.feature_table_map]

    @property
    def output_size(self) -> int:
        if self.batch_sizes is None:
            return len(self.lengths) // len(self.feature_table_map) * sum(self.feature_dims)
        return sum(sum(row) * dim for row, dim in zip(self.batch_sizes, self.feature_dims, strict=True))

    def with_options(self, **options: Any) -> Case:
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class Batch:
    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    grad_output: Tensor

    def kwargs(self, case: Case) -> dict[str, Any]:
        """Keywords of the operator's forward beside ids and offsets."""
        return {
            "per_sample_weights": self.per_sample_weights,
            "batch_size_per_feature_per_rank": case.batch_sizes and [list(row) for row in case.batch_sizes],
        }


def multiples(step: float, low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """fp32 multiples of `step` between low * step and high * step."""
    return torch.randint(low, high + 1, shape, generator=generator).float() * step


def table_values(case: Case) -> list[Tensor]:
    """fp32 weights of each table, exact in the case's precision."""
    generator = torch.Generator().manual_seed(case.seed)
    return [multiples(0.125, -16, 16, shape, generator) for shape in zip(case.rows, case.dims, strict=True)]


def make_batch(case: Case, device: torch.device | str, step: int = 0) -> Batch:
    """The case's batch; each `step` has other contents and the same lengths."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    per_feature = _bags_per_feature(case)
    ids, first = [], 0
    for table, bags in zip(case.feature_table_map, per_feature, strict=True):
        count = sum(case.lengths[first : first + bags])
        first += bags
        ids.append(_ids(case, count, case.rows[table], generator))
    indices = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
    if case.pruned and indices.numel():
        indices[torch.rand(indices.shape, generator=generator) < 0.25] = -1
    offsets = torch.tensor([0, *case.lengths]).cumsum(0)
    shape = (case.output_size,)
    if case.batch_sizes is None:
        shape = (len(case.lengths) // len(case.feature_table_map), sum(case.feature_dims))
    weights = multiples(0.25, -8, 8, tuple(indices.shape), generator) if case.weighted else None
    return Batch(
        indices.to(device, case.index_dtype),
        offsets.to(device, case.offset_dtype),
        None if weights is None else weights.to(device),
        multiples(0.125, -16, 16, shape, generator).to(device, DTYPES[case.output_dtype]),
    )


def _bags_per_feature(case: Case) -> list[int]:
    if case.batch_sizes is not None:
        return [sum(row) for row in case.batch_sizes]
    return [len(case.lengths) // len(case.feature_table_map)] * len(case.feature_table_map)


def _ids(case: Case, count: int, rows: int, generator: torch.Generator) -> Tensor:
    if case.ids == "equal":
        return torch.full((count,), rows - 1)
    if case.ids == "distinct":
        return torch.arange(count) % rows
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    if case.ids == "skewed":  # log-uniform, close to Zipf's law: low ids are hot
        return ((rows + 1.0) ** uniform - 1).long().clamp(max=rows - 1)
    return (uniform * rows).long().clamp(max=rows - 1)


def specs(rows: Any, dims: Any, device: torch.device | str) -> list[tuple[int, int, EmbeddingLocation, ComputeDevice]]:
    """FBGEMM's embedding_specs for tables that lie wholly on `device`."""
    on_gpu = torch.device(device).type == "cuda"
    location = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    return [(count, dim, location, compute) for count, dim in zip(rows, dims, strict=True)]


def build(case: Case, device: torch.device | str, cls: type = TritonTableBatchedEmbeddingBags, **options: Any) -> Any:
    """A module of class `cls` with the case's tables and options; enum members may be given by name."""
    keys = {
        "weights_precision": case.weights_precision,
        "output_dtype": case.output_dtype,
        "pooling_mode": "MEAN" if case.mean else "SUM",
        **OPTIONS,
        **case.options,
        **options,
    }
    keys = {key: ENUMS[key][value] if isinstance(value, str) else value for key, value in keys.items()}
    module = cls(
        specs(case.rows, case.dims, device),
        feature_table_map=list(case.feature_table_map),
        device=torch.device(device),
        **keys,
    )
    for weights, values in zip(module.split_embedding_weights(), table_values(case), strict=True):
        weights.data.copy_(values)
    return module


class Contents(NamedTuple):
    tables: list[Tensor]
    states: list[Tensor]


def contents(module: Any) -> Contents:
    """Copies of the tables, in their own dtype, and of the row-wise states (zeros under SGD, which has none)."""
    tables = [weights.detach().clone() for weights in module.split_embedding_weights()]
    if module.optimizer == OptimType.EXACT_SGD:
        return Contents(tables, [torch.zeros(t.shape[0], device=t.device) for t in tables])
    return Contents(tables, [state[0].detach().clone() for state in module.split_optimizer_states()])


def same_bits(a: Contents, b: Contents) -> bool:
    pairs = zip((*a.tables, *a.states), (*b.tables, *b.states), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of `dtype` at x (its unit in the last place), fp64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.double().abs().clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)


def step(module: Any, case: Case, batch: Batch) -> Tensor:
    """Forward and backward; the output."""
    out = module(batch.indices, batch.offsets, **batch.kwargs(case))
    out.backward(batch.grad_output)
    return out.detach()


def check_output(case: Case, batch: Batch, before: Contents, out: Tensor, exact: bool) -> None:
    """`exact`: the contents are multiples of a power of two, so that a sum has one right value."""
    args = (case.feature_table_map, batch.indices, batch.offsets)
    layout = {"mean": case.mean, "batch_sizes": case.batch_sizes}
    expected = lookup_reference(before.tables, *args, batch.per_sample_weights, **layout)
    assert out.dtype == DTYPES[case.output_dtype] and out.shape == expected.shape
    if exact and not case.mean:
        assert torch.equal(out, expected.to(out.dtype))
        return
    # n terms are added with at most n roundings (with a product and a division: n + 2), each within U of the sum of
    # magnitudes; then the output is rounded once.
    weights = None if batch.per_sample_weights is None else batch.per_sample_weights.abs()
    magnitude = lookup_reference([t.abs() for t in before.tables], *args, weights, **layout)
    error = (max(case.lengths, default=0) + 2) * U * magnitude
    bound = error + 0.5 * spacing(expected.abs() + error, out.dtype)
    assert_within(out, expected, bound, "output")


def _hyper_parameters(case: Case) -> dict[str, Any]:
    options = {"weight_decay": 0.0, "weight_decay_mode": "NONE", **OPTIONS, **case.options}
    keys = ("optimizer", "learning_rate", "eps", "weight_decay", "weight_decay_mode")
    clip = options["max_gradient"] if options.get("gradient_clipping") else None
    return {**{key: options[key] for key in keys}, "max_gradient": clip}


def check_update(
    case: Case, batch: Batch, before: Contents, after: Contents, exact: bool, stochastic: bool = False
) -> None:
    """Tables and states after one backward against the reference; rows that were not looked up keep their bits."""
    hyper = _hyper_parameters(case)
    layout = {"mean": case.mean, "batch_sizes": case.batch_sizes}
    args = (before.tables, case.feature_table_map, batch.indices, batch.offsets)
    update = update_reference(
        before.tables, before.states, *args[1:], batch.grad_output, batch.per_sample_weights, **layout, **hyper
    )
    weights = None if batch.per_sample_weights is None else batch.per_sample_weights.abs()
    clip = hyper["max_gradient"]
    gradients, _ = row_gradients_reference(
        *args, batch.grad_output, batch.per_sample_weights, max_gradient=clip, **layout
    )
    magnitudes, _ = row_gradients_reference(*args, batch.grad_output.abs(), weights, max_gradient=clip, **layout)
    counts, _ = row_gradients_reference(
        *args, torch.ones_like(batch.grad_output, dtype=torch.float64), batch_sizes=case.batch_sizes
    )
    for t, table in enumerate(before.tables):
        untouched = ~update.touched[t]
        assert torch.equal(after.tables[t][untouched], table[untouched]), (
            f"table {t}: a row that was not looked up moved"
        )
        assert torch.equal(after.states[t][untouched], before.states[t][untouched]), f"table {t}: so did its state"
        # Of n terms, each scaled (one rounding, two under MEAN) before it is added.
        gradient_error = (counts[t] + 2) * U * magnitudes[t] if case.mean or not exact else torch.zeros_like(counts[t])
        weight_error, state_error = update_errors(table, gradients[t], gradient_error, update.states[t], **hyper)
        assert_within(after.states[t], update.states[t], state_error, f"state of table {t}")
        dtype = table.dtype
        # Rounding to nearest is off by half a unit in the last place at most, stochastic rounding by less than one.
        units = 1.0 if stochastic and dtype != torch.float32 else 0.5
        bound = weight_error + units * spacing(update.tables[t].abs() + weight_error, dtype)
        assert_within(after.tables[t], update.tables[t], bound, f"weights of table {t}")


def update_errors(
    weights: Tensor,
    gradient: Tensor,
    gradient_error: Tensor,
    new_state: Tensor,
    *,
    optimizer: str,
    learning_rate: float,
    eps: float,
    weight_decay: float,
    weight_decay_mode: str,
    max_gradient: float | None,
) -> tuple[Tensor, Tensor]:
    """How far fp32 may take a row's weights [rows, D] (before the last rounding) and state [rows] from the exact step.

    Every fp32 operation adds U relative: D squares and their sum, the division by D and the addition to the state make
    D + 3; root, addition of eps, division and the hyper-parameters' own rounding make 8; the last two operations on the
    weight 4. Errors of G reach the state through 2 |G| dG and the weight directly; those of the state reach the weight
    through half their relative size.
    """
    weights, dim = weights.double(), max(1, weights.shape[1])
    if optimizer == "EXACT_SGD":
        moved = learning_rate * gradient.abs()
        return learning_rate * gradient_error + 4 * U * (moved + weights.abs()), torch.zeros_like(new_state)
    decayed = gradient.abs() + (weight_decay * weights.abs() if weight_decay_mode == "L2" else 0.0)
    state_error = (2 * decayed * gradient_error + gradient_error**2 + 4 * U * decayed**2).mean(1) + (
        dim + 3
    ) * U * new_state
    relative = 8 * U + torch.where(
        new_state > 0, state_error / (2 * new_state.clamp(min=1e-300)), torch.zeros(()).to(new_state)
    )
    scale = torch.where(
        new_state.sqrt() + eps > 0, learning_rate / (new_state.sqrt() + eps), torch.zeros(()).to(new_state)
    )
    moved = scale[:, None] * decayed
    return scale[:, None] * gradient_error + moved * relative[:, None] + 4 * U * (moved + weights.abs()), state_error


def check_weight_gradient(case: Case, batch: Batch, before: Contents, gradient: Tensor, mask: Any = None) -> None:
    hyper = _hyper_parameters(case)
    args = (case.feature_table_map, batch.indices, batch.offsets)
    layout = {"batch_sizes": case.batch_sizes, "max_gradient": hyper["max_gradient"], "feature_requires_grad": mask}
    expected = weight_gradients_reference(before.tables, *args, batch.grad_output, **layout)
    magnitude = weight_gradients_reference([t.abs() for t in before.tables], *args, batch.grad_output.abs(), **layout)
    # D products and their sum.
    assert_within(gradient, expected, (max(case.dims) + 1) * U * magnitude, "gradient of the per-sample weights")


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor, what: str) -> None:
    if actual.numel() == 0:
        assert actual.shape == expected.shape
        return
    excess = (actual.double() - expected).abs() - bound
    worst = excess.nan_to_num(nan=torch.inf).argmax()
    assert excess.flatten()[worst] <= 0, (
        f"{what}: {actual.flatten()[worst].item()} instead of {expected.flatten()[worst].item()}, "
        f"off by more than {bound.expand_as(expected).flatten()[worst].item():.3g} at flat index {worst.item()}"
    )


def compiled_kernels() -> int:
    """How many variants Triton has compiled for this device, over all kernels of the package."""
    import triton

    from torchrec_triton.kernels import backward, bounds_check, common, forward, transpose

    modules: list[ModuleType] = [backward, bounds_check, common, forward, transpose]
    functions = {id(f): f for m in modules for f in vars(m).values() if isinstance(f, triton.runtime.jit.JITFunction)}
    return sum(len(f.device_caches[torch.cuda.current_device()][0]) for f in functions.values())
