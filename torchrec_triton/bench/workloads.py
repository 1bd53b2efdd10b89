"""The shapes that are measured: real ones first, then a grid. Sources stand beside each."""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Workload:
    """One shape. rows, dims, pooling (mean bag size): a value a table, one feature a table.

    alpha: exponent of the Zipf law of the ids, 0 for uniform.
    jagged: bag sizes are Poisson, not all equal to their mean.
    """

    name: str
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    pooling: tuple[int, ...]
    batch: int
    alpha: float = 0.0
    weighted: bool = False
    jagged: bool = False

    @property
    def num_ids(self) -> int:
        return self.batch * sum(self.pooling)


@dataclass(frozen=True)
class Batch:
    """indices int64 [N], offsets int64 [T * B + 1], weights fp32 [N] or None."""

    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


def _zipf(count: int, rows: int, alpha: float, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Zipf ranks by the inverse of the continuous law, scattered over the table: real hot rows are not neighbours."""
    u = torch.rand(count, dtype=torch.float64, generator=generator, device=device)
    if alpha == 0:
        return (u * rows).long().clamp_(max=rows - 1)
    power = 1.0 - alpha
    rank = (u * ((rows + 1.0) ** power - 1.0) + 1.0).pow_(1.0 / power).long().sub_(1).clamp_(0, rows - 1)
    step = next(s for s in range(int(rows * 0.618) | 1, 2 * rows + 3, 2) if math.gcd(s, rows) == 1)
    return (rank * step) % rows


def make_batch(workload: Workload, seed: int, device: torch.device) -> Batch:
    """A random batch; equal seeds give equal batches."""
    generator = torch.Generator(device=device).manual_seed(seed)
    lengths = []
    for pooling in workload.pooling:
        if workload.jagged:
            mean = torch.full((workload.batch,), float(pooling), device=device)
            lengths.append(torch.poisson(mean, generator=generator).long())
        else:
            lengths.append(torch.full((workload.batch,), pooling, dtype=torch.int64, device=device))
    indices = torch.cat(
        [
            _zipf(int(length.sum()), rows, workload.alpha, generator, device)
            for length, rows in zip(lengths, workload.rows)
        ]
    )
    offsets = torch.zeros(len(lengths) * workload.batch + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.cat(lengths), 0, out=offsets[1:])
    weights = torch.rand(indices.numel(), generator=generator, device=device) if workload.weighted else None
    return Batch(indices, offsets, weights)


def _ints(text: str) -> tuple[int, ...]:
    """"3 128x26" -> (3, 128, 128, ...)."""
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


def real() -> Iterator[Workload]:
    """The real workloads, at the sizes that are reported."""
    for batch in (65536, 8192):
        yield replace(PROD66, name=f"prod66 B={batch}", batch=batch)
    yield replace(CMF_EBC, name="cmf_ebc B=65536 uniform")
    yield replace(CMF_EBC, name="cmf_ebc B=65536 zipf 1.05", alpha=1.05)
    yield replace(CMF_EBC, name="cmf_ebc B=65536 weighted", weighted=True)
    for batch in (65536, 8192, 512):
        yield replace(CLI32, name=f"cli32 B={batch}", batch=batch)
    yield replace(CLI32, name="cli32 B=65536 weighted", weighted=True)
    yield replace(DLRM26, name="dlrm26 one-hot B=8192")
    yield replace(DLRM26_MULTI, name="dlrm26 multi-hot B=8192 zipf")
    yield WIDE20
