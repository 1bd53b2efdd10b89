"""Gradients summed a row, the optimizer applied to the sum, once a row: exact row-wise Adagrad or SGD.

One program owns a run (or several), so no two programs write one row and there are no atomics: the order of every sum
is fixed by the batch. A [RUNS * LOOK, D] tile serves all classes of runs (see transpose.py): single, short and middle
runs take a row of the tile each (LOOK = 1), a medium or long run the whole tile, a lookup a row (RUNS = 1). Two flags
mark the classes that differ in more than shape:
  SINGLE  the run's descriptor holds its only lookup, so nothing is summed
  LONG    whole aligned blocks are not walked again: their sums, and those of SUPER of them, come from
          `partial_sums_kernel`, and only the lookups before and after them are added one by one

Bytes that must move: per distinct row its weights in and out and a sector of state in and out; the gradient of the
output once; the sorted lists.
"""
from __future__ import annotations

import triton
import triton.language as tl

from torchrec_triton.kernels.common import OUTPUT_UNIT, TABLE_FIELDS, find_table, random_bits, round_to
from torchrec_triton.kernels.forward import bag_range, feature_range, feature_table, load_rows, output_offset


@triton.jit
def _clip(g, max_gradient):
    """Each element clipped to +-max_gradient; NaN stays, which minimum and maximum would turn into the limit."""
    return tl.where(g == g, tl.minimum(tl.maximum(g, -max_gradient), max_gradient), g)


@triton.jit
def _load_grad(
    grad, source, valid, dim, d, max_gradient, EXACT: tl.constexpr, CLIP: tl.constexpr
):  # fmt: skip
    """Gradient rows [n, D] fp32 of n lookups, clipped element by element when CLIP. EXACT: dim is the tile's width."""
    mask = valid[:, None]
    if not EXACT:
        mask = mask & (d[None, :] < dim)
    g = tl.load(grad + source.to(tl.int64)[:, None] * OUTPUT_UNIT + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if CLIP:
        g = _clip(g, max_gradient)
    return g


@triton.jit
def _sum_lookups(
    acc, begin, end, longest, grad, source, scale, dim, d, max_gradient,
    LOOK: tl.constexpr, EXACT: tl.constexpr, SCALED: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """acc [RUNS * LOOK, D] += gradients of the sorted lookups [begin, end) of each run. Either RUNS or LOOK is 1."""
    ROWS: tl.constexpr = acc.shape[0]
    at = (begin[:, None] + tl.arange(0, LOOK)[None, :]).reshape(ROWS)
    stop = end if LOOK == 1 else tl.max(end, axis=0)
    ahead = tl.load(source + at, mask=at < stop, other=0)
    for _ in range(0, longest, LOOK):
        inside = at < stop
        now = ahead
        ahead = tl.load(source + at + LOOK, mask=at + LOOK < stop, other=0)
        g = _load_grad(grad, now, inside, dim, d, max_gradient, EXACT, CLIP)
        if SCALED:
            g *= tl.load(scale + at, mask=inside, other=0.0)[:, None]
        acc += g
        at += LOOK
    return acc


@triton.jit
def _sum_blocks(acc, begin, end, partial, d, WIDTH: tl.constexpr):
    """acc [LOOK, D] += rows [begin, end) of a partial-sum buffer."""
    LOOK: tl.constexpr = acc.shape[0]
    for j in range(begin, end, LOOK):
        at = j + tl.arange(0, LOOK)
        acc += tl.load(partial + at.to(tl.int64)[:, None] * WIDTH + d[None, :], mask=(at < end)[:, None], other=0.0)
    return acc


@triton.jit(do_not_specialize=["num_blocks", "num_tables", "key_begin", "key_end"])
def partial_sums_kernel(
    partial,  # fp32 [num_blocks, WIDTH]
    keys,
    grad,
    source,
    scale,
    blocks,  # the sums of the blocks, when SUPER > 1
    table_key,
    table_meta,
    num_blocks,
    num_tables,
    key_begin,
    key_end,
    max_gradient,
    GROUP: tl.constexpr,  # blocks a program looks at
    SUPER: tl.constexpr,  # 1: sum lookups into a block; else sum SUPER blocks
    BLOCK: tl.constexpr,
    LOOK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
    SCALED: tl.constexpr,
    CLIP: tl.constexpr,
):
    """Sum of each aligned block of sorted lookups that belongs to one run of this bucket; others are not written."""
    d = tl.arange(0, BLOCK_D)
    candidate = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    inside = candidate < num_blocks
    key = tl.load(keys + candidate * (BLOCK * SUPER), mask=inside, other=-1)
    same = key == tl.load(keys + candidate * (BLOCK * SUPER) + (BLOCK * SUPER - 1), mask=inside, other=-2)
    whole = same & (key >= key_begin) & (key < key_end)
    block = tl.min(tl.where(whole, candidate, num_blocks), axis=0)
    while block < num_blocks:
        acc = tl.zeros([LOOK, BLOCK_D], tl.float32)
        if SUPER > 1:
            acc = _sum_blocks(acc, block * SUPER, (block + 1) * SUPER, blocks, d, WIDTH)
        else:
            dim = tl.full((), BLOCK_D, tl.int64)
            if not EXACT:
                table = find_table(tl.load(keys + block * BLOCK), table_key, num_tables)
                dim = tl.load(table_meta + table * TABLE_FIELDS + 2) // OUTPUT_UNIT * OUTPUT_UNIT
            start = tl.zeros([1], tl.int64) + block * BLOCK
            acc = _sum_lookups(acc, start, start + BLOCK, BLOCK, grad, source, scale, dim, d, max_gradient,
                               LOOK, EXACT, SCALED, CLIP)  # fmt: skip
        tl.store(partial + block * WIDTH + d, tl.sum(acc, axis=0))
        block = tl.min(tl.where(whole & (candidate > block), candidate, num_blocks), axis=0)


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
        denominator = tl.sqrt(m) + eps
        step = tl.where(denominator != 0, lr / denominator, 0.0)
        if DECAY == 1:
            w = (1.0 - step * weight_decay)[:, None] * w
        if DECAY == 2:
            w = (1.0 - lr * weight_decay) * w
        w -= step[:, None] * g
    else:
        w -= lr * g
    return w


@triton.jit(do_not_specialize=["seed", "range_at"])
def update_kernel(
    weights,
    state,
    grad,
    first,  # SINGLE: the gradient row of the lookup
    last,  # SINGLE: the bits of its scale
    row_key,
    row_table,
    bounds,
    range_at,  # the runs are bounds[range_at] to bounds[range_at + 1]
    source,
    scale,
    blocks,  # LONG: sums of whole blocks
    supers,  # LONG: sums of SUPER whole blocks
    table_meta,
    lr,
    eps,
    weight_decay,
    max_gradient,
    seed,
    SINGLE: tl.constexpr,  # runs of one lookup
    LONG: tl.constexpr,  # runs with whole blocks
    RUNS: tl.constexpr,
    LOOK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VEC: tl.constexpr,
    EXACT: tl.constexpr,
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
    runs_begin = tl.load(bounds + range_at)
    runs_end = tl.load(bounds + range_at + 1)
    d = tl.arange(0, BLOCK_D)
    weight_type = weights.dtype.element_ty
    for tile in range(runs_begin + tl.program_id(0) * RUNS, runs_end, tl.num_programs(0) * RUNS):
        run = tile + tl.arange(0, RUNS)
        live = run < runs_end
        begin = tl.load(first + run, mask=live, other=0)
        end = tl.load(last + run, mask=live, other=0)
        key = tl.load(row_key + run, mask=live, other=0).to(tl.int64)
        meta = table_meta + tl.load(row_table + run, mask=live, other=0) * TABLE_FIELDS
        mask = live[:, None]
        if EXACT:
            dim = tl.full([RUNS], BLOCK_D, tl.int64)
        else:
            dim = tl.load(meta + 2) // OUTPUT_UNIT * OUTPUT_UNIT
            mask = mask & (d[None, :] < (dim // VEC * VEC)[:, None])
        at = ((tl.load(meta) + key * dim) // VEC * VEC)[:, None] + d[None, :]
        w = tl.load(weights + at, mask=mask, other=0.0).to(tl.float32)
        row_dim = dim[:, None]
        if SINGLE:
            g = _load_grad(grad, begin, live, row_dim, d, max_gradient, EXACT, CLIP)
            if SCALED:
                g *= end.to(tl.int32).to(tl.float32, bitcast=True)[:, None]
        else:
            end = end.to(begin.dtype)
            acc = tl.zeros([RUNS * LOOK, BLOCK_D], tl.float32)
            if LONG:
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
                                   LOOK, EXACT, SCALED, CLIP)  # fmt: skip
                acc = _sum_blocks(acc, b0, tl.minimum(s0 * SUPER, b1), blocks, d, WIDTH)
                acc = _sum_blocks(acc, s0, s1, supers, d, WIDTH)
                acc = _sum_blocks(acc, s1 * SUPER, b1, blocks, d, WIDTH)
                acc = _sum_lookups(acc, right, end, tail - b1 * BLOCK, grad, source, scale, row_dim, d, max_gradient,
                                   LOOK, EXACT, SCALED, CLIP)  # fmt: skip
            else:
                acc = _sum_lookups(acc, begin, end, tl.max(end - begin, axis=0), grad, source, scale, row_dim, d,
                                   max_gradient, LOOK, EXACT, SCALED, CLIP)  # fmt: skip
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
    EXACT: tl.constexpr,
    TRUSTED: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
    VBE: tl.constexpr,
    CLIP: tl.constexpr,
):
    """weight_grad[i] = dot(W[id_i], grad[bag of i]) with the rows as they are before the update. fp32 [N]."""
    tiles = tl.cdiv(batch_size, BAGS)
    feature = tl.load(features + tl.program_id(0) // tiles).to(tl.int64)
    first, count = feature_range(feature, batch_offsets, batch_size, VBE)
    d = tl.arange(0, BLOCK_D)
    table, rows, dim, column = feature_table(weights, feature_meta, feature, d, WEIGHT_VEC, EXACT)
    b = (tl.program_id(0) % tiles).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    if MASKED:
        count = tl.where(tl.load(wanted + feature) != 0, count, 0)
    live = b < count
    begin, end = bag_range(offsets, first + b, live, num_ids)
    at = output_offset(first, b, live, bag_output, total_dim, column, VBE)[:, None] + d[None, :]
    g = tl.load(grad + at, mask=live[:, None] & (d < dim)[None, :], other=0.0).to(tl.float32)
    if CLIP:
        g = _clip(g, max_gradient)
    length = (end - begin).to(tl.int32)
    ids = tl.load(indices + begin, mask=length > 0, other=-1)
    for j in range(0, tl.max(length, axis=0)):
        row = load_rows(table, ids, rows, dim, d, EXACT, TRUSTED, WIDE)
        ids = tl.load(indices + begin + j + 1, mask=j + 1 < length, other=-1)
        tl.store(weight_grad + begin + j, tl.sum(row.to(tl.float32) * g, axis=1), mask=j < length)
