"""Batches for the operator's tests: shapes drawn by hypothesis, contents by a seeded generator.

All contents are small multiples of a power of two: weights and gradients of 1/8, per-sample weights of 1/4. They are
exact in fp32, fp16 and bf16. A product is at most 4 and a multiple of 1/64, so sums of up to 2^16 products are exact in
fp32, in any order. Hence outputs under SUM, row gradients and per-sample weight gradients have one right value, bit for
bit, and only MEAN and the optimizer need a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
# Powers of two and their neighbours among the multiples of 4, one that needs three 16-byte loads, one wide.
DIMS = (4, 8, 12, 20, 32, 36, 64, 100, 128, 132, 260)
MAX_BAGS = 60
MAX_IDS = 400


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
    if case.ids == "skewed":
        uniform = uniform**4
    return (uniform * rows).long().clamp(max=rows - 1)


@st.composite
def cases(
    draw: st.DrawFn,
    vbe: bool | None = None,
    weighted: bool | None = None,
    mean: bool | None = None,
    precisions: tuple[str, ...] = tuple(DTYPES),
    output_dtypes: tuple[str, ...] = tuple(DTYPES),
    pruned: bool | None = None,
    max_bags: int = MAX_BAGS,
) -> Case:
    """Any batch the operator takes; a keyword that is None is drawn. MEAN is never weighted."""
    tables = draw(st.integers(1, 3))
    rows = draw(st.lists(st.sampled_from((1, 2, 3, 7, 50, 1000)), min_size=tables, max_size=tables))
    dims = draw(st.lists(st.sampled_from(DIMS), min_size=tables, max_size=tables))
    # Every table is read at least once; further features share tables.
    shared = draw(st.lists(st.integers(0, tables - 1), max_size=2))
    feature_table_map = draw(st.permutations(list(range(tables)) + shared))
    features = len(feature_table_map)
    batch_sizes = None
    if draw(st.booleans()) if vbe is None else vbe:
        ranks = draw(st.integers(1, 3))
        most = max(1, min(6, max_bags // (features * ranks)))
        row = st.lists(st.integers(0, most), min_size=ranks, max_size=ranks).map(tuple)
        batch_sizes = tuple(draw(st.lists(row, min_size=features, max_size=features)))
        bags = sum(map(sum, batch_sizes))
    else:
        bags = features * draw(st.integers(0, max_bags // features))
    lengths = draw(_lengths(bags))
    is_mean = draw(st.booleans()) if mean is None else mean
    is_weighted = (not is_mean) and (draw(st.booleans()) if weighted is None else weighted)
    integer = st.sampled_from((torch.int64, torch.int32))
    return Case(
        rows=tuple(rows),
        dims=tuple(dims),
        feature_table_map=tuple(feature_table_map),
        lengths=tuple(lengths),
        batch_sizes=batch_sizes,
        weighted=is_weighted,
        mean=is_mean,
        ids=draw(st.sampled_from(("uniform", "equal", "skewed", "distinct"))),
        pruned=draw(st.booleans()) if pruned is None else pruned,
        weights_precision=draw(st.sampled_from(precisions)),
        output_dtype=draw(st.sampled_from(output_dtypes)),
        index_dtype=draw(integer),
        offset_dtype=draw(integer),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def _lengths(draw: st.DrawFn, bags: int) -> list[int]:
    """Lengths of the bags: all empty, all alike, mixed, or one long bag among short ones; MAX_IDS in all."""
    if bags == 0:
        return []
    shape = draw(st.sampled_from(("empty", "alike", "mixed", "long")))
    most = max(1, min(12, MAX_IDS // bags))
    if shape == "empty":
        return [0] * bags
    if shape == "alike":
        return [draw(st.integers(0, most))] * bags
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    lengths: list[int] = torch.randint(0, most + 1, (bags,), generator=generator).tolist()
    if shape == "long":
        lengths[draw(st.integers(0, bags - 1))] = 300
    return lengths
