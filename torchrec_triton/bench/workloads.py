"""The shapes that are measured: real ones, a launch-bound one, run-length sweeps, and a grid."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchrec_triton.bench.config import Grid, GridTables, Suite, Sweep
from torchrec_triton.config import ConfigError, _choices


@dataclass(frozen=True)
class Workload:
    """One shape. rows, dims, pooling (mean bag size): a value a table, one feature a table.

    batch: bags a feature; under VBE of the largest feature.
    alpha: exponent of the Zipf law of the ids, 0 for uniform.
    jagged: bag sizes are Poisson, not all equal to their mean.
    vbe: features differ in batch size, and two ranks share each feature's bags.
    data_type: of the weights.
    group: real, launch, sweep or grid.
    """

    name: str
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    pooling: tuple[int, ...]
    batch: int
    alpha: float = 0.0
    weighted: bool = False
    jagged: bool = False
    vbe: bool = False
    data_type: str = "FP16"
    group: str = "real"

    @property
    def tables(self) -> tuple[Any, ...]:
        """What shapes have in common that can be measured on one pair of modules."""
        return self.rows, self.dims, self.data_type

    def small(self) -> Workload:
        """A step of so few bags of the same tables that what it takes of memory is nothing beside this shape."""
        return replace(self, batch=8)

    @property
    def bags(self) -> tuple[int, ...]:
        """Bags of each feature. VBE: batch, 7/8, 6/8 and 5/8 of it, in turn."""
        step = self.batch // 8 if self.vbe else 0
        return tuple(self.batch - f % 4 * step for f in range(len(self.rows)))

    @property
    def batch_sizes(self) -> list[list[int]] | None:
        """FBGEMM's batch_size_per_feature_per_rank: 3/8 of the bags on the first rank, 5/8 on the second."""
        return [[b * 3 // 8, b - b * 3 // 8] for b in self.bags] if self.vbe else None

    @property
    def num_ids(self) -> int:
        """Lookups of a batch; of jagged bags their mean."""
        return sum(b * p for b, p in zip(self.bags, self.pooling))

    @property
    def output_shape(self) -> tuple[int, ...]:
        size = sum(b * d for b, d in zip(self.bags, self.dims))
        return (size,) if self.vbe else (self.batch, size // self.batch)

    def feature(self, output: torch.Tensor, f: int) -> torch.Tensor:
        """[bags of f, D] of an output or its gradient: columns, or under VBE the blocks of both ranks."""
        if self.batch_sizes is None:
            begin = sum(self.dims[:f])
            return output.view(self.batch, -1)[:, begin : begin + self.dims[f]]
        sizes = [bags * d for rank in zip(*self.batch_sizes) for bags, d in zip(rank, self.dims)]
        blocks = output.split(sizes)[f :: len(self.dims)]
        return torch.cat([block.view(-1, self.dims[f]) for block in blocks])


@dataclass(frozen=True)
class Batch:
    """indices int64 [N], offsets int64 [bags + 1], weights fp32 [N] or None, batch_sizes [F][ranks] or None."""

    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    batch_sizes: list[list[int]] | None = None


def _ids(count: int, rows: int, alpha: float, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Zipf ranks by the inverse of the continuous law, scattered over the table: real hot rows are not neighbours."""
    u = torch.rand(count, dtype=torch.float64, generator=generator, device=device)
    if alpha == 0:
        return (u * rows).long().clamp_(max=rows - 1)
    power = 1.0 - alpha
    rank = ((u * ((rows + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power) if power else (rows + 1.0) ** u).long() - 1
    step = next(s for s in range(int(rows * 0.618) | 1, 2 * rows + 3, 2) if math.gcd(s, rows) == 1)
    return rank.clamp_(0, rows - 1) * step % rows


def make_batch(workload: Workload, seed: int, device: torch.device) -> Batch:
    """A random batch; equal seeds give equal batches."""
    generator = torch.Generator(device=device).manual_seed(seed)
    lengths = []
    for bags, pooling in zip(workload.bags, workload.pooling):
        if workload.jagged:
            mean = torch.full((bags,), float(pooling), device=device)
            lengths.append(torch.poisson(mean, generator=generator).long())
        else:
            lengths.append(torch.full((bags,), pooling, dtype=torch.int64, device=device))
    indices = torch.cat(
        [
            _ids(int(length.sum()), rows, workload.alpha, generator, device)
            for length, rows in zip(lengths, workload.rows)
        ]
    )
    offsets = torch.zeros(sum(workload.bags) + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.cat(lengths), 0, out=offsets[1:])
    weights = torch.rand(indices.numel(), generator=generator, device=device) if workload.weighted else None
    return Batch(indices, offsets, weights, workload.batch_sizes)


def _ints(text: str) -> tuple[int, ...]:
    """Of "3 128x26" it makes (3, 128, 128, ...)."""
    values: list[int] = []
    for token in text.split():
        value, _, times = token.partition("x")
        values += [int(value)] * int(times or 1)
    return tuple(values)


# The 66-table shard of the reproduction command in torchrec pull request 4548.
PROD66 = Workload(
    "prod66",
    rows=_ints(
        "13164873x2 1000 49537 13164873x4 61791 524757 7685380 51920 1000 13164873 500000 19327 72993 5000 13164873 "
        "132058 773 294 679 195677 13164873 80855 16992630 5000 189056 5000 8000000 102 113 600741 5000 29325 285698 "
        "1005371 50000 30726 607 308 591 621 727 648 390 449 678 708 726 581 137 100x2 728 328 724 429 570 192 5000 "
        "511788 2x3"
    ),
    dims=_ints("128x26 64 128x13 8x21 128x2 4x3"),
    pooling=_ints("120 86x2 83 77x2 70 47 43 34 24 22 20 15 11x2 8 7x3 5x5 4 5 3 2 1x11 5x21 1x5"),
    batch=65536,
)
# 15 tables traced from a production model, torchrec pull request 4685.
CMF_EBC = Workload(
    "cmf_ebc",
    rows=_ints(
        "2144222 9692111 7153649 3780603 3745277 5284712 5941361 2688465 4102227 1437625 1859649 26408384 2152945 "
        "2372867 8740201"
    ),
    dims=_ints("64 40 64 72 40x2 72 88 56 80x2 48 112 96 56"),
    pooling=_ints("29x15"),
    batch=65536,
)
# FBGEMM's benchmark default.
CLI32 = Workload("cli32", rows=_ints("100000x32"), dims=_ints("128x32"), pooling=_ints("20x32"), batch=65536)
# Criteo terabyte cardinalities capped at 10 M; multi-hot sizes of MLPerf's DLRM-DCNv2.
_CRITEO = _ints(
    "10000000 39060 17295 7424 20265 3 7122 1543 63 10000000 3067956 405282 10 2209 11938 155 4 976 14 10000000x3 "
    "590152 12973 108 36"
)
DLRM26 = Workload("dlrm26 one-hot", rows=_CRITEO, dims=_ints("128x26"), pooling=_ints("1x26"), batch=8192)
DLRM26_MULTI = replace(
    DLRM26, name="dlrm26 multi-hot", alpha=1.05, pooling=_ints("3 2 1 2 6 1x4 7 3 8 1 6 9 5 1x3 12 100 27 10 3 1x2")
)
WIDE20 = Workload("20 x 1M D=256", _ints("1000000x20"), _ints("256x20"), _ints("30x20"), batch=4096, weighted=True)
_ROUNDS = 3
# So little work that the host's time a call is what a step takes.
_LAUNCH = Workload("launch-bound D=128", _ints("10000x8"), _ints("128x8"), _ints("4x8"), batch=64, group="launch")


def real() -> Iterator[Workload]:
    """The real workloads, at the sizes that are reported. Those that share their tables stand together."""
    for batch in (65536, 8192):
        yield replace(PROD66, name=f"prod66 B={batch}", batch=batch)
        yield replace(PROD66, name=f"prod66 B={batch} weighted", batch=batch, weighted=True)
    yield replace(CMF_EBC, name="cmf_ebc B=65536 uniform")
    yield replace(CMF_EBC, name="cmf_ebc B=65536 zipf 1.05", alpha=1.05)
    yield replace(CMF_EBC, name="cmf_ebc B=65536 weighted", weighted=True)
    for batch in (65536, 8192, 512):
        yield replace(CLI32, name=f"cli32 B={batch}", batch=batch)
    yield replace(CLI32, name="cli32 B=65536 weighted", weighted=True)
    for batch in (65536, 8192):
        yield replace(CLI32, name=f"cli32 B={batch} fp32", batch=batch, data_type="FP32")
    yield replace(DLRM26, name="dlrm26 one-hot B=8192")
    yield replace(DLRM26_MULTI, name="dlrm26 multi-hot B=8192 zipf")
    yield WIDE20


def launch_bound() -> Iterator[Workload]:
    yield _LAUNCH
    yield replace(_LAUNCH, name="launch-bound mixed D", dims=_ints("32x2 64x3 128x3"))


def sweep(axes: Sweep) -> Iterator[Workload]:
    """One table a shape. N uniform ids over E rows hit E (1 - exp(-N / E)) of them, so a mean run r wants
    r = l / (1 - exp(-l)) with l = N / E. A mean of exactly 1 would want endless rows: 1.05 stands for it."""
    ids = axes.batch * axes.pooling
    for dim, run in itertools.product(axes.dim, axes.mean_run):
        goal = load = max(run, 1.05)
        for _ in range(1000):
            load = goal * (1 - math.exp(-load))
        rows = max(1, round(ids / load))
        yield Workload(f"run {run} D={dim}", (rows,), (dim,), (axes.pooling,), axes.batch, group="sweep")


def grid(axes: Grid, tables: GridTables) -> Iterator[Workload]:
    """Every combination of the axes, those that share their tables together."""
    flags = (" weighted" if axes.weighted else "") + (" VBE" if axes.vbe else "")
    flags += "" if axes.data_type == "FP16" else f" {axes.data_type.lower()}"
    for dim, pooling, batch, alpha in itertools.product(axes.dim, axes.pooling, axes.batch, axes.alpha):
        count = min(len(tables.rows), max(1, tables.most_ids // (pooling * batch)))
        yield Workload(
            f"L={pooling} zipf={alpha:g} B={batch} D={dim}{flags}",
            rows=tables.rows[:count],
            dims=(dim,) * count,
            pooling=(pooling,) * count,
            batch=batch,
            alpha=alpha,
            weighted=axes.weighted,
            vbe=axes.vbe,
            data_type=axes.data_type,
            group="grid",
        )


def workloads(suite: Suite, tables: GridTables) -> list[Workload]:
    """All shapes of a suite, in the order in which they run. The grid comes in rounds, so that a run that is cut short
    has shapes of every kind; within a round those that share their tables stand together.

    Raises:
        ConfigError: there is no real workload of a name, two shapes have one name, or one has too many ids.
    """
    known = {workload.name: workload for workload in real()}
    if unknown := [name for name in suite.real if name not in known]:
        raise ConfigError(f"real: {unknown[0]!r} is no real workload; {_choices(unknown[0], known)}")
    shapes = [known[name] for name in known if name in suite.real]
    shapes += launch_bound()
    shapes += itertools.chain.from_iterable(map(sweep, suite.sweep))
    cells = itertools.chain.from_iterable(grid(axes, tables) for axes in suite.grid)
    shapes += sorted(cells, key=lambda w: (zlib.crc32(w.name.encode()) % _ROUNDS, w.dims, w.rows, w.data_type))
    names = [shape.name for shape in shapes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"grid, sweep: the shape {twice[0]!r} is there twice")
    if large := [shape for shape in shapes if shape.num_ids >= 2**31]:
        found = f"{large[0].name!r} has {large[0].num_ids:,} ids"
        raise ConfigError(f"grid, sweep: {found}; allowed: below {2**31:,} (pooling times batch times tables)")
    return shapes
