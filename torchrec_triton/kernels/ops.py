"""The launchers: bounds check, pooled lookup, gradient of per-sample weights, and the update. The way into the kernels.

Functions take tensors and a `Batch`, launch on the current stream of the tensors' device and never wait for the device.
Between calls nothing is kept but what was compiled.
"""
from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from torchrec_triton.kernels import backward, bounds_check, forward, transpose, tuning
from torchrec_triton.kernels.common import Batch, TableLayout, cdiv, num_warps, tile_rows
from torchrec_triton.kernels.launch import Launcher, compile_only, kind_of

SUPER = 64  # blocks of a super block
# Blocks that a program of partial sums looks at where there are many, hardly any whole; and from one to the next.
_GROUP, _APART = 8, 64
_ENOUGH = 2**14  # programs of partial sums that keep a large GPU busy
_BUSY = 2**11  # programs of the lookup that do


@dataclass(frozen=True)
class Optimizer:
    """Hyper-parameters of one step, as they were when its forward ran. weight_decay_mode: 0 none, 1 L2, 2 decoupled."""

    adagrad: bool
    learning_rate: float
    eps: float
    weight_decay: float
    weight_decay_mode: int
    max_gradient: float | None
    stochastic_rounding: bool
    seed: int


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes the tensors' GPU current, where Triton launches."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


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
            bag_output, block_output, batch_offsets, rank_offsets, layout.feature_meta, layout.num_features, num_ranks,
            BLOCK=256, num_warps=2,
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

    repairs: the counter of the bounds check, or None where there is none.
    """
    device, features = weights.device, layout.num_features
    num_ids = 2 * SUPER * max(128, layout.max_block_d)  # enough for a block of blocks

    def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    with _on(device), compile_only() as names:
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
            check_bounds(layout, batch, repairs)
        lookup(layout, weights, batch, out)
        if weighted:
            sample_weight_grad(layout, weights, out, batch, None, optimizer.max_gradient)
        update(layout, weights, state, out, batch, optimizer)  # which sorts, and so builds or loads the sort
    return names


def check_bounds(layout: TableLayout, batch: Batch, repairs: torch.Tensor) -> None:
    """Repairs ids and offsets of the batch in place where they are out of range, and adds the number of repairs.

    repairs: int64 [1].
    """
    num_ids, num_bags = batch.indices.numel(), batch.offsets.numel() - 1
    if num_bags == 0:
        return
    tile = 1024
    launch = layout.launcher("check", batch.kind, kind_of(repairs))
    with _on(repairs.device):
        launch(
            "offsets", bounds_check.check_offsets_kernel, cdiv(num_bags, tile),
            batch.offsets, repairs, num_bags, num_ids, TILE=tile, num_warps=4,
        )  # fmt: skip
        if num_ids:
            launch(
                "ids", bounds_check.check_ids_kernel, cdiv(num_ids, tile),
                batch.indices, batch.offsets, batch.batch_offsets, layout.feature_meta, repairs, batch.batch_size,
                num_ids, layout.num_features, TILE=tile, VBE=batch.batch_offsets is not None, num_warps=4,
            )  # fmt: skip


def lookup(layout: TableLayout, weights: torch.Tensor, batch: Batch, output: torch.Tensor) -> None:
    """Writes the pooled rows of all bags. output: [B, total_dim], or 1-D under VBE; fp32, fp16 or bf16."""
    if batch.offsets.numel() <= 1:
        return
    num_ids = batch.indices.numel()
    launch = layout.launcher("lookup", batch.kind, kind_of(weights, output))
    double = weights.dtype == torch.float32  # sums of fp32 rows
    with _on(weights.device):
        for index, bucket in enumerate(layout.buckets):
            elements = tuning.TILES.forward if bucket.exact else tuning.TILES.forward_padded
            bags = tile_rows(bucket.block_d, elements // 2 if double else elements)
            each, programs = bags, bucket.num_features * cdiv(batch.batch_size, bags)
            if programs < _BUSY and num_ids >= 4 * (batch.offsets.numel() - 1):
                each = max(1, bags * programs // _BUSY)
            launch(
                index, forward.tbe_fwd_kernel, bucket.num_features * cdiv(batch.batch_size, each),
                output, weights, batch.indices, batch.offsets, batch.sample_weights, batch.bag_output,
                batch.batch_offsets, bucket.features, layout.feature_meta, batch.batch_size, num_ids, layout.total_dim,
                each, BAGS=bags, BLOCK_D=bucket.block_d, WEIGHT_VEC=bucket.weight_vec,
                ACC=tl.float64 if double else tl.float32, EXACT=bucket.exact,
                TRUSTED=batch.trusted, WIDE=layout.wide_rows,
                WEIGHTED=batch.sample_weights is not None, MEAN=batch.mean, VBE=batch.bag_output is not None,
                num_warps=num_warps(bucket.block_d, bags),
            )  # fmt: skip


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
    launch = layout.launcher("weight grad", batch.kind, kind_of(weights, grad, wanted), clip)
    with _on(weights.device):
        for index, bucket in enumerate(layout.buckets):
            bags = tile_rows(bucket.block_d)
            launch(
                index, backward.sample_weight_grad_kernel, bucket.num_features * cdiv(batch.batch_size, bags),
                weight_grad, weights, grad, batch.indices, batch.offsets, batch.bag_output, batch.batch_offsets,
                bucket.features, layout.feature_meta, wanted, batch.batch_size, batch.indices.numel(), layout.total_dim,
                max_gradient if max_gradient is not None else 0.0,
                BAGS=bags, BLOCK_D=bucket.block_d, WEIGHT_VEC=bucket.weight_vec,
                EXACT=bucket.exact, TRUSTED=batch.trusted, WIDE=layout.wide_rows,
                MASKED=wanted is not None, VBE=batch.bag_output is not None, CLIP=clip,
                num_warps=num_warps(bucket.block_d, bags),
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
    stochastic = optimizer.stochastic_rounding and weights.dtype != torch.float32
    flags = {
        "SCALED": batch.mean or batch.sample_weights is not None, "CLIP": optimizer.max_gradient is not None,
        "ADAGRAD": optimizer.adagrad, "DECAY": optimizer.weight_decay_mode, "STOCHASTIC": stochastic,
    }  # fmt: skip
    launch = layout.launcher("update", batch.kind, kind_of(weights, state, grad), *flags.values())
    with _on(weights.device):
        runs = transpose.transpose(layout, batch, launch)
        _apply(layout, weights, state, grad, runs, optimizer, launch, flags)


def _apply(
    layout: TableLayout,
    weights: torch.Tensor,
    state: torch.Tensor,
    grad: torch.Tensor,
    runs: transpose.Runs,
    optimizer: Optimizer,
    launch: Launcher,
    flags: dict[str, Any],
) -> None:
    num_ids = runs.keys.numel()
    width, block, tiles = layout.max_block_d, max(128, layout.max_block_d), tuning.TILES
    blocks = torch.empty(num_ids // block, width, dtype=torch.float32, device=grad.device)
    supers = torch.empty(num_ids // (block * SUPER), width, dtype=torch.float32, device=grad.device)
    max_gradient = optimizer.max_gradient if optimizer.max_gradient is not None else 0.0
    step = (optimizer.learning_rate, optimizer.eps, optimizer.weight_decay, max_gradient, optimizer.seed)
    descriptors = (weights, state, grad, runs.first, runs.last, runs.row_key, runs.row_table, runs.bounds)
    # Most runs of one lookup, of two and more, and long ones that the lookups can make.
    single, short, long = num_ids, num_ids // 2, num_ids // (transpose.MIDDLE_RUN + 1)
    ranges = len(layout.buckets) + 1
    for index, bucket in enumerate(layout.buckets):
        d = bucket.block_d
        shape: dict[str, Any] = {"BLOCK_D": d, "EXACT": bucket.exact}
        rows = {"VEC": bucket.weight_vec, **shape, **flags}
        look, abreast = tile_rows(d, tiles.long if d < 256 else tiles.long_wide), tile_rows(d, tiles.short)
        for super_blocks, partial in ((1, blocks), (SUPER, supers)):
            if count := partial.shape[0]:
                each = min(_GROUP, max(1, count // _ENOUGH))
                launch(
                    ("partial", super_blocks, index), backward.partial_sums_kernel,
                    cdiv(count, each * _APART) * _APART,
                    partial, runs.keys, grad, runs.payload, blocks, layout.table_key, layout.table_meta,
                    count, layout.num_tables, bucket.key_begin, bucket.key_end, max_gradient, each,
                    GROUP=_GROUP, APART=_APART, SUPER=super_blocks, BLOCK=block, LOOK=look, WIDTH=width, **shape,
                    SCALED=flags["SCALED"], CLIP=flags["CLIP"], num_warps=num_warps(d, look),
                )  # fmt: skip
        warps = num_warps(d, abreast, tiles.short_warp)
        launch(
            ("single", index), backward.update_single_kernel, cdiv(single, abreast),
            *descriptors, transpose.SINGLE * ranges + index, layout.table_meta, *step,
            RUNS=abreast, **rows, num_warps=warps, resident=True,
        )  # fmt: skip
        if short:
            launch(
                ("short", index), backward.update_short_kernel, cdiv(short, abreast),
                *descriptors, transpose.SHORT * ranges + index, ranges, runs.payload, layout.table_meta, *step,
                KINDS=transpose.LONG - transpose.SHORT, RUNS=abreast, **rows, num_warps=warps, resident=True,
            )  # fmt: skip
        if long:
            launch(
                ("long", index), backward.update_long_kernel, long,
                *descriptors, transpose.LONG * ranges + index, runs.payload, blocks, supers, layout.table_meta, *step,
                LOOK=look, WIDTH=width, BLOCK=block, SUPER=SUPER, **rows, num_warps=num_warps(d, look), resident=True,
            )  # fmt: skip
