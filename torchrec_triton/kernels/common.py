"""What every kernel shares: the layout of the tables, rounding, and small helpers.

Units. A *lookup* is one id of one bag. The tables of a module lie in one flat array; a *row key* numbers the rows of
all tables, with the tables ordered by dim bucket, so that the rows of a bucket are one range of keys. Rows of one
bucket are processed by kernels whose tile is `block_d` wide: the next power of two of every dim in it, MIN_BLOCK_D at
least.
"""
from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from torchrec_triton.kernels.launch import Launcher, kind_of

# Elements that one warp holds of a tile: 32 lanes with 32 fp32 registers each.
WARP_TILE = 1024
MIN_BLOCK_D = 16
# FBGEMM's dims are multiples of 4, so every row of the output starts at one. Offsets of rows are kept in this unit, in
# 32 bits.
OUTPUT_UNIT = tl.constexpr(4)
MAX_OUTPUT = 4 * 2**31  # elements
# Numbers a feature and a table have in TableLayout.feature_meta and table_meta.
FEATURE_FIELDS = tl.constexpr(5)
TABLE_FIELDS = tl.constexpr(3)


@dataclass(frozen=True)
class Bucket:
    """Tables whose rows are processed by the same kernels."""

    block_d: int  # tile width, a power of two >= every dim in the bucket
    weight_vec: int  # elements: every row of every table starts at a multiple of it
    exact: bool  # all dims equal block_d
    features: torch.Tensor  # int32 [n], the features that read these tables
    key_begin: int
    key_end: int

    @property
    def num_features(self) -> int:
        return self.features.numel()


@dataclass(frozen=True)
class TableLayout:
    """Where tables, states and output columns lie; built once a module and device.

    feature_meta: int64 [F, 5]: first row key, rows, weight offset (elements), dim, output column (elements).
    table_key: key_dtype [T + 1]: first row key of each table in bucket order, then the number of keys.
    table_meta: int64 [T, 3] in bucket order: weight offset - first key * dim, state offset - first key, dim.
    bucket_key: key_dtype [buckets + 1]: first row key of each bucket, then the number of keys.
    """

    feature_meta: torch.Tensor
    table_key: torch.Tensor
    table_meta: torch.Tensor
    bucket_key: torch.Tensor
    buckets: tuple[Bucket, ...]
    num_features: int
    num_tables: int
    num_keys: int
    total_dim: int
    max_block_d: int
    key_dtype: torch.dtype  # int32 wherever the rows allow it
    wide_rows: bool  # a table's rows pass 2^31
    undivided: TableLayout | None = None  # the same with all tables in one bucket, where there are several
    launchers: dict[Hashable, Launcher] = field(default_factory=dict, repr=False, compare=False)

    def launcher(self, *kind: Hashable) -> Launcher:
        """The launcher of calls of one kind."""
        if kind not in self.launchers:
            self.launchers[kind] = Launcher(self.feature_meta.device)
        return self.launchers[kind]

    @staticmethod
    def build(
        rows: list[int],
        dims: list[int],
        weight_offsets: list[int],
        state_offsets: list[int],
        feature_table: list[int],
        device: torch.device,
    ) -> TableLayout:
        """Layout of T tables and F features.

        rows, dims, weight_offsets, state_offsets (elements): one entry a table.
        feature_table: the table of each feature.
        """
        blocks = [max(MIN_BLOCK_D, triton.next_power_of_2(d)) for d in dims]
        order = sorted(range(len(rows)), key=lambda t: (blocks[t], t))
        key_begin, table_key, next_key = {}, [], 0
        for t in order:
            key_begin[t] = next_key
            table_key.append(next_key)
            next_key += rows[t]
        columns, total_dim = [], 0
        for t in feature_table:
            columns.append(total_dim)
            total_dim += dims[t]
        buckets = []
        for block_d in sorted(set(blocks)):
            tables = [t for t in order if blocks[t] == block_d]
            features = [f for f, t in enumerate(feature_table) if blocks[t] == block_d]
            buckets.append(
                Bucket(
                    block_d=block_d,
                    weight_vec=_vector([x for t in tables for x in (dims[t], weight_offsets[t])]),
                    exact=all(dims[t] == block_d for t in tables),
                    features=torch.tensor(features, dtype=torch.int32, device=device),
                    key_begin=key_begin[tables[0]],
                    key_end=key_begin[tables[-1]] + rows[tables[-1]],
                )
            )

        # The largest key, num_keys, marks lookups that have no row.
        key_dtype = torch.int32 if next_key < 2**31 - 1 else torch.int64

        def tensor(values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        layout = TableLayout(
            feature_meta=tensor(
                [[key_begin[t], rows[t], weight_offsets[t], dims[t], columns[f]] for f, t in enumerate(feature_table)]
            ),
            table_key=tensor(table_key + [next_key], key_dtype),
            table_meta=tensor(
                [[weight_offsets[t] - key_begin[t] * dims[t], state_offsets[t] - key_begin[t], dims[t]] for t in order]
            ),
            bucket_key=tensor([b.key_begin for b in buckets] + [next_key], key_dtype),
            buckets=tuple(buckets),
            num_features=len(feature_table),
            num_tables=len(rows),
            num_keys=next_key,
            total_dim=total_dim,
            max_block_d=max(blocks),
            key_dtype=key_dtype,
            wide_rows=max(rows) >= 2**31,
        )
        if len(buckets) == 1:
            return layout
        everything = Bucket(
            block_d=layout.max_block_d,
            weight_vec=min(b.weight_vec for b in buckets),
            exact=False,
            features=torch.arange(layout.num_features, dtype=torch.int32, device=device),
            key_begin=0,
            key_end=next_key,
        )
        bucket_key = tensor([0, next_key], key_dtype)
        return replace(layout, undivided=replace(layout, buckets=(everything,), bucket_key=bucket_key, launchers={}))


@dataclass
class Batch:
    """The ids of one call. Its backward has the same.

    indices [N] and offsets [bags + 1] int32 or int64; sample_weights [N] fp32 or None.
    bag_output: VBE only, int64 [bags], where each bag's row begins in the 1-D output (elements).
    batch_offsets: VBE only, [F + 1], first bag of each feature.
    batch_size: bags a feature; under VBE the most bags of any feature.
    output_size: elements of the output.
    mean: divide by the bag length.
    trusted: ids and offsets are in range where a kernel uses them: ids of bags are below the rows of their table,
        offsets don't decrease. `ops.check_offsets` and then `ops.lookup` with `repairs` see to it.
    kind: what the batch brings into the kind of a call: types, flags, and whether counts need 64 bits. Follows from
        the rest, and is found once.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    sample_weights: torch.Tensor | None
    bag_output: torch.Tensor | None
    batch_offsets: torch.Tensor | None
    batch_size: int
    output_size: int
    mean: bool
    trusted: bool
    kind: Hashable = None

    def __post_init__(self) -> None:
        if self.kind is None:
            num_ids = self.indices.numel()
            self.kind = (
                self.indices.dtype, self.offsets.dtype, self.sample_weights is not None,
                kind_of(self.bag_output, self.batch_offsets), self.mean, self.trusted, num_ids >= 2**31,
                self.offsets.numel() > 2**31, wide_positions(num_ids),
            )  # fmt: skip


def wide_positions(num_ids: int) -> bool:
    """Whether sorted positions need 64 bits; tiles may reach a little past the last."""
    return num_ids >= 2**31 - 2**20


def _vector(values: list[int]) -> int:
    """Largest power of two, 8 at most (16 bytes of fp16), that divides all values (elements)."""
    return math.gcd(8, *values)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. triton.cdiv can be traced, which costs the host more than most launches do."""
    return -(-a // b)


def num_warps(block_d: int, rows: int, elements: int = WARP_TILE) -> int:
    """Warps of a tile of `rows` rows, for `elements` elements a warp."""
    return min(8, max(1, block_d * rows // elements))


def tile_rows(block_d: int, elements: int = WARP_TILE, most: int = 32) -> int:
    """Rows of a tile of about `elements` elements, at least 1 and at most `most`."""
    return max(1, min(most, elements // block_d))


@triton.jit
def begin_kernel(EARLY: tl.constexpr):
    """First statement of every kernel: waits until the kernels before it on the stream have ended, if EARLY.

    With programmatic dependent launch (`Launcher` asks for it where EARLY) the programs of a kernel get in place while
    the one before ends, which hides part of what a launch costs. To wait costs each program 1.5 us, which is too much
    for kernels of many programs.
    """
    if EARLY:
        gdc_wait()


@triton.jit
def find_table(key, table_key, num_tables):
    """Index of the table that holds a row key: the last t with table_key[t] <= key."""
    low = num_tables * 0
    high = num_tables - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(table_key + middle) <= key:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def random_bits(seed, row, d):
    """16 random bits for each element of rows `row` [R, 1] and columns `d` [1, D], uint32.

    Mixed from the seed and the row, then once more for each pair of columns: every element is uniform over seeds and
    rows, which is what makes rounding unbiased, at a tenth of what Philox costs.
    """
    x = row.to(tl.uint32) * 0x9E3779B1 ^ seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B + (seed >> 32).to(tl.uint32)
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) + (d // 2).to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    x ^= x >> 16
    return tl.where(d % 2 == 0, x >> 16, x & 0xFFFF)


@triton.jit
def round_to(x, dtype: tl.constexpr, bits, STOCHASTIC: tl.constexpr):
    """fp32 values rounded to `dtype`, to nearest or, with 16 `bits` an element, stochastically (unbiased).

    A stochastic rounding adds random bits below the last kept one and cuts them off. NaN and infinity stay what they
    are.
    """
    if dtype == tl.bfloat16:
        # On the bit pattern because the interpreter's cast truncates.
        raw = x.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            up = bits
        else:
            up = 0x7FFF + ((raw >> 16) & 1)
        finite = (raw & 0x7F800000) != 0x7F800000
        raw = tl.where(finite, raw + up, raw | ((raw & 0x7FFFFF) != 0).to(tl.uint32) << 22)
        x = (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        if STOCHASTIC:
            # Below 2^-14 fp16 is spaced by 2^-24; shifted by 2^-14 away from 0, fp32 drops the same 13 bits there as
            # above.
            sign = x.to(tl.uint32, bitcast=True) & 0x80000000
            shift = tl.where(tl.abs(x) < 6.103515625e-05, (sign | 0x38800000).to(tl.float32, bitcast=True), 0.0)
            raw = ((x + shift).to(tl.uint32, bitcast=True) + (bits >> 3)) & 0xFFFFE000
            # x * 0 is NaN where x is not finite, and those bits are not to be trusted.
            x = x * 0.0 + (raw.to(tl.float32, bitcast=True) - shift)
        x = x.to(tl.float16)
    return x
