"""Pooled lookup: out[bag] = sum over its lookups of s_i * W[id_i], divided by the bag length for MEAN.

A [BAGS, D] tile walks BAGS neighbouring bags of one feature side by side, a lookup of each at a step. Its rows are
loaded one step ahead of their sum and their ids two, so that a warp always has a tile of rows in flight. Long bags go
four lookups at a step, a fourth as many bags a program: ids of one bag share a cache line, those of 32 bags fill the
cache with theirs. Bags of very different lengths would leave most of the tile idle: then the program takes them one
after another, BAGS lookups of a bag at a step. So it does, with fewer bags a program, where bags are too few to fill
the GPU, and with twice the rows a tile where they are long too. Which way depends on the batch alone, so equal inputs
give equal bits.

Where ids are to be checked, a program first reads those of its bags, which the lookup then finds in the cache, and
repairs what is out of range as FBGEMM's WARNING and IGNORE modes do.

Sums are fp32 for fp16 and bf16 rows and fp64 for fp32 rows. Bytes that must move: the distinct rows, the ids, the
output.
"""
from __future__ import annotations

import triton
import triton.language as tl

from torchrec_triton.kernels.common import FEATURE_FIELDS, OUTPUT_UNIT, begin_kernel, round_to


@triton.jit
def bag_range(offsets, bag, live, num_ids):
    """First and last lookup of bags, clamped into the ids whatever the offsets hold. int64."""
    begin = tl.load(offsets + bag, mask=live, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=live, other=0).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), num_ids)
    return begin, tl.minimum(tl.maximum(end, begin), num_ids)


@triton.jit
def feature_range(feature, batch_offsets, batch_size, VBE: tl.constexpr):
    """First bag and number of bags of a feature. int64."""
    if VBE:
        first = tl.load(batch_offsets + feature).to(tl.int64)
        count = tl.load(batch_offsets + feature + 1).to(tl.int64) - first
    else:
        count = batch_size.to(tl.int64)
        first = feature * count
    return first, count


@triton.jit
def feature_table(weights, feature_meta, feature, d, VEC: tl.constexpr, EXACT: tl.constexpr):
    """The table a feature reads: pointers to its first row [1, D], rows, dim (int32), and its output column.

    Rows begin at multiples of VEC elements and are as wide as d when EXACT, which the compiler can't see from memory.
    """
    meta = feature_meta + feature * FEATURE_FIELDS
    rows = tl.load(meta + 1)
    table = weights + tl.load(meta + 2) // VEC * VEC + d[None, :]
    dim = tl.full((), d.shape[0], tl.int32)
    if not EXACT:
        dim = tl.load(meta + 3).to(tl.int32) // VEC * VEC
    return table, rows, dim, tl.load(meta + 4)


@triton.jit
def output_offset(first, b, live, bag_output, total_dim, column, VBE: tl.constexpr):
    """Where a bag's output row begins (elements), told to be a multiple of OUTPUT_UNIT."""
    if VBE:
        begin = tl.load(bag_output + first + b, mask=live, other=0)
    else:
        begin = b * total_dim + column
    return begin // OUTPUT_UNIT * OUTPUT_UNIT


@triton.jit
def row_offset(ids, rows, dim, TRUSTED: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of rows in their table (elements) and which ids have a row. TRUSTED: ids are below `rows`; WIDE: they may
    pass 2^31. 32-bit products of trusted ids are one instruction."""
    narrow = ids if WIDE else ids.to(tl.int32)
    valid = narrow >= 0 if TRUSTED else (ids >= 0) & (ids < rows)
    return narrow.to(tl.int64) * dim.to(tl.int64), valid


@triton.jit
def load_rows(table, ids, rows, dim, d, EXACT: tl.constexpr, TRUSTED: tl.constexpr, WIDE: tl.constexpr):
    """Rows [n, D] of the table at pointers `table` [1, D] as they are stored; zeros where an id has no row and beyond
    the row. EXACT: rows are as wide as the tile."""
    begin, valid = row_offset(ids, rows, dim, TRUSTED, WIDE)
    mask = valid[:, None]
    if not EXACT:
        mask = mask & (d < dim)[None, :]
    return tl.load(table + begin[:, None], mask=mask, other=0.0)


@triton.jit
def _repair(indices, begin, end, rows, repairs, TILE: tl.constexpr):
    """Writes 0 in place of ids at [begin, end) that are out of range and not -1, and counts them."""
    for tile in range(begin, end, TILE):
        at = tile + tl.arange(0, TILE)
        ids = tl.load(indices + at, mask=at < end, other=-1)
        wrong = (ids + 1).to(tl.uint64) > rows.to(tl.uint64)
        count = tl.sum(wrong.to(tl.int32), axis=0)
        if count > 0:
            tl.store(indices + at, tl.zeros(ids.shape, ids.dtype), mask=wrong)
            tl.atomic_add(repairs, count.to(tl.int64))
            tl.debug_barrier()  # other threads of the program read them next


@triton.jit
def _pool(
    output, table, indices, sample_weights, bag_output, offsets, first, begin_bag, count, rows, dim, column, num_ids,
    total_dim, d,
    BAGS: tl.constexpr, LOOK: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    TRUSTED: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, VBE: tl.constexpr,
):  # fmt: skip
    """Pools BAGS bags of one feature from `begin_bag` on and writes their output rows."""
    BLOCK_D: tl.constexpr = d.shape[0]
    lane = tl.arange(0, BAGS * LOOK)
    b = begin_bag + lane // LOOK
    begin, end = bag_range(offsets, first + b, b < count, num_ids)
    length = (end - begin).to(tl.int32)
    longest = tl.max(length, axis=0)
    at = lane % LOOK
    ids = tl.load(indices + begin + at, mask=at < length, other=-1)
    row = load_rows(table, ids, rows, dim, d, EXACT, TRUSTED, WIDE)
    ids = tl.load(indices + begin + at + LOOK, mask=at + LOOK < length, other=-1)
    acc = tl.zeros([BAGS * LOOK, BLOCK_D], ACC)
    for _ in range(0, longest, LOOK):
        ahead = load_rows(table, ids, rows, dim, d, EXACT, TRUSTED, WIDE)
        ids = tl.load(indices + begin + at + 2 * LOOK, mask=at + 2 * LOOK < length, other=-1)
        wide = row.to(tl.float32).to(ACC)
        if WEIGHTED:
            wide *= tl.load(sample_weights + begin + at, mask=at < length, other=0.0)[:, None]
        acc += wide
        row = ahead
        at += LOOK
    if LOOK > 1:
        acc = tl.sum(acc.reshape(BAGS, LOOK, BLOCK_D), axis=1)
        b = begin_bag + tl.arange(0, BAGS)
        if MEAN:
            begin, end = bag_range(offsets, first + b, b < count, num_ids)
            length = (end - begin).to(tl.int32)
    if MEAN:
        acc /= tl.maximum(length, 1).to(ACC)[:, None]
    live = b < count
    to = output_offset(first, b, live, bag_output, total_dim, column, VBE)[:, None] + d[None, :]
    mask = live[:, None]
    if not EXACT:
        mask = mask & (d < dim)[None, :]
    tl.store(output + to, round_to(acc.to(tl.float32), output.dtype.element_ty, 0, False), mask=mask)


@triton.jit(
    do_not_specialize=["batch_size", "num_ids", "each"],
    do_not_specialize_on_alignment=["indices", "offsets", "sample_weights"],
)
def tbe_fwd_kernel(
    output,
    weights,
    indices,
    offsets,
    sample_weights,
    bag_output,  # VBE: int64 [bags], output offset of each bag
    batch_offsets,  # VBE: [F + 1], first bag of each feature
    repairs,  # int64 [1], the number of ids repaired, or None where ids are not to be repaired
    features,
    feature_meta,
    batch_size,  # bags a feature; VBE: the most bags of any feature
    num_ids,
    total_dim,
    each,  # bags a program: BAGS, a fourth of them, or fewer than BAGS one after another
    BAGS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHT_VEC: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
    CHECK: tl.constexpr,  # ids checked at a step where a program has many, or 0
    TRUSTED: tl.constexpr,
    WIDE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    VBE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Pools `each` bags of one feature a program. output: [B, total_dim], or 1-D under VBE."""
    begin_kernel(EARLY)
    tiles = tl.cdiv(batch_size, each)
    feature = tl.load(features + tl.program_id(0) // tiles).to(tl.int64)
    begin_bag = (tl.program_id(0) % tiles).to(tl.int64) * each
    first, count = feature_range(feature, batch_offsets, batch_size, VBE)
    d = tl.arange(0, BLOCK_D)
    table, rows, dim, column = feature_table(weights, feature_meta, feature, d, WEIGHT_VEC, EXACT)
    if CHECK:
        own = offsets + first + begin_bag
        begin = tl.load(own, mask=begin_bag < count, other=0).to(tl.int64)
        end = tl.load(own + tl.minimum(each, count - begin_bag), mask=begin_bag < count, other=0).to(tl.int64)
        if end - begin <= CHECK // 4:
            _repair(indices, begin, end, rows, repairs, CHECK // 4)
        else:
            _repair(indices, begin, end, rows, repairs, CHECK)
    look = 1  # lookups of a bag at a step, where the bags of the program fill its tile
    if BAGS >= 8:
        look = tl.where(each == BAGS // 4, 4, 1)
    alone = each * look < BAGS
    if BAGS > 1:
        b = begin_bag + tl.arange(0, BAGS)
        begin, end = bag_range(offsets, first + b, (b < count) & (b < begin_bag + each), num_ids)
        length = end - begin
        # Side by side takes a step for every `look` lookups of the longest bag; one after another a step for every BAGS
        # lookups, and two more a bag.
        alone = alone | (tl.max(length, axis=0) // look > tl.sum(length, axis=0) // BAGS + 2 * each)
    if alone:
        for k in range(0, each):
            _pool(
                output, table, indices, sample_weights, bag_output, offsets, first, begin_bag + k, count, rows, dim,
                column, num_ids, total_dim, d, 1, BAGS, ACC, EXACT, TRUSTED, WIDE, WEIGHTED, MEAN, VBE,
            )  # fmt: skip
    elif look == 1:
        _pool(
            output, table, indices, sample_weights, bag_output, offsets, first, begin_bag, count, rows, dim, column,
            num_ids, total_dim, d, BAGS, 1, ACC, EXACT, TRUSTED, WIDE, WEIGHTED, MEAN, VBE,
        )  # fmt: skip
    elif BAGS >= 8:
        _pool(
            output, table, indices, sample_weights, bag_output, offsets, first, begin_bag, count, rows, dim, column,
            num_ids, total_dim, d, BAGS // 4, 4, ACC, EXACT, TRUSTED, WIDE, WEIGHTED, MEAN, VBE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_features", "num_ranks"])
def bag_output_kernel(
    bag_output,
    block_output,  # int64 [ranks, F]: output offset of the block of a rank and feature
    batch_offsets,  # [F + 1]
    rank_offsets,  # [F, ranks + 1]: first bag of each rank within the feature
    feature_meta,
    num_features,
    num_ranks,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """VBE: bag_output[bag] = offset of the bag's output row in the 1-D, rank-major output (elements). int64 [bags]."""
    begin_kernel(EARLY)
    feature = tl.program_id(0) // num_ranks
    rank = tl.program_id(0) % num_ranks
    begin = tl.load(rank_offsets + feature * (num_ranks + 1) + rank)
    size = tl.load(rank_offsets + feature * (num_ranks + 1) + rank + 1) - begin
    first = tl.load(batch_offsets + feature).to(tl.int64) + begin
    output = tl.load(block_output + rank.to(tl.int64) * num_features + feature)
    dim = tl.load(feature_meta + feature * FEATURE_FIELDS + 3)
    for j in range(0, size, BLOCK):
        b = j + tl.arange(0, BLOCK)
        tl.store(bag_output + first + b, output + b * dim, mask=b < size)
