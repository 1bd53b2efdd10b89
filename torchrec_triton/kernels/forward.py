"""Pooled lookup: out[bag] = sum over its lookups of s_i * W[id_i], divided by the bag length for MEAN.

A program takes `BAGS` neighbouring bags of one feature. If all of them are short it gives each bag a row of a [BAGS, D]
tile and walks the bags side by side; otherwise it takes one bag after another with a [LOOK, D] tile, so that LOOK rows of a
bag are in flight. Which way depends on the data alone, so equal inputs give equal bits.

Sums are fp32 for fp16 and bf16 rows and fp64 for fp32 rows. Bytes that must move: the distinct rows, the ids, the output.
"""
from __future__ import annotations

import triton
import triton.language as tl

from torchrec_triton.kernels.common import round_to


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
def output_offset(first, b, live, bag_output, total_dim, column, VBE: tl.constexpr, VEC: tl.constexpr):
    """Where a bag's output row begins (elements), told to be a multiple of VEC."""
    if VBE:
        begin = tl.load(bag_output + first + b, mask=live, other=0)
    else:
        begin = b * total_dim + column
    return begin // VEC * VEC


@triton.jit
def load_rows(weights, row_begin, ids, valid, dim, d, VEC: tl.constexpr, ACC: tl.constexpr):
    """Rows [n, D] of one table, widened; zeros where a lookup is not valid and beyond the row."""
    at = (row_begin + ids * (dim // VEC))[:, None] * VEC + d[None, :]
    return tl.load(weights + at, mask=valid[:, None] & (d < dim)[None, :], other=0.0).to(tl.float32).to(ACC)


@triton.jit(do_not_specialize=["batch_size", "num_ids"], do_not_specialize_on_alignment=["indices", "offsets", "sample_weights"])
def tbe_fwd_kernel(
    output,
    weights,
    indices,
    offsets,
    sample_weights,
    bag_output,  # VBE: int64 [bags], output offset of each bag
    batch_offsets,  # VBE: [F + 1], first bag of each feature
    features,
    feature_meta,
    batch_size,  # bags a feature; VBE: the most bags of any feature
    num_ids,
    total_dim,
    BAGS: tl.constexpr,
    LOOK: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHT_VEC: tl.constexpr,
    OUT_VEC: tl.constexpr,
    ACC: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    VBE: tl.constexpr,
):
    tiles = tl.cdiv(batch_size, BAGS)
    feature = tl.load(features + tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    first, count = feature_range(feature, batch_offsets, batch_size, VBE)
    rows = tl.load(feature_meta + feature * 5 + 1)
    row_begin = tl.load(feature_meta + feature * 5 + 2) // WEIGHT_VEC
    dim = tl.load(feature_meta + feature * 5 + 3) // WEIGHT_VEC * WEIGHT_VEC
    column = tl.load(feature_meta + feature * 5 + 4)
    d = tl.arange(0, BLOCK_D)
    out_type = output.dtype.element_ty

    b = tile.to(tl.int64) * BAGS + tl.arange(0, BAGS)
    live = b < count
    begin, end = bag_range(offsets, first + b, live, num_ids)
    length = end - begin
    longest = tl.max(length, axis=0)
    if longest <= SHORT:
        acc = tl.zeros([BAGS, BLOCK_D], ACC)
        for j in range(0, longest):
            inside = j < length
            ids = tl.load(indices + begin + j, mask=inside, other=-1).to(tl.int64)
            row = load_rows(weights, row_begin, ids, (ids >= 0) & (ids < rows), dim, d, WEIGHT_VEC, ACC)
            if WEIGHTED:
                row *= tl.load(sample_weights + begin + j, mask=inside, other=0.0)[:, None]
            acc += row
        if MEAN:
            acc /= tl.maximum(length, 1).to(ACC)[:, None]
        at = output_offset(first, b, live, bag_output, total_dim, column, VBE, OUT_VEC)[:, None] + d[None, :]
        mask = live[:, None] & (d < dim)[None, :]
        tl.store(output + at, round_to(acc.to(tl.float32), out_type, 0, False), mask=mask)
    else:
        for k in range(0, BAGS):
            b1 = tile.to(tl.int64) * BAGS + k
            begin1, end1 = bag_range(offsets, first + b1, b1 < count, num_ids)
            acc1 = tl.zeros([LOOK, BLOCK_D], ACC)
            lane = tl.arange(0, LOOK)
            ids1 = tl.load(indices + begin1 + lane, mask=begin1 + lane < end1, other=-1).to(tl.int64)
            for i in range(begin1, end1, LOOK):
                at1 = i + lane
                ahead = tl.load(indices + at1 + LOOK, mask=at1 + LOOK < end1, other=-1).to(tl.int64)
                row1 = load_rows(weights, row_begin, ids1, (ids1 >= 0) & (ids1 < rows), dim, d, WEIGHT_VEC, ACC)
                if WEIGHTED:
                    row1 *= tl.load(sample_weights + at1, mask=at1 < end1, other=0.0)[:, None]
                acc1 += row1
                ids1 = ahead
            total = tl.sum(acc1, axis=0)
            if MEAN:
                total /= tl.maximum(end1 - begin1, 1).to(ACC)
            at2 = output_offset(first, b1, b1 < count, bag_output, total_dim, column, VBE, OUT_VEC) + d
            tl.store(output + at2, round_to(total.to(tl.float32), out_type, 0, False), mask=d < tl.where(b1 < count, dim, 0))


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
):
    """VBE: bag_output[bag] = offset of the bag's output row in the 1-D, rank-major output (elements). int64 [bags]."""
    feature = tl.program_id(0) // num_ranks
    rank = tl.program_id(0) % num_ranks
    begin = tl.load(rank_offsets + feature * (num_ranks + 1) + rank)
    size = tl.load(rank_offsets + feature * (num_ranks + 1) + rank + 1) - begin
    first = tl.load(batch_offsets + feature).to(tl.int64) + begin
    output = tl.load(block_output + rank.to(tl.int64) * num_features + feature)
    dim = tl.load(feature_meta + feature * 5 + 3)
    for j in range(0, size, BLOCK):
        b = j + tl.arange(0, BLOCK)
        tl.store(bag_output + first + b, output + b * dim, mask=b < size)
