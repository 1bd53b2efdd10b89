"""The id-only part of the backward: from bags of ids to runs, one run a row with all its lookups.

linearize   every lookup gets a row key (which row of which table) and a payload (which row of the output's gradient,
            and the factor of that row where factors are not all 1)
sort        by row key, stable: lookups of one row become neighbours, in the order of the batch
runs        each run of equal keys is put into a class by its length, the classes one after another, each in key order

The classes, each with an update of its own shape:
  single  1 lookup
  short   2 to SHORT_RUN lookups
  middle  more, up to MIDDLE_RUN, or MIDDLE_RUN_OF_FEW where lookups are few and a chain of loads is what takes time
  long    more
A class is found by looking a fixed distance ahead in the sorted keys, never by a scan, so it is known where a run
begins; where it ends, looking back gives the same answer. Nothing is read back to the host: counts stay on the device,
capacities follow from the number of ids.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from torchrec_triton.kernels.common import (
    FEATURE_FIELDS,
    OUTPUT_UNIT,
    Batch,
    TableLayout,
    begin_kernel,
    cdiv,
    find_table,
    wide_positions,
)
from torchrec_triton.kernels.forward import bag_range, feature_range, output_offset
from torchrec_triton.kernels.launch import Launcher
from torchrec_triton.kernels.sort import sort_pairs

SINGLE, SHORT, MIDDLE, LONG = (tl.constexpr(c) for c in range(4))
CLASSES = 4
SHORT_RUN = 4
MIDDLE_RUN, MIDDLE_RUN_OF_FEW = 32, 16
# Bags of one program that linearizes; and where there are many, which hold SHORT_BAG lookups or fewer on average.
_BAGS, _SHORT_BAGS = 32, 128
MANY_BAGS, _SHORT_BAG = 2**16, 8
_TILE = 128  # sorted keys a warp
_GROUP = 4  # warps that count in a program


class Runs(NamedTuple):
    """Runs of a batch. R, the number of runs, is known to the device only; capacities are in brackets.

    keys: sorted row keys [N]; lookups without a row (pruned or out of range) come last, with key num_keys.
    payload: gradient row of each sorted lookup, offset in OUTPUT_UNIT elements [N] int32; with factors int64, whose
        upper half is the bits of the fp32 factor.
    first, last: sorted positions [first, last) of each run [N]. For a single run `first` holds its gradient row and
        `last` the bits of its factor, which spares the update a level of indirection.
    row_key, row_table: row key and table (bucket order) of each run [N].
    bounds: runs of class c and bucket k are bounds[c, k] to bounds[c, k + 1]. [CLASSES, buckets + 1]
    """

    keys: torch.Tensor
    payload: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    row_key: torch.Tensor
    row_table: torch.Tensor
    bounds: torch.Tensor


@triton.jit
def source_of(payload):
    """Gradient row of lookups, offset in elements. int64."""
    return payload.to(tl.int32).to(tl.int64) * OUTPUT_UNIT


@triton.jit
def factor_bits(payload):
    return (payload >> 32).to(tl.int32)


@triton.jit
def _bags(offsets, first, b, count, num_ids, bag_output, total_dim, column, VBE: tl.constexpr):
    """First lookup, length and gradient row (in OUTPUT_UNIT elements) of bags `b` of a feature."""
    live = b < count
    begin, end = bag_range(offsets, first + b, live, num_ids)
    row = output_offset(first, b, live, bag_output, total_dim, column, VBE) // OUTPUT_UNIT
    return begin, (end - begin).to(tl.int32), row.to(tl.int32)


@triton.jit
def _linearize(
    keys, payload, indices, sample_weights, begin, length, row, key_begin, rows, no_row,
    POSITIONS: tl.constexpr, NARROW: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Keys and payloads of the lookups of a tile of bags, POSITIONS lookups of each bag at a step."""
    lane = tl.arange(0, POSITIONS)[None, :]
    for j in range(0, tl.max(length, axis=0), POSITIONS):
        at = begin[:, None] + (j + lane)
        inside = j + lane < length[:, None]
        ids = tl.load(indices + at, mask=inside, other=-1)
        if NARROW:
            ids = ids.to(tl.int32)
            key = tl.where(ids >= 0, key_begin.to(tl.int32) + ids, no_row)
        else:
            ids = ids.to(tl.int64)
            key = tl.where((ids >= 0) & (ids < rows), key_begin + ids, no_row)
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=inside)
        value = tl.broadcast_to(row[:, None], at.shape)
        if WEIGHTED or MEAN:
            factor = tl.full(at.shape, 1.0, tl.float32)
            if WEIGHTED:
                factor = tl.load(sample_weights + at, mask=inside, other=0.0)
            if MEAN:
                factor /= tl.maximum(length, 1).to(tl.float32)[:, None]
            value = value.to(tl.int64) | factor.to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(payload + at, value, mask=inside)


@triton.jit(
    do_not_specialize=["batch_size", "num_ids", "num_bags", "no_row"],
    do_not_specialize_on_alignment=["indices", "offsets", "sample_weights"],
)
def linearize_kernel(
    keys,
    payload,
    indices,
    offsets,
    sample_weights,
    bag_output,
    batch_offsets,
    feature_meta,
    batch_size,
    num_ids,
    num_bags,
    total_dim,
    no_row,  # the key of lookups that have none
    BAGS: tl.constexpr,
    GROUP: tl.constexpr,  # bags at a time where they are long
    TRUSTED: tl.constexpr,
    NARROW: tl.constexpr,  # trusted, and keys have 32 bits
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    VBE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Keys and payloads of the lookups of BAGS bags of one feature a program, in the order of the batch."""
    begin_kernel(EARLY)
    tiles = tl.cdiv(batch_size, BAGS)
    feature = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    first, count = feature_range(feature, batch_offsets, batch_size, VBE)
    key_begin = tl.load(feature_meta + feature * FEATURE_FIELDS)
    rows = tl.load(feature_meta + feature * FEATURE_FIELDS + 1)
    column = tl.load(feature_meta + feature * FEATURE_FIELDS + 4)
    b = tile.to(tl.int64) * BAGS + tl.arange(0, BAGS)
    begin, length, row = _bags(offsets, first, b, count, num_ids, bag_output, total_dim, column, VBE)
    # Wide steps keep more loads of long bags in flight, and would idle on short ones.
    if tl.max(length, axis=0) <= 8:
        _linearize(keys, payload, indices, sample_weights, begin, length, row, key_begin, rows, no_row,
                   4, NARROW, WEIGHTED, MEAN)  # fmt: skip
    elif BAGS == GROUP:
        _linearize(keys, payload, indices, sample_weights, begin, length, row, key_begin, rows, no_row,
                   32, NARROW, WEIGHTED, MEAN)  # fmt: skip
    else:
        for g in range(BAGS // GROUP):
            part = tile.to(tl.int64) * BAGS + g * GROUP + tl.arange(0, GROUP)
            starts, lengths, places = _bags(offsets, first, part, count, num_ids, bag_output, total_dim, column, VBE)
            _linearize(keys, payload, indices, sample_weights, starts, lengths, places, key_begin, rows, no_row,
                       32, NARROW, WEIGHTED, MEAN)  # fmt: skip
    if TRUSTED & (tl.program_id(0) == 0):
        # Ids before the first bag and after the last belong to none. A batch that is not trusted begins with such keys.
        head = tl.minimum(tl.maximum(tl.load(offsets).to(tl.int64), 0), num_ids)
        tail = tl.minimum(tl.maximum(tl.load(offsets + num_bags).to(tl.int64), 0), num_ids)
        for i in range(0, head):
            tl.store(keys + i, no_row.to(keys.dtype.element_ty))
        for i in range(tail, num_ids):
            tl.store(keys + i, no_row.to(keys.dtype.element_ty))


@triton.jit
def _class(several, more, many):
    return several.to(tl.int32) + more.to(tl.int32) + many.to(tl.int32)


@triton.jit
def _begin_class(keys, i, key, head, num_ids, SHORT_LEN: tl.constexpr, MIDDLE_LEN: tl.constexpr):
    """Class of the runs that begin at i (where `head`), from the keys at three distances ahead."""
    several = head & (tl.load(keys + i + 1, mask=head & (i + 1 < num_ids), other=-1) == key)
    more = several & (tl.load(keys + i + SHORT_LEN, mask=several & (i + SHORT_LEN < num_ids), other=-1) == key)
    many = more & (tl.load(keys + i + MIDDLE_LEN, mask=more & (i + MIDDLE_LEN < num_ids), other=-1) == key)
    return _class(several, more, many)


@triton.jit
def _end_class(keys, i, key, end, SHORT_LEN: tl.constexpr, MIDDLE_LEN: tl.constexpr):
    """Class of the runs that end before i (where `end`): the same questions asked from the other side."""
    several = end & (tl.load(keys + i - 2, mask=end & (i >= 2), other=-1) == key)
    more = several & (tl.load(keys + i - 1 - SHORT_LEN, mask=several & (i > SHORT_LEN), other=-1) == key)
    many = more & (tl.load(keys + i - 1 - MIDDLE_LEN, mask=more & (i > MIDDLE_LEN), other=-1) == key)
    return _class(several, more, many)


@triton.jit
def _positions(tile, TILE: tl.constexpr, WIDE: tl.constexpr):
    """First sorted position of tiles."""
    if WIDE:
        tile = tile.to(tl.int64)
    return tile * TILE


@triton.jit
def _shift(kind):
    """Where the count of a class begins among packed counts: 10, 9, 8 and 5 bits hold the 128 single, 64 short, 26
    middle and 8 long runs that at most begin in a tile of 128."""
    return kind * 10 - kind * (kind - 1) // 2


@triton.jit
def _packed(kind, head):
    """A count of 1 in the field of each run's class. uint32."""
    return tl.where(head, tl.full(kind.shape, 1, tl.uint32) << _shift(kind), 0)


@triton.jit
def _field(packed, kind):
    return ((packed >> _shift(kind)) & ((1024 >> kind) - 1)).to(tl.int32)


@triton.jit
def _summed(counts, kind, num_tiles, mask):
    """Runs before the first of a class in this program's tile: those of lower classes, and of its own in earlier tiles.
    counts: inclusive sums."""
    at = kind * num_tiles + tl.program_id(0) - 1
    return tl.load(counts + at, mask=mask & (at >= 0), other=0)


@triton.jit
def _counts_before(counts, kinds, num_tiles, TILES: tl.constexpr):
    """The same for all classes `kinds` [CLASSES], from counts that are not summed."""
    own = tl.zeros(kinds.shape, tl.int32)
    whole = tl.zeros(kinds.shape, tl.int32)
    for begin in range(0, num_tiles, TILES):
        tile = begin + tl.arange(0, TILES)[None, :]
        count = tl.load(counts + kinds[:, None] * num_tiles + tile, mask=tile < num_tiles, other=0)
        whole += tl.sum(count, axis=1)
        own += tl.sum(tl.where(tile < tl.program_id(0), count, 0), axis=1)
    return tl.cumsum(whole, axis=0) - whole + own


@triton.jit
def _of_class(values, kinds, kind):
    """The value of each run's class, of the values [CLASSES] of the classes `kinds`."""
    of = tl.zeros(kind.shape, values.dtype)
    for c in tl.static_range(kinds.shape[0]):
        of = tl.where(kind == c, tl.sum(tl.where(kinds == c, values, 0), axis=0), of)
    return of


# Alignment of pointers would give loads of neighbouring keys other layouts than loads at a distance, and conversions
# between them would cost more than both.
@triton.jit(do_not_specialize=["num_ids", "num_tiles", "no_row"], do_not_specialize_on_alignment=["counts", "keys"])
def count_runs_kernel(
    counts,
    keys,
    num_ids,
    num_tiles,
    no_row,
    GROUP: tl.constexpr,  # tiles a program
    CLASSES: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    SHORT_LEN: tl.constexpr,
    MIDDLE_LEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """counts[c * num_tiles + tile] = runs of class c that begin in the tile."""
    begin_kernel(EARLY)
    tile = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    i = _positions(tile[:, None], TILE, WIDE) + tl.arange(0, TILE)[None, :]
    key = tl.load(keys + i, mask=i < num_ids, other=no_row)
    head = (key != tl.load(keys + i - 1, mask=(i > 0) & (i < num_ids), other=-1)) & (key < no_row)
    kind = _begin_class(keys, i, key, head, num_ids, SHORT_LEN, MIDDLE_LEN)
    total = tl.sum(_packed(kind, head), axis=1)
    for c in range(CLASSES):
        tl.store(counts + c * num_tiles + tile, _field(total, c), mask=tile < num_tiles)


@triton.jit(
    do_not_specialize=["num_ids", "num_tiles", "no_row", "num_tables", "num_buckets"],
    do_not_specialize_on_alignment=["first", "last", "row_key", "row_table", "counts", "keys", "payload"],
)
def write_runs_kernel(
    first,
    last,
    row_key,
    row_table,
    bounds,
    counts,  # of runs by class and tile; their inclusive sums when SUMMED
    keys,
    payload,
    table_key,
    bucket_key,
    num_ids,
    num_tiles,
    no_row,
    num_tables,
    num_buckets,
    SCALED: tl.constexpr,
    SUMMED: tl.constexpr,
    CLASSES: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    SHORT_LEN: tl.constexpr,
    MIDDLE_LEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes each run into its class, and where a run ends into the entry of the run that ends there."""
    begin_kernel(EARLY)
    begin = _positions(tl.program_id(0), TILE, WIDE)
    i = begin + tl.arange(0, TILE)
    reached = i <= num_ids
    key = tl.load(keys + i, mask=i < num_ids, other=no_row)
    previous = tl.load(keys + i - 1, mask=(i > 0) & reached, other=-1)
    change = reached & (key != previous)
    head = change & (key < no_row)
    ends = change & (previous >= 0)
    kind = _begin_class(keys, i, key, head, num_ids, SHORT_LEN, MIDDLE_LEN)
    ended = _end_class(keys, i, previous, ends, SHORT_LEN, MIDDLE_LEN)

    packed = _packed(kind, head)
    before = tl.cumsum(packed, axis=0) - packed  # runs of each class that begin in the tile before i
    kinds = tl.arange(0, CLASSES)
    if SUMMED:
        earlier = _summed(counts, kinds, num_tiles, kinds >= 0)
        rank = _summed(counts, kind, num_tiles, head) + _field(before, kind)
        ended_rank = _summed(counts, ended, num_tiles, ends) + _field(before, ended) - 1
    else:
        earlier = _counts_before(counts, kinds, num_tiles, 256)
        rank = _of_class(earlier, kinds, kind) + _field(before, kind)
        ended_rank = _of_class(earlier, kinds, ended) + _field(before, ended) - 1

    low = tl.load(keys + begin, mask=begin < num_ids, other=no_row)
    below = tl.load(keys + begin - 1, mask=begin > 0, other=-1)
    high = tl.load(keys + begin + TILE - 1, mask=begin + TILE <= num_ids, other=no_row)
    for k in range(num_buckets + 1):
        base = tl.load(bucket_key + k)
        if (below < base) & (base <= high):
            crossed = tl.sum(tl.where(reached & (previous < base) & (key >= base), before, 0), axis=0)
            tl.store(bounds + kinds * (num_buckets + 1) + k, earlier + _field(crossed, kinds))

    t = find_table(low, table_key, num_tables)
    table = tl.zeros([TILE], tl.int32) + t
    t += 1
    while (t < num_tables) & (tl.load(table_key + tl.minimum(t, num_tables - 1)) <= high):
        table += (key >= tl.load(table_key + t)).to(tl.int32)
        t += 1

    single = head & (kind == 0)
    entry = tl.load(payload + i, mask=single, other=0)
    tl.store(first + rank, tl.where(single, entry.to(tl.int32), i).to(first.dtype.element_ty), mask=head)
    tl.store(row_key + rank, key.to(row_key.dtype.element_ty), mask=head)
    tl.store(row_table + rank, table, mask=head)
    if SCALED:
        tl.store(last + rank, factor_bits(entry).to(last.dtype.element_ty), mask=single)
    tl.store(last + ended_rank, i.to(last.dtype.element_ty), mask=ends & (ended > 0))


def middle_run(few: bool) -> int:
    """Lookups of the longest middle run."""
    return MIDDLE_RUN_OF_FEW if few else MIDDLE_RUN


def transpose(layout: TableLayout, batch: Batch, launch: Launcher, few: bool) -> Runs:
    """Runs of a batch that has ids.

    few: the batch has few lookups (see tuning.py): middle runs end earlier, each program that writes adds up the counts
    before it itself, and programs get in place early.
    """
    device, num_ids = batch.indices.device, batch.indices.numel()
    weighted, vbe = batch.sample_weights is not None, batch.bag_output is not None
    scaled = batch.mean or weighted
    wide = wide_positions(num_ids)
    position = torch.int64 if wide else torch.int32
    keys = torch.empty(num_ids, dtype=layout.key_dtype, device=device)
    payload = torch.empty(num_ids, dtype=torch.int64 if scaled else torch.int32, device=device)
    if not batch.trusted:
        keys.fill_(layout.num_keys)
    num_bags = batch.offsets.numel() - 1
    bags = _SHORT_BAGS if num_ids <= _SHORT_BAG * num_bags and num_bags >= MANY_BAGS else _BAGS
    launch(
        ("linearize", bags), linearize_kernel, layout.num_features * cdiv(batch.batch_size, bags),
        lambda: {
            "BAGS": bags, "GROUP": _BAGS, "WEIGHTED": weighted, "MEAN": batch.mean, "VBE": vbe,
            "TRUSTED": batch.trusted, "NARROW": batch.trusted and layout.key_dtype == torch.int32, "num_warps": 4,
        },
        keys, payload, batch.indices, batch.offsets, batch.sample_weights, batch.bag_output, batch.batch_offsets,
        layout.feature_meta, batch.batch_size, num_ids, num_bags, layout.total_dim, layout.num_keys, early=few,
    )  # fmt: skip
    keys, payload = sort_pairs(keys, payload, layout.num_keys)

    tiles = cdiv(num_ids + 1, _TILE)
    counts = torch.empty(CLASSES * tiles, dtype=torch.int32, device=device)

    def constants(**others: Any) -> dict[str, Any]:
        lengths = {"SHORT_LEN": SHORT_RUN, "MIDDLE_LEN": middle_run(few)}
        return {"CLASSES": CLASSES, "TILE": _TILE, "WIDE": wide, **lengths, **others}

    launch(
        "count", count_runs_kernel, cdiv(tiles, _GROUP), lambda: constants(GROUP=_GROUP, num_warps=_GROUP),
        counts, keys, num_ids, tiles, layout.num_keys, early=few,
    )  # fmt: skip
    if not few:
        counts = counts.cumsum(0, dtype=position)
    num_buckets = len(layout.buckets)
    first, last = (torch.empty(num_ids, dtype=position, device=device) for _ in range(2))
    row_key = torch.empty(num_ids, dtype=layout.key_dtype, device=device)
    row_table = torch.empty(num_ids, dtype=torch.int32, device=device)
    bounds = torch.empty(CLASSES, num_buckets + 1, dtype=position, device=device)
    launch(
        "write", write_runs_kernel, tiles, lambda: constants(SCALED=scaled, SUMMED=not few, num_warps=1),
        first, last, row_key, row_table, bounds, counts, keys, payload, layout.table_key, layout.bucket_key,
        num_ids, tiles, layout.num_keys, layout.num_tables, num_buckets, early=few,
    )  # fmt: skip
    return Runs(keys, payload, first, last, row_key, row_table, bounds)
