"""The launchers: bounds check, pooled lookup, gradient of per-sample weights, and the update. The way into the kernels.

Functions take tensors and a `Batch`, launch on the current stream of the tensors' device, never wait for the device,
and keep nothing between calls.
"""
from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torchrec_triton.kernels import backward, bounds_check, forward, transpose, tuning
from torchrec_triton.kernels.common import Batch, TableLayout, num_sms, num_warps, tile_rows

SUPER = 64  # blocks of a super block
_GROUP = 8  # blocks that a program looks at: hardly any is whole where ids are many


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
        forward.bag_output_kernel[(layout.num_features * num_ranks,)](
            bag_output, block_output, batch_offsets, rank_offsets, layout.feature_meta, layout.num_features, num_ranks,
            BLOCK=256, num_warps=2,
        )  # fmt: skip
    return bag_output


def check_bounds(layout: TableLayout, batch: Batch, repairs: torch.Tensor) -> None:
    """Repairs ids and offsets of the batch in place where they are out of range, and adds the number of repairs.

    repairs: int64 [1].
    """
    num_ids, num_bags = batch.indices.numel(), batch.offsets.numel() - 1
    if num_bags == 0:
        return
    tile = 1024
    with _on(repairs.device):
        bounds_check.check_offsets_kernel[(triton.cdiv(num_bags, tile),)](
            batch.offsets, repairs, num_bags, num_ids, TILE=tile, num_warps=4
        )
        if num_ids:
            bounds_check.check_ids_kernel[(triton.cdiv(num_ids, tile),)](
                batch.indices, batch.offsets, batch.batch_offsets, layout.feature_meta, repairs, batch.batch_size,
                num_ids, layout.num_features, TILE=tile, VBE=batch.batch_offsets is not None, num_warps=4,
            )  # fmt: skip


def lookup(layout: TableLayout, weights: torch.Tensor, batch: Batch, output: torch.Tensor) -> None:
    """Writes the pooled rows of all bags. output: [B, total_dim], or 1-D under VBE; fp32, fp16 or bf16."""
    if batch.offsets.numel() <= 1:
        return
    num_ids = batch.indices.numel()
    with _on(weights.device):
        for bucket in layout.buckets:
            bags = tile_rows(bucket.block_d, tuning.TILES.forward // (2 if weights.dtype == torch.float32 else 1))
            forward.tbe_fwd_kernel[(bucket.num_features * triton.cdiv(batch.batch_size, bags),)](
                output, weights, batch.indices, batch.offsets, batch.sample_weights, batch.bag_output,
                batch.batch_offsets, bucket.features, layout.feature_meta, batch.batch_size, num_ids, layout.total_dim,
                BAGS=bags, BLOCK_D=bucket.block_d, WEIGHT_VEC=bucket.weight_vec,
                ACC=tl.float64 if weights.dtype == torch.float32 else tl.float32, EXACT=bucket.exact,
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
    if batch.indices.numel() == 0:
        return weight_grad
    with _on(weights.device):
        for bucket in layout.buckets:
            bags = tile_rows(bucket.block_d)
            backward.sample_weight_grad_kernel[(bucket.num_features * triton.cdiv(batch.batch_size, bags),)](
                weight_grad, weights, grad, batch.indices, batch.offsets, batch.bag_output, batch.batch_offsets,
                bucket.features, layout.feature_meta, wanted, batch.batch_size, batch.indices.numel(), layout.total_dim,
                0.0 if max_gradient is None else max_gradient,
                BAGS=bags, BLOCK_D=bucket.block_d, WEIGHT_VEC=bucket.weight_vec,
                EXACT=bucket.exact, TRUSTED=batch.trusted, WIDE=layout.wide_rows,
                MASKED=wanted is not None, VBE=batch.bag_output is not None, CLIP=max_gradient is not None,
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
    if batch.indices.numel() == 0 or layout.num_keys == 0:
        return
    with _on(weights.device):
        runs = transpose.transpose(layout, batch)
        _apply(layout, weights, state, grad, runs, optimizer)


def _apply(
    layout: TableLayout,
    weights: torch.Tensor,
    state: torch.Tensor,
    grad: torch.Tensor,
    runs: transpose.Runs,
    optimizer: Optimizer,
) -> None:
    num_ids = runs.keys.numel()
    width, block = layout.max_block_d, runs.block
    blocks = torch.empty(num_ids // block, width, dtype=torch.float32, device=grad.device)
    supers = torch.empty(num_ids // (block * SUPER), width, dtype=torch.float32, device=grad.device)
    clip = optimizer.max_gradient is not None
    max_gradient = optimizer.max_gradient if optimizer.max_gradient is not None else 0.0
    shared = {"WIDTH": width, "BLOCK": block, "SCALED": runs.scale is not None, "CLIP": clip}
    tiles = tuning.TILES
    elements = (tiles.single, tiles.short, tiles.middle, tiles.medium, tiles.long)
    for index, bucket in enumerate(layout.buckets):
        for super_blocks, partial in ((1, blocks), (SUPER, supers)):
            count = partial.shape[0]
            if count == 0:
                continue
            look = tile_rows(bucket.block_d, tiles.partial)
            backward.partial_sums_kernel[(triton.cdiv(count, _GROUP),)](
                partial, runs.keys, grad, runs.source, runs.scale, blocks, layout.table_key, layout.table_meta,
                count, layout.num_tables, bucket.key_begin, bucket.key_end, max_gradient,
                GROUP=_GROUP, SUPER=super_blocks, LOOK=look, BLOCK_D=bucket.block_d, EXACT=bucket.exact,
                **shared, num_warps=num_warps(bucket.block_d, look),
            )  # fmt: skip
        for kind, shortest in enumerate(transpose.shortest_run(block)):
            most = num_ids // shortest
            if most == 0:
                continue
            rows = tile_rows(bucket.block_d, elements[kind])
            # Up to middle length a run takes a row of the tile; longer runs take the whole tile.
            abreast, look = (rows, 1) if kind <= transpose.MIDDLE else (1, rows)
            grid = min(triton.cdiv(most, abreast), tiles.waves * num_sms(grad.device))
            backward.update_kernel[(grid,)](
                weights, state, grad, runs.first, runs.last, runs.row_key, runs.row_table, runs.bounds,
                kind * (len(layout.buckets) + 1) + index, runs.source, runs.scale, blocks, supers, layout.table_meta,
                optimizer.learning_rate, optimizer.eps, optimizer.weight_decay, max_gradient, optimizer.seed,
                SINGLE=kind == transpose.SINGLE, LONG=kind == transpose.LONG, RUNS=abreast, LOOK=look,
                BLOCK_D=bucket.block_d, VEC=bucket.weight_vec, EXACT=bucket.exact,
                ADAGRAD=optimizer.adagrad, DECAY=optimizer.weight_decay_mode,
                STOCHASTIC=optimizer.stochastic_rounding and weights.dtype != torch.float32, SUPER=SUPER,
                **shared, num_warps=num_warps(bucket.block_d, rows),
            )  # fmt: skip
