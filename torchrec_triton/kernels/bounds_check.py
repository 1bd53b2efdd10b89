"""Checks and repairs ids and offsets in place, as FBGEMM's WARNING and IGNORE modes do.

An id outside [0, rows of its table) that is not -1 becomes 0. Offsets that are negative or pass the number of ids are
clamped, one below an earlier one is raised to it, and the last is set to the number of ids. Each repair is counted.

The ids are walked by position, not by bag: a tile of them lies in one feature, or few, which one search finds. So the
check costs one read of the ids, at the speed of the memory.
"""
from __future__ import annotations

import triton
import triton.language as tl

from torchrec_triton.kernels.common import FEATURE_FIELDS, begin_kernel


@triton.jit(do_not_specialize=["num_bags", "num_ids"], do_not_specialize_on_alignment=["offsets"])
def check_offsets_kernel(offsets, repairs, num_bags, num_ids, TILE: tl.constexpr, EARLY: tl.constexpr):
    """Repairs the offsets of TILE bags a program and adds the number of bags that needed it to `repairs`."""
    begin_kernel(EARLY)
    bag = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = bag < num_bags
    begin = tl.load(offsets + bag, mask=live, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=live, other=0).to(tl.int64)
    wrong = live & ((begin < 0) | (begin > end) | (end > num_ids))
    short = live & (bag == num_bags - 1) & (end != num_ids)
    count = tl.sum((wrong | short).to(tl.int64), axis=0)
    if count > 0:
        # A running maximum, which features rely on to be in order. Maxima commute, so neighbouring programs may mix.
        most = (tl.zeros([TILE], tl.int64) + num_ids).to(offsets.dtype.element_ty)
        floor = tl.minimum(tl.maximum(begin, 0), num_ids).to(offsets.dtype.element_ty)
        tl.atomic_max(offsets + bag, floor, mask=wrong)
        tl.atomic_min(offsets + bag, most, mask=wrong)
        tl.store(offsets + bag + 1, most, mask=short)
        at = bag + 1
        behind = wrong
        while tl.max(behind.to(tl.int32), axis=0) > 0:
            behind = behind & (at <= num_bags)
            behind = behind & (tl.load(offsets + at, mask=behind, other=0) < floor)
            tl.atomic_max(offsets + at, floor, mask=behind)
            at += 1
        tl.atomic_add(repairs, count)


@triton.jit(
    do_not_specialize=["batch_size", "num_ids", "num_features"], do_not_specialize_on_alignment=["indices", "offsets"]
)
def check_ids_kernel(
    indices,
    offsets,
    batch_offsets,  # VBE: [F + 1], first bag of each feature
    feature_meta,
    repairs,
    batch_size,
    num_ids,
    num_features,
    TILE: tl.constexpr,
    VBE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Repairs TILE ids a program and adds the number of repairs to `repairs`."""
    begin_kernel(EARLY)
    start = tl.program_id(0).to(tl.int64) * TILE
    i = start + tl.arange(0, TILE)
    live = i < num_ids
    ids = tl.load(indices + i, mask=live, other=-1).to(tl.int64)
    # The last feature that begins at or before the tile.
    low = num_features * 0
    high = num_features - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _feature_begin(middle, offsets, batch_offsets, batch_size, VBE) <= start:
            low = middle
        else:
            high = middle - 1
    rows = tl.zeros([TILE], tl.int64) + tl.load(feature_meta + low * FEATURE_FIELDS + 1)
    low += 1
    while low < num_features:
        begin = _feature_begin(low, offsets, batch_offsets, batch_size, VBE)
        rows = tl.where(i >= begin, tl.load(feature_meta + low * FEATURE_FIELDS + 1), rows)
        low = tl.where(begin >= start + TILE, num_features, low + 1)
    wrong = live & ((ids < 0) | (ids >= rows)) & (ids != -1)
    count = tl.sum(wrong.to(tl.int64), axis=0)
    if count > 0:
        tl.store(indices + i, tl.zeros([TILE], indices.dtype.element_ty), mask=wrong)
        tl.atomic_add(repairs, count)


@triton.jit
def _feature_begin(feature, offsets, batch_offsets, batch_size, VBE: tl.constexpr):
    """Position of the first lookup of a feature."""
    if VBE:
        bag = tl.load(batch_offsets + feature).to(tl.int64)
    else:
        bag = feature.to(tl.int64) * batch_size
    return tl.load(offsets + bag).to(tl.int64)
