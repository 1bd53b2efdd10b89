"""Gradients summed a row, the optimizer applied to the sum, once a row: exact row-wise Adagrad or SGD.

One program owns a run (or several), so no two programs write one row and there are no atomics: the order of every sum
is fixed by the batch. The classes of runs (see transpose.py) are worked on in three ways:
  single         a run a row of the tile; the run's descriptor holds its only lookup, so nothing is summed
  short, middle  a run a row, its lookups one after another
  long           a run the whole tile, its lookups side by side. Whole aligned blocks of lookups are not walked: their
                 sums, and those of SUPER of them, come from `partial_sums_kernel`
A batch of many lookups has a launch for each way, each with the registers it needs. One of few has a launch for all,
as the longest chain of loads takes its time, not their number. Grids are no larger than what runs at a time, and
programs stride over the tiles, so that all work on neighbouring rows, whose gradients share the cache.

Bytes that must move: per distinct row its weights in and out and a sector of state in and out; the gradient of the
output once; the sorted lists.
"""
from __future__ import annotations

import triton
import triton.language as tl

from torchrec_triton.kernels.common import OUTPUT_UNIT, TABLE_FIELDS, begin_kernel, find_table, random_bits, round_to
from torchrec_triton.kernels.forward import bag_range, feature_range, feature_table, load_rows, output_offset
from torchrec_triton.kernels.transpose import LONG, MIDDLE, SHORT, SINGLE, factor_bits, source_of


@triton.jit
def _clip(g, max_gradient):
    """Each element clipped to +-max_gradient; NaN stays, which minimum and maximum would turn into the limit."""
    return tl.where(g == g, tl.minimum(tl.maximum(g, -max_gradient), max_gradient), g)


@triton.jit
def _load_grad(
    grad, source, valid, dim, d, max_gradient, EXACT: tl.constexpr, CLIP: tl.constexpr
):  # fmt: skip
    """Gradient rows [n, D] fp32 at offsets `source` [n], clipped element by element when CLIP. EXACT: dim is the tile's
    width."""
    mask = valid[:, None]
    if not EXACT:
        mask = mask & (d[None, :] < dim)
    g = tl.load(grad + source[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if CLIP:
        g = _clip(g, max_gradient)
    return g


@triton.jit
def _sum_lookups(
    acc, begin, end, longest, grad, payload, dim, d, max_gradient,
    LOOK: tl.constexpr, EXACT: tl.constexpr, SCALED: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """acc [RUNS * LOOK, D] += gradients of the sorted lookups [begin, end) of each run. Either RUNS or LOOK is 1."""
    ROWS: tl.constexpr = acc.shape[0]
    at = (begin[:, None] + tl.arange(0, LOOK)[None, :]).reshape(ROWS)
    stop = end if LOOK == 1 else tl.max(end, axis=0)
    ahead = tl.load(payload + at, mask=at < stop, other=0)
    for _ in range(0, longest, LOOK):
        inside = at < stop
        now = ahead
        at += LOOK
        ahead = tl.load(payload + at, mask=at < stop, other=0)
        g = _load_grad(grad, source_of(now), inside, dim, d, max_gradient, EXACT, CLIP)
        if SCALED:
            g *= factor_bits(now).to(tl.float32, bitcast=True)[:, None]
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


@triton.jit(do_not_specialize=["num_blocks", "num_tables", "key_begin", "key_end", "each"])
def partial_sums_kernel(
    partial,  # fp32 [num_blocks, WIDTH]
    keys,
    grad,
    payload,
    blocks,  # the sums of the blocks, when SUPER > 1
    table_key,
    table_meta,
    num_blocks,
    num_tables,
    key_begin,
    key_end,
    max_gradient,
    each,  # blocks a program looks at, GROUP at most
    GROUP: tl.constexpr,
    APART: tl.constexpr,  # from one to the next
    SUPER: tl.constexpr,  # 1: sum lookups into a block; else sum SUPER blocks
    BLOCK: tl.constexpr,
    LOOK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
    SCALED: tl.constexpr,
    CLIP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sum of each aligned block of sorted lookups that belongs to one run of this bucket; others are not written.

    APART neighbouring programs share APART * each neighbouring blocks: those of a hot row go to several programs, and
    what runs at a time reads gradients of few features, which the cache holds."""
    begin_kernel(EARLY)
    d = tl.arange(0, BLOCK_D)
    k = tl.arange(0, GROUP)
    window = tl.program_id(0).to(tl.int64) // APART * (APART * each)
    candidate = window + tl.program_id(0) % APART + k * APART
    inside = (k < each) & (candidate < num_blocks)
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
            acc = _sum_lookups(acc, start, start + BLOCK, BLOCK, grad, payload, dim, d, max_gradient,
                               LOOK, EXACT, SCALED, CLIP)  # fmt: skip
        tl.store(partial + block * WIDTH + d, tl.sum(acc, axis=0))
        block = tl.min(tl.where(whole & (candidate > block), candidate, num_blocks), axis=0)


@triton.jit
def _place(weights, table_meta, key, table, live, d, VEC: tl.constexpr, EXACT: tl.constexpr):
    """Where rows lie: pointers to their weights [n, D], the mask of these, dims [n], offsets of their state [n]."""
    meta = table_meta + table * TABLE_FIELDS
    mask = live[:, None]
    if EXACT:
        dim = tl.full(key.shape, d.shape[0], tl.int64)
    else:
        dim = tl.load(meta + 2) // OUTPUT_UNIT * OUTPUT_UNIT
        mask = mask & (d[None, :] < (dim // VEC * VEC)[:, None])
    row = (tl.load(meta) + key.to(tl.int64) * dim) // VEC * VEC
    return weights + row[:, None] + d[None, :], mask, dim, tl.load(meta + 1) + key


@triton.jit
def _step(w, g, state, state_at, live, dim, lr, eps, weight_decay, ADAGRAD: tl.constexpr, DECAY: tl.constexpr):
    """One optimizer step on rows w, g [n, D] fp32; updates the row-wise state. DECAY: 0 none, 1 L2, 2 decoupled."""
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


@triton.jit
def _store(to, w, mask, key, d, seed, STOCHASTIC: tl.constexpr):
    """Rounds rows w [n, D] fp32 and writes them."""
    bits = 0
    if STOCHASTIC:
        bits = random_bits(seed, key.to(tl.int32)[:, None], d[None, :])
    tl.store(to, round_to(w, to.dtype.element_ty, bits, STOCHASTIC), mask=mask)


@triton.jit
def _update_single(
    weights, state, grad, first, last, row_key, row_table, table_meta, runs_begin, runs_end, program, d, max_gradient,
    lr, eps, weight_decay, seed,
    RUNS: tl.constexpr, VEC: tl.constexpr, EXACT: tl.constexpr, SCALED: tl.constexpr, CLIP: tl.constexpr,
    ADAGRAD: tl.constexpr, DECAY: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Rows that are looked up once: `first` holds the gradient row of the lookup, `last` the bits of its factor."""
    for tile in range(runs_begin + program * RUNS, runs_end, tl.num_programs(0) * RUNS):
        run = tile + tl.arange(0, RUNS)
        live = run < runs_end
        source = tl.load(first + run, mask=live, other=0)
        key = tl.load(row_key + run, mask=live, other=0)
        table = tl.load(row_table + run, mask=live, other=0)
        at, mask, dim, state_at = _place(weights, table_meta, key, table, live, d, VEC, EXACT)
        w = tl.load(at, mask=mask, other=0.0)
        g = _load_grad(grad, source_of(source), live, dim[:, None], d, max_gradient, EXACT, CLIP)
        if SCALED:
            g *= tl.load(last + run, mask=live, other=0).to(tl.int32).to(tl.float32, bitcast=True)[:, None]
        w = _step(w.to(tl.float32), g, state, state_at, live, dim, lr, eps, weight_decay, ADAGRAD, DECAY)
        _store(at, w, mask, key, d, seed, STOCHASTIC)


@triton.jit
def _update_short(
    weights, state, grad, first, last, row_key, row_table, table_meta, payload, runs_begin, runs_end, program, d,
    max_gradient, lr, eps, weight_decay, seed,
    RUNS: tl.constexpr, VEC: tl.constexpr, EXACT: tl.constexpr, SCALED: tl.constexpr, CLIP: tl.constexpr,
    ADAGRAD: tl.constexpr, DECAY: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Rows of short or middle runs, RUNS runs side by side."""
    for tile in range(runs_begin + program * RUNS, runs_end, tl.num_programs(0) * RUNS):
        run = tile + tl.arange(0, RUNS)
        live = run < runs_end
        begin = tl.load(first + run, mask=live, other=0)
        end = tl.load(last + run, mask=live, other=0)
        key = tl.load(row_key + run, mask=live, other=0)
        table = tl.load(row_table + run, mask=live, other=0)
        at, mask, dim, state_at = _place(weights, table_meta, key, table, live, d, VEC, EXACT)
        w = tl.load(at, mask=mask, other=0.0)
        g = tl.zeros([RUNS, d.shape[0]], tl.float32)
        g = _sum_lookups(g, begin, end, tl.max(end - begin, axis=0), grad, payload, dim[:, None], d, max_gradient,
                         1, EXACT, SCALED, CLIP)  # fmt: skip
        w = _step(w.to(tl.float32), g, state, state_at, live, dim, lr, eps, weight_decay, ADAGRAD, DECAY)
        _store(at, w, mask, key, d, seed, STOCHASTIC)


@triton.jit
def _update_long(
    weights, state, grad, first, last, row_key, row_table, table_meta, payload, blocks, supers, runs_begin, runs_end,
    program, d, max_gradient, lr, eps, weight_decay, seed,
    LOOK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SUPER: tl.constexpr, VEC: tl.constexpr,
    EXACT: tl.constexpr, SCALED: tl.constexpr, CLIP: tl.constexpr, ADAGRAD: tl.constexpr, DECAY: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Rows of long runs, LOOK lookups of a run side by side. blocks, supers: sums of whole blocks, of whole SUPER."""
    one = tl.arange(0, 1)
    for run in range(runs_begin + program, runs_end, tl.num_programs(0)):
        begin = tl.load(first + run)
        end = tl.load(last + run)
        key = tl.load(row_key + run + one)
        table = tl.load(row_table + run + one)
        live = one == 0
        at, mask, dim, state_at = _place(weights, table_meta, key, table, live, d, VEC, EXACT)
        w = tl.load(at, mask=mask, other=0.0)
        # Whole blocks of the run, and whole super blocks; then what lies before and after them.
        b0 = (begin + BLOCK - 1) // BLOCK
        b1 = tl.maximum(end // BLOCK, b0)
        s0 = (b0 + SUPER - 1) // SUPER
        s1 = tl.maximum(b1 // SUPER, s0)
        acc = tl.zeros([LOOK, d.shape[0]], tl.float32)
        acc = _sum_blocks(acc, s0, s1, supers, d, WIDTH)
        for after in range(2):
            low = tl.where(after == 0, begin, tl.minimum(b1 * BLOCK, end))
            high = tl.where(after == 0, tl.minimum(b0 * BLOCK, end), end)
            acc = _sum_lookups(acc, low + one, high + one, high - low, grad, payload, dim[:, None], d, max_gradient,
                               LOOK, EXACT, SCALED, CLIP)  # fmt: skip
            low = tl.where(after == 0, b0, s1 * SUPER)
            high = tl.where(after == 0, tl.minimum(s0 * SUPER, b1), b1)
            acc = _sum_blocks(acc, low, high, blocks, d, WIDTH)
        g = tl.sum(acc, axis=0)[None, :]
        w = _step(w.to(tl.float32), g, state, state_at, live, dim, lr, eps, weight_decay, ADAGRAD, DECAY)
        _store(at, w, mask, key, d, seed, STOCHASTIC)


@triton.jit
def _runs(bounds, kind, bucket, num_buckets):
    """First and last run of a class and bucket."""
    at = bounds + kind * (num_buckets + 1) + bucket
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _behind(program, runs, RUNS: tl.constexpr):
    """The number of this program among those that begin behind the last tile of `runs` runs."""
    programs = tl.num_programs(0)
    return (program + programs - (tl.cdiv(runs, RUNS) % programs).to(tl.int32)) % programs


@triton.jit(do_not_specialize=["bucket", "num_buckets", "seed"])
def update_kernel(
    weights,
    state,
    grad,
    first,
    last,
    row_key,
    row_table,
    bounds,
    bucket,
    num_buckets,
    payload,
    blocks,
    supers,
    table_meta,
    lr,
    eps,
    weight_decay,
    max_gradient,
    seed,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
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
    EARLY: tl.constexpr,
):
    """Updates the rows of a bucket whose runs are of the classes LOWEST to HIGHEST, longest runs first: each class goes
    to the programs behind those that have work of the one before."""
    begin_kernel(EARLY)
    d = tl.arange(0, BLOCK_D)
    program = tl.program_id(0)
    if HIGHEST == LONG:
        runs_begin, runs_end = _runs(bounds, LONG, bucket, num_buckets)
        _update_long(
            weights, state, grad, first, last, row_key, row_table, table_meta, payload, blocks, supers, runs_begin,
            runs_end, program, d, max_gradient, lr, eps, weight_decay, seed,
            LOOK, WIDTH, BLOCK, SUPER, VEC, EXACT, SCALED, CLIP, ADAGRAD, DECAY, STOCHASTIC,
        )  # fmt: skip
        program = _behind(program, runs_end - runs_begin, 1)
    if LOWEST < LONG and HIGHEST > SINGLE:
        # Not carried from one class to the next: Triton 3.6 takes the first value of what only bounds an inner loop.
        behind = program
        for k in range(MIDDLE - SHORT + 1):
            runs_begin, runs_end = _runs(bounds, MIDDLE, bucket, num_buckets)
            at = _behind(program, (runs_end - runs_begin) * k, RUNS)
            runs_begin, runs_end = _runs(bounds, MIDDLE - k, bucket, num_buckets)
            _update_short(
                weights, state, grad, first, last, row_key, row_table, table_meta, payload, runs_begin, runs_end, at, d,
                max_gradient, lr, eps, weight_decay, seed,
                RUNS, VEC, EXACT, SCALED, CLIP, ADAGRAD, DECAY, STOCHASTIC,
            )  # fmt: skip
            behind = _behind(at, runs_end - runs_begin, RUNS)
        program = behind
    if LOWEST == SINGLE:
        runs_begin, runs_end = _runs(bounds, SINGLE, bucket, num_buckets)
        _update_single(
            weights, state, grad, first, last, row_key, row_table, table_meta, runs_begin, runs_end, program, d,
            max_gradient, lr, eps, weight_decay, seed,
            RUNS, VEC, EXACT, SCALED, CLIP, ADAGRAD, DECAY, STOCHASTIC,
        )  # fmt: skip


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
    EARLY: tl.constexpr,
):
    """weight_grad[i] = dot(W[id_i], grad[bag of i]) with the rows as they are before the update. fp32 [N]."""
    begin_kernel(EARLY)
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
