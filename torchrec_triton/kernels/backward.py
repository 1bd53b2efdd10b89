"""Gradients summed a row, the optimizer applied to the sum, once a row: exact row-wise Adagrad or SGD.

One program owns a run (or several), so no two programs write one row and there are no atomics: the order of every sum is
fixed by the batch. A [RUNS * LOOK, D] tile serves all classes of runs: singles and short runs take a run a tile row, medium
and long runs a lookup a tile row. Long runs read the sums of their whole aligned blocks, which `partial_sums_kernel`
computed, one block a program, and then the sums of SUPER blocks of those.

Bytes that must move: per distinct row its weights in and out and a sector of state in and out; the gradient of the output
once; the sorted lists.
"""
from __future__ import annotations

import triton
import triton.language as tl

from torchrec_triton.kernels.common import find_table, random_bits, round_to
from torchrec_triton.kernels.forward import bag_range, feature_range, load_rows, output_offset


@triton.jit
def _load_grad(grad, source, valid, dim, d, max_gradient, UNIT: tl.constexpr, CLIP: tl.constexpr):
    """Gradient rows [n, D] fp32 of n lookups, clipped element by element when CLIP."""
    at = source.to(tl.int64)[:, None] * UNIT + d[None, :]
    g = tl.load(grad + at, mask=valid[:, None] & (d[None, :] < dim), other=0.0).to(tl.float32)
    if CLIP:
        g = tl.minimum(tl.maximum(g, -max_gradient), max_gradient)
    return g


@triton.jit
def _sum_lookups(
    acc, begin, end, longest, grad, source, scale, dim, d, max_gradient,
    LOOK: tl.constexpr, UNIT: tl.constexpr, SCALED: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """acc [RUNS * LOOK, D] += gradients of the sorted lookups [begin, end) of each run. Either RUNS or LOOK is 1."""
    ROWS: tl.constexpr = acc.shape[0]
    for j in range(0, longest, LOOK):
        at = (begin[:, None] + j + tl.arange(0, LOOK)[None, :]).reshape(ROWS)
        inside = at < (end if LOOK == 1 else tl.max(end, axis=0))
        g = _load_grad(grad, tl.load(source + at, mask=inside, other=0), inside, dim, d, max_gradient, UNIT, CLIP)
        if SCALED:
            g *= tl.load(scale + at, mask=inside, other=0.0)[:, None]
        acc += g
    return acc


@triton.jit
def _sum_blocks(acc, begin, end, partial, d, WIDTH: tl.constexpr):
    """acc [LOOK, D] += rows [begin, end) of a partial-sum buffer."""
    LOOK: tl.constexpr = acc.shape[0]
    for j in range(begin, end, LOOK):
        at = j + tl.arange(0, LOOK)
        acc += tl.load(partial + at.to(tl.int64)[:, None] * WIDTH + d[None, :], mask=(at < end)[:, None], other=0.0)
    return acc


@triton.jit(do_not_specialize=["num_ids", "num_tables", "key_begin", "key_end"])
def partial_sums_kernel(
    partial,  # fp32 [N // (BLOCK * SUPER or BLOCK), WIDTH]
    keys,
    grad,
    source,
    scale,
    blocks,  # the sums of the blocks, when SUPER > 1
    table_key,
    table_meta,
    num_tables,
    key_begin,
    key_end,
    max_gradient,
    SUPER: tl.constexpr,  # 1: sum lookups into a block; else sum SUPER blocks
    BLOCK: tl.constexpr,
    LOOK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    CLIP: tl.constexpr,
):
    """Sum of each aligned block of sorted lookups that belongs to one run of this bucket; other entries are not written."""
    block = tl.program_id(0).to(tl.int64)
    begin = block * BLOCK * SUPER
    key = tl.load(keys + begin)
    if (key < key_begin) | (key >= key_end) | (tl.load(keys + begin + BLOCK * SUPER - 1) != key):
        return
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([LOOK, BLOCK_D], tl.float32)
    if SUPER > 1:
        acc = _sum_blocks(acc, block * SUPER, (block + 1) * SUPER, blocks, d, WIDTH)
    else:
        dim = tl.load(table_meta + find_table(key, table_key, num_tables, STEPS) * 3 + 2) // UNIT * UNIT
        start = tl.zeros([1], tl.int64) + begin
        acc = _sum_lookups(acc, start, start + BLOCK, BLOCK, grad, source, scale, dim, d, max_gradient, LOOK, UNIT, SCALED, CLIP)
    tl.store(partial + block * WIDTH + d, tl.sum(acc, axis=0))


@triton.jit
def _step(w, g, state, state_at, live, dim, lr, eps, weight_decay, ADAGRAD: tl.constexpr, DECAY: tl.constexpr):
    """One optimizer step on rows w, g [RUNS, D] fp32; updates the row-wise state. DECAY: 0 none, 1 L2, 2 decoupled."""
    if ADAGRAD:
        g2 = g
        if DECAY == 1:
            g2 = g + weight_decay * w
        m = tl.load(state + state_at, mask=live, other=0.0) + tl.sum(g2 * g2, axis=1) / dim.to(tl.float32)
        tl.store(state + state_at, m, mask=live)
        # A row without gradient under eps 0 divides 0 by 0: its step is 0, as it has no gradient.
        denominator = tl.sqrt_rn(m) + eps
        step = tl.where(denominator != 0, tl.div_rn(lr + tl.zeros_like(m), denominator), 0.0)
        if DECAY == 1:
            w = (1.0 - step * weight_decay)[:, None] * w
        if DECAY == 2:
            w = (1.0 - lr * weight_decay) * w
        w -= step[:, None] * g
    else:
        w -= lr * g
    return w


@triton.jit(do_not_specialize=["seed"])
def update_kernel(
    weights,
    state,
    grad,
    first,
    last,
    row_key,
    row_table,
    bounds,
    source,
    scale,
    blocks,
    supers,
    table_meta,
    lr,
    eps,
    weight_decay,
    max_gradient,
    seed,
    KIND: tl.constexpr,  # class of runs, see transpose.py
    BUCKET: tl.constexpr,
    NUM_BUCKETS: tl.constexpr,
    RUNS: tl.constexpr,
    LOOK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VEC: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SUPER: tl.constexpr,
    SCALED: tl.constexpr,
    CLIP: tl.constexpr,
    ADAGRAD: tl.constexpr,
    DECAY: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Update the rows of one class and bucket. The grid is any size: programs stride over the tiles of runs."""
    runs_begin = tl.load(bounds + KIND * (NUM_BUCKETS + 1) + BUCKET)
    runs_end = tl.load(bounds + KIND * (NUM_BUCKETS + 1) + BUCKET + 1)
    d = tl.arange(0, BLOCK_D)
    weight_type = weights.dtype.element_ty
    for tile in range(runs_begin + tl.program_id(0) * RUNS, runs_end, tl.num_programs(0) * RUNS):
        run = tile + tl.arange(0, RUNS)
        live = run < runs_end
        begin = tl.load(first + run, mask=live, other=0)
        key = tl.load(row_key + run, mask=live, other=0).to(tl.int64)
        meta = table_meta + tl.load(row_table + run, mask=live, other=0) * 3
        dim = tl.load(meta + 2)
        row_begin = (tl.load(meta) + key * dim) // VEC
        mask = live[:, None] & (d[None, :] < (dim // VEC * VEC)[:, None])
        at = row_begin[:, None] * VEC + d[None, :]
        w = tl.load(weights + at, mask=mask, other=0.0).to(tl.float32)
        row_dim = dim[:, None] // UNIT * UNIT
        if KIND == 0:
            g = _load_grad(grad, begin, live, row_dim, d, max_gradient, UNIT, CLIP)
            if SCALED:
                g *= tl.load(last + run, mask=live, other=0).to(tl.int32).to(tl.float32, bitcast=True)[:, None]
        else:
            end = tl.load(last + run, mask=live, other=0).to(begin.dtype)
            acc = tl.zeros([RUNS * LOOK, BLOCK_D], tl.float32)
            if KIND == 3:
                # Lookups before the first whole block, its blocks and super blocks, lookups after the last whole block.
                head = tl.max(begin, axis=0)
                tail = tl.max(end, axis=0)
                b0 = (head + BLOCK - 1) // BLOCK
                b1 = tail // BLOCK
                s0 = (b0 + SUPER - 1) // SUPER
                s1 = tl.maximum(b1 // SUPER, s0)
                left = tl.zeros([1], begin.dtype) + b0 * BLOCK
                right = tl.zeros([1], begin.dtype) + b1 * BLOCK
                acc = _sum_lookups(acc, begin, left, b0 * BLOCK - head, grad, source, scale, row_dim, d, max_gradient,
                                   LOOK, UNIT, SCALED, CLIP)  # fmt: skip
                acc = _sum_blocks(acc, b0, tl.minimum(s0 * SUPER, b1), blocks, d, WIDTH)
                acc = _sum_blocks(acc, s0, s1, supers, d, WIDTH)
                acc = _sum_blocks(acc, s1 * SUPER, b1, blocks, d, WIDTH)
                acc = _sum_lookups(acc, right, end, tail - b1 * BLOCK, grad, source, scale, row_dim, d, max_gradient,
                                   LOOK, UNIT, SCALED, CLIP)  # fmt: skip
            else:
                acc = _sum_lookups(acc, begin, end, tl.max(end - begin, axis=0), grad, source, scale, row_dim, d, max_gradient,
                                   LOOK, UNIT, SCALED, CLIP)  # fmt: skip
            g = acc if LOOK == 1 else tl.sum(acc, axis=0)[None, :]
        state_at = tl.load(meta + 1) + key
        w = _step(w, g, state, state_at, live, dim, lr, eps, weight_decay, ADAGRAD, DECAY)
        bits = 0
        if STOCHASTIC:
            bits = random_bits(seed, key.to(tl.int32)[:, None], d[None, :])
        tl.store(weights + at, round_to(w, weight_type, bits, STOCHASTIC), mask=mask)


@triton.jit(do_not_specialize=["batch_size", "num_ids"], do_not_specialize_on_alignment=["indices", "offsets"])
def sample_weight_grad_kernel(
    weight_grad,
    weights,
    grad,
    indices,
    offsets,
    bag_output,
    batch_offsets,
    features,
    feature_meta,
    wanted,  # int32 [F]: 0 where the gradient of a feature's weights is not wanted, or None
    batch_size,
    num_ids,
    total_dim,
    max_gradient,
    BAGS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHT_VEC: tl.constexpr,
    OUT_VEC: tl.constexpr,
    MASKED: tl.constexpr,
    VBE: tl.constexpr,
    CLIP: tl.constexpr,
):
    """weight_grad[i] = dot(W[id_i], grad[bag of i]) with the rows as they are before the update. fp32 [N]."""
    tiles = tl.cdiv(batch_size, BAGS)
    feature = tl.load(features + tl.program_id(0) // tiles).to(tl.int64)
    first, count = feature_range(feature, batch_offsets, batch_size, VBE)
    rows = tl.load(feature_meta + feature * 5 + 1)
    row_begin = tl.load(feature_meta + feature * 5 + 2) // WEIGHT_VEC
    dim = tl.load(feature_meta + feature * 5 + 3) // WEIGHT_VEC * WEIGHT_VEC
    column = tl.load(feature_meta + feature * 5 + 4)
    d = tl.arange(0, BLOCK_D)
    b = (tl.program_id(0) % tiles).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    if MASKED:
        count = tl.where(tl.load(wanted + feature) != 0, count, 0)
    live = b < count
    begin, end = bag_range(offsets, first + b, live, num_ids)
    at = output_offset(first, b, live, bag_output, total_dim, column, VBE, OUT_VEC)[:, None] + d[None, :]
    g = tl.load(grad + at, mask=live[:, None] & (d < dim)[None, :], other=0.0).to(tl.float32)
    if CLIP:
        g = tl.minimum(tl.maximum(g, -max_gradient), max_gradient)
    for j in range(0, tl.max(end - begin, axis=0)):
        inside = begin + j < end
        ids = tl.load(indices + begin + j, mask=inside, other=-1).to(tl.int64)
        row = load_rows(weights, row_begin, ids, (ids >= 0) & (ids < rows), dim, d, WEIGHT_VEC, tl.float32)
        tl.store(weight_grad + begin + j, tl.sum(row * g, axis=1), mask=inside)
