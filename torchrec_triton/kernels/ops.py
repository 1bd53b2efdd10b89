"""The launchers: check of offsets, pooled lookup, gradient of per-sample weights, and the update.

Functions take tensors and a `Batch`, launch on the current stream of the tensors' device and never wait for the device.
Between calls nothing is kept but what was compiled, and its tiles.
"""
from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl

from torchrec_triton.kernels import backward, bounds_check, forward, transpose, tuning
from torchrec_triton.kernels.common import Batch, TableLayout, cdiv, num_warps, tile_rows
from torchrec_triton.kernels.launch import Launcher, compile_only, kind_of

# Blocks that a program of partial sums looks at where there are many, hardly any whole; and from one to the next.
_GROUP, _APART = 8, 64
_ENOUGH = 2**14  # programs of partial sums that keep a large GPU busy
_BUSY = 32 * 132  # programs of the lookup that an H200 holds at a time
_CHECK = 256  # ids that a program of the lookup checks at a step
_EARLY = 2**12  # programs of the lookup, at most, that gain by getting in place early


class Rule(NamedTuple):
    """What an optimizer does at every step. weight_decay_mode: 0 none, 1 L2, 2 decoupled."""

    adagrad: bool
    eps: float
    weight_decay: float
    weight_decay_mode: int
    max_gradient: float | None
    stochastic_rounding: bool

    @property
    def kind(self) -> tuple:
        """What kernels are compiled for."""
        return self.adagrad, self.weight_decay_mode, self.max_gradient is not None, self.stochastic_rounding


class Optimizer(NamedTuple):
    """Hyper-parameters of one step, as they were when its forward ran."""

    rule: Rule
    learning_rate: float
    seed: int


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes the tensors' GPU current, where Triton launches."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def _division(layout: TableLayout, num_ids: int) -> TableLayout:
    """The layout in buckets of dims, or as one bucket where a batch is so small that more launches would cost more."""
    small = layout.undivided is not None and num_ids * layout.max_block_d <= tuning.TILES.few_elements
    return layout.undivided if small else layout  # type: ignore[return-value]


def bag_output_offsets(
    layout: TableLayout,
    block_output: torch.Tensor,
    batch_offsets: torch.Tensor,
    rank_offsets: torch.Tensor,
    num_bags: int,
) -> torch.Tensor:
    """Output offset of each bag under VBE, int64 [num_bags] (elements).

    block_output: int64 [ranks * F], where the block of a rank and feature begins, rank-major.
    batch_offsets: [F + 1], first bag of each feature.
    rank_offsets: [F, ranks + 1], first bag of each rank in its feature.
    """
    num_ranks = rank_offsets.shape[1] - 1
    bag_output = torch.empty(num_bags, dtype=torch.int64, device=batch_offsets.device)
    with _on(batch_offsets.device):
        launch = layout.launcher("bag output", kind_of(block_output, batch_offsets, rank_offsets))
        launch(
            "bag output", forward.bag_output_kernel, layout.num_features * num_ranks,
            lambda: {"BLOCK": 256, "num_warps": 2},
            bag_output, block_output, batch_offsets, rank_offsets, layout.feature_meta, layout.num_features, num_ranks,
        )  # fmt: skip
    return bag_output


def compile_step(
    layout: TableLayout,
    weights: torch.Tensor,
    state: torch.Tensor,
    repairs: torch.Tensor | None,
    optimizer: Optimizer,
    *,
    ids: torch.dtype,
    output: torch.dtype,
    weighted: bool,
    vbe: bool,
    mean: bool,
    trusted: bool,
) -> list[str]:
    """Compiles what a forward and a backward of such calls launch; runs no kernel. Returns the kernels' names.

    repairs: the counter of repaired ids and offsets, or None where none are repaired.
    """
    device, features, tiles = weights.device, layout.num_features, tuning.TILES

    def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    # The most lookups that are one bucket, the most that are few, and many. Smaller batches launch no others.
    widest = layout.max_block_d
    sizes = {min(tiles.few, tiles.few_elements // widest), tiles.few, max(tiles.few, 64 * max(128, widest)) + 1}
    with _on(device), compile_only() as names:
        for num_ids in sorted(sizes):
            bag_output = batch_offsets = None
            if vbe:
                batch_offsets = empty(features + 1, torch.int32)
                ranks = empty(2 * features, torch.int32).view(features, 2)
                bag_output = bag_output_offsets(layout, empty(features, torch.int64), batch_offsets, ranks, features)
            batch = Batch(
                empty(num_ids, ids), empty(features + 1, ids), empty(num_ids, torch.float32) if weighted else None,
                bag_output, batch_offsets, 1, layout.total_dim, mean, trusted,
            )  # fmt: skip
            out = empty(layout.total_dim, output)
            if repairs is not None:
                check_offsets(layout, batch, repairs)
            # Programs get in place early, bags being short or long; or they are too many.
            for batch_size, bags in ((1, num_ids), (1, 1), (2**18, 1)):
                bagged = replace(batch, offsets=empty(bags + 1, ids), batch_size=batch_size)
                lookup(layout, weights, bagged, out, repairs)
            if weighted:
                sample_weight_grad(layout, weights, out, batch, None, optimizer.rule.max_gradient)
            for many in (batch.offsets, empty(max(num_ids, transpose.MANY_BAGS) + 1, ids)):  # bags
                # It sorts, and so builds or loads the sort.
                update(layout, weights, state, out, replace(batch, offsets=many, kind=None), optimizer)
    return names


def check_offsets(layout: TableLayout, batch: Batch, repairs: torch.Tensor) -> None:
    """Repairs offsets of the batch in place where they are out of range or decrease, and adds the number of bags that
    needed it.

    repairs: int64 [1].
    """
    num_ids, num_bags = batch.indices.numel(), batch.offsets.numel() - 1
    if num_bags == 0:
        return
    tile, early = 1024, num_ids <= tuning.TILES.few
    launch = layout.launcher("check", batch.kind, kind_of(repairs), early)
    with _on(repairs.device):
        launch(
            "offsets", bounds_check.check_offsets_kernel, cdiv(num_bags, tile), lambda: {"TILE": tile, "num_warps": 4},
            batch.offsets, repairs, num_bags, num_ids, early=early,
        )  # fmt: skip


def lookup(
    layout: TableLayout, weights: torch.Tensor, batch: Batch, output: torch.Tensor, repairs: torch.Tensor | None = None
) -> None:
    """Writes the pooled rows of all bags, and repairs ids that are out of range where `repairs` counts them.

    output: [B, total_dim], or 1-D under VBE; fp32, fp16 or bf16. repairs: int64 [1], or None.
    """
    num_ids, num_bags = batch.indices.numel(), batch.offsets.numel() - 1
    if num_bags == 0:
        return
    layout = _division(layout, num_ids)
    launch = layout.launcher("lookup", batch.kind, kind_of(weights, output, repairs))
    double = weights.dtype == torch.float32  # sums of fp32 rows
    with _on(weights.device):
        for index, bucket in enumerate(layout.buckets):
            elements = tuning.TILES.forward if bucket.exact else tuning.TILES.forward_padded
            if double:
                elements //= 2
            bags, length = tile_rows(bucket.block_d, elements), num_ids / num_bags
            each = _bags_a_program(bags, bucket.num_features * cdiv(batch.batch_size, bags), length)
            programs = bucket.num_features * cdiv(batch.batch_size, each)
            early = programs <= _EARLY
            if each == 1 and early and length >= 4 * bags:  # so few that each has room for twice as many rows
                bags = tile_rows(bucket.block_d, 2 * elements)
            launch(
                (index, bags, early), forward.tbe_fwd_kernel, programs,
                lambda: {
                    "BAGS": bags, "BLOCK_D": bucket.block_d, "WEIGHT_VEC": bucket.weight_vec, "EXACT": bucket.exact,
                    "ACC": tl.float64 if double else tl.float32, "CHECK": _CHECK if repairs is not None else 0,
                    "TRUSTED": batch.trusted, "WIDE": layout.wide_rows, "WEIGHTED": batch.sample_weights is not None,
                    "MEAN": batch.mean, "VBE": batch.bag_output is not None,
                    "num_warps": num_warps(bucket.block_d, bags),
                },
                output, weights, batch.indices, batch.offsets, batch.sample_weights, batch.bag_output,
                batch.batch_offsets, repairs, bucket.features, layout.feature_meta, batch.batch_size, num_ids,
                layout.total_dim, each, early=early,
            )  # fmt: skip


def _bags_a_program(bags: int, programs: int, length: float) -> int:
    """Bags that a program of the lookup pools: all of its tile's side by side, which takes a step for every lookup of a
    bag, and longer where their ids lie far apart; a fourth of them, four lookups of a bag at a step; or a few one after
    another, `bags` lookups of one at a step.

    bags: of a tile. programs: with so many bags each. length: of a bag, on average.
    """
    some = max(1, bags * programs // _BUSY)
    steps = {bags: (length + 2) * (1 + length * bags**3 / 2**20) * max(_BUSY, programs)}
    if bags >= 8 and length >= 4:
        steps[bags // 4] = (length / 4 + 2) * max(_BUSY, 4 * programs)
    if some < bags:
        steps.setdefault(some, (length / bags + 2) * max(some * _BUSY, bags * programs))
    return min(steps, key=steps.__getitem__)


def sample_weight_grad(
    layout: TableLayout,
    weights: torch.Tensor,
    grad: torch.Tensor,
    batch: Batch,
    wanted: torch.Tensor | None,
    max_gradient: float | None,
) -> torch.Tensor:
    """Gradient of the per-sample weights, fp32 [N], from the rows as they are now: call it before `update`.

    grad: gradient of the output, contiguous. wanted: int32 [F], 0 where a feature's weights want none, or None for all.
    """
    weight_grad = torch.zeros(batch.indices.numel(), dtype=torch.float32, device=weights.device)
    if batch.indices.numel() == 0 or batch.offsets.numel() <= 1:
        return weight_grad
    clip = max_gradient is not None
    layout, few = _division(layout, batch.indices.numel()), batch.indices.numel() <= tuning.TILES.few
    launch = layout.launcher("weight grad", batch.kind, kind_of(weights, grad, wanted), clip, few)
    with _on(weights.device):
        for index, bucket in enumerate(layout.buckets):
            bags = tile_rows(bucket.block_d)
            launch(
                index, backward.sample_weight_grad_kernel, bucket.num_features * cdiv(batch.batch_size, bags),
                lambda: {
                    "BAGS": bags, "BLOCK_D": bucket.block_d, "WEIGHT_VEC": bucket.weight_vec, "EXACT": bucket.exact,
                    "TRUSTED": batch.trusted, "WIDE": layout.wide_rows, "MASKED": wanted is not None,
                    "VBE": batch.bag_output is not None, "CLIP": clip, "num_warps": num_warps(bucket.block_d, bags),
                },
                weight_grad, weights, grad, batch.indices, batch.offsets, batch.bag_output, batch.batch_offsets,
                bucket.features, layout.feature_meta, wanted, batch.batch_size, batch.indices.numel(), layout.total_dim,
                max_gradient if max_gradient is not None else 0.0, early=few,
            )  # fmt: skip
    return weight_grad


def update(
    layout: TableLayout,
    weights: torch.Tensor,
    state: torch.Tensor,
    grad: torch.Tensor,
    batch: Batch,
    optimizer: Optimizer,
) -> None:
    """Sums the gradient of every row that the batch touched and applies the optimizer to it, once a row, in place.

    weights: the flat tables; state: the flat fp32 row-wise state (unused by SGD).
    grad: gradient of the output, contiguous.
    """
    if batch.indices.numel() == 0 or batch.offsets.numel() <= 1 or layout.num_keys == 0:
        return
    num_ids = batch.indices.numel()
    layout, few = _division(layout, num_ids), num_ids <= tuning.TILES.few
    launch = layout.launcher("update", batch.kind, kind_of(weights, state, grad), few, optimizer.rule.kind)
    with _on(weights.device):
        runs = transpose.transpose(layout, batch, launch, few)
        _apply(layout, weights, state, grad, batch, runs, optimizer, launch, few)


class _Update(NamedTuple):
    """A launch of `update_kernel` for the classes lowest to highest. abreast: runs of a tile, side by side; warps: of a
    program."""

    place: tuple
    lowest: tl.constexpr
    highest: tl.constexpr
    abreast: int
    warps: int


class _Tiling(NamedTuple):
    """What the launches for one bucket are like. look, block_look: lookups of a long run, and of a block, side by side.
    constants: of all these launches; rule: of the updates, from the optimizer."""

    look: int
    block_look: int
    updates: tuple[_Update, ...]
    constants: dict[str, Any]
    rule: dict[str, Any]


def _tiling(
    layout: TableLayout, index: int, batch: Batch, rule: Rule, dtype: torch.dtype, few: bool
) -> _Tiling:
    bucket, tiles, width = layout.buckets[index], tuning.TILES, layout.max_block_d
    d, scaled = bucket.block_d, batch.mean or batch.sample_weights is not None
    look = tile_rows(d, tiles.long if d < 256 else tiles.long_wide)
    wide = num_warps(d, look)
    # A launch for all classes has the warps of long runs.
    abreast = tile_rows(d, tiles.short_warp * wide if few else tiles.short)
    # Fewer fp32 rows at a time leave their gradients in the cache: kernel-log 28, which says where it was measured.
    several = abreast // 2 if not few and dtype == torch.float32 and d == 128 and not scaled else abreast
    warps = num_warps(d, abreast, tiles.short_warp)
    classes = (
        [(transpose.SINGLE, transpose.LONG, abreast, wide)]
        if few
        else [
            (transpose.SINGLE, transpose.SINGLE, abreast, warps),
            (transpose.SHORT, transpose.MIDDLE, several, warps),
            (transpose.LONG, transpose.LONG, abreast, wide),
        ]
    )
    return _Tiling(
        look,
        tile_rows(d, 4 * tiles.long) if few else look,
        tuple(_Update(("update", highest.value, index), lowest, highest, *rest) for lowest, highest, *rest in classes),
        {
            "BLOCK_D": d, "EXACT": bucket.exact, "WIDTH": width, "BLOCK": _block(few, width), "SCALED": scaled,
            "CLIP": rule.max_gradient is not None,
        },
        {
            "ADAGRAD": rule.adagrad, "DECAY": rule.weight_decay_mode, "VEC": bucket.weight_vec,
            "STOCHASTIC": rule.stochastic_rounding and dtype != torch.float32,
        },
    )  # fmt: skip


def _block(few: bool, width: int) -> int:
    """Lookups of a block of partial sums."""
    return max(32, width // 4) if few else max(128, width)


def _apply(
    layout: TableLayout,
    weights: torch.Tensor,
    state: torch.Tensor,
    grad: torch.Tensor,
    batch: Batch,
    runs: transpose.Runs,
    optimizer: Optimizer,
    launch: Launcher,
    few: bool,
) -> None:
    num_ids, width = runs.keys.numel(), layout.max_block_d
    block, super_blocks = _block(few, width), 256 if few else 64
    blocks = torch.empty(num_ids // block, width, dtype=torch.float32, device=grad.device)
    supers = torch.empty(num_ids // (block * super_blocks), width, dtype=torch.float32, device=grad.device)
    rule = optimizer.rule
    max_gradient = rule.max_gradient if rule.max_gradient is not None else 0.0
    least_long = transpose.middle_run(few) + 1  # lookups
    if launch.kept is None:
        buckets = range(len(layout.buckets))
        launch.kept = [_tiling(layout, index, batch, rule, weights.dtype, few) for index in buckets]
    for index, (bucket, tiling) in enumerate(zip(layout.buckets, launch.kept)):
        for size, partial in ((1, blocks), (super_blocks, supers)):
            if count := partial.shape[0]:
                each = min(_GROUP, max(1, count // _ENOUGH))
                launch(
                    ("partial", size, index), backward.partial_sums_kernel, cdiv(count, each * _APART) * _APART,
                    lambda: {
                        "GROUP": _GROUP, "APART": _APART, "SUPER": size, "LOOK": tiling.block_look, **tiling.constants,
                        "num_warps": num_warps(bucket.block_d, tiling.block_look),
                    },
                    partial, runs.keys, grad, runs.payload, blocks, layout.table_key, layout.table_meta,
                    count, layout.num_tables, bucket.key_begin, bucket.key_end, max_gradient, each, early=few,
                )  # fmt: skip
        for update in tiling.updates:
            # For as many runs of one lookup, of two and more, and long ones, as the lookups can make.
            single, short = cdiv(num_ids, update.abreast), cdiv(num_ids // 2, update.abreast)
            long = num_ids // least_long
            programs = single + short + long if few else (single, short, short, long)[update.highest.value]
            if programs:
                launch(
                    update.place, backward.update_kernel, programs,
                    lambda: {
                        "LOWEST": update.lowest.value, "HIGHEST": update.highest.value, "RUNS": update.abreast,
                        "LOOK": tiling.look, "SUPER": super_blocks, **tiling.constants, **tiling.rule,
                        "num_warps": update.warps,
                    },
                    weights, state, grad, runs.first, runs.last, runs.row_key, runs.row_table, runs.bounds, index,
                    len(layout.buckets), runs.payload, blocks, supers, layout.table_meta, optimizer.learning_rate,
                    rule.eps, rule.weight_decay, max_gradient, optimizer.seed, resident=True, early=few,
                )  # fmt: skip
