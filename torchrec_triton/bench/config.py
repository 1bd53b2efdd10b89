"""What a benchmark run measures, as frozen dataclasses read from YAML: limits of the card, shapes, counts, time."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import yaml

from torchrec_triton import config as base
from torchrec_triton.config import Bounds, ConfigError, Count, NonNegative
from torchrec_triton.support import MAX_DIM


class _Some:
    """Lists with something in them."""

    def __contains__(self, values: Sized) -> bool:
        return len(values) > 0

    def __str__(self) -> str:
        return "one value and more"


Size = Annotated[int, Bounds(1, below=1e9)]
Sizes = Annotated[tuple[Size, ...], _Some()]
Dims = Annotated[tuple[Annotated[int, Bounds(4, below=MAX_DIM + 1, step=4)], ...], _Some()]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A measured limit. source: how it was measured."""

    terabytes_per_second: Annotated[float, Bounds(1e-3)]
    source: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """Limits of one GPU model. name: as torch.cuda.get_device_name says it. The floor takes copy and l2_gather;
    memory_gather says how near random rows can come to it."""

    name: str
    copy: Rate
    l2_gather: Rate
    memory_gather: Rate


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All combinations of four axes: bag size, Zipf exponent (0: uniform), batch, dim. data_type: of the weights."""

    pooling: Sizes
    alpha: Annotated[tuple[NonNegative, ...], _Some()]
    batch: Sizes
    dim: Dims
    weighted: bool = False
    vbe: bool = False
    data_type: base.DataType = "FP16"


@dataclass(frozen=True, kw_only=True)
class GridTables:
    """rows: of the tables of a grid shape, one feature each. most_ids: a shape of more ids keeps its pooling and batch
    and drops tables from the end, down to one."""

    rows: Sizes
    most_ids: Size


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One table of `dim`, ids uniform, its rows chosen so that rows occur `mean_run` times on average."""

    dim: Dims
    mean_run: Sizes
    batch: Size = 65536
    pooling: Size = 20


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Shapes and effort of a run. real: names of real workloads. counted: timed runs a side; batches: they rotate
    through; host_runs: runs of the host column; seconds: after which no new shape begins; first_step: time the first
    step of a model with an empty cache."""

    real: tuple[str, ...]
    sweep: tuple[Sweep, ...] = ()
    grid: tuple[Grid, ...] = ()
    counted: Annotated[int, Bounds(3)] = 11
    batches: Annotated[int, Bounds(3)] = 3
    host_runs: Count = 11
    seconds: Annotated[float, Bounds(1)] = 540.0
    first_step: bool = False


@dataclass(frozen=True, kw_only=True)
class Bench:
    """quick: the suite of --quick."""

    card: Card
    grid_tables: GridTables
    full: Suite
    quick: Suite = field(default_factory=lambda: Suite(real=()))

    def __post_init__(self) -> None:
        if self.full.counted < 10:
            raise ConfigError(f"full.counted: {self.full.counted} is too few; quoted figures need 10 runs or more")


def load(path: str | Path) -> Bench:
    """Read and check a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a key or value in it is wrong.
    """
    try:
        return base.build(Bench, yaml.load(Path(path).read_text(encoding="utf-8"), Loader=base._Loader))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
