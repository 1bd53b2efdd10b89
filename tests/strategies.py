"""Strategies over the batches that the operator takes: shapes are drawn, contents follow from a drawn seed."""

from __future__ import annotations

import torch
from harness import DTYPES, Case
from hypothesis import strategies as st

# Powers of two and their neighbours among the multiples of 4, one that needs three 16-byte loads, one wide.
DIMS = (4, 8, 12, 20, 32, 36, 64, 100, 128, 132, 260)
MAX_BAGS = 60
MAX_IDS = 400


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
    min_batch: int = 0,
) -> Case:
    """Any batch the operator takes; a keyword that is None is drawn. MEAN is never weighted.

    min_batch: fewest bags of a feature, under VBE on each rank.
    """
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
        row = st.lists(st.integers(min_batch, most), min_size=ranks, max_size=ranks).map(tuple)
        batch_sizes = tuple(draw(st.lists(row, min_size=features, max_size=features)))
        bags = sum(map(sum, batch_sizes))
    else:
        bags = features * draw(st.integers(min_batch, max_bags // features))
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
