"""The launchers: pooled lookup, gradient of per-sample weights, and the update. The only way into the kernels.

Functions take tensors and a `Lookup`, launch on the current stream of the tensors' device, never wait for the device, and
keep nothing between calls.
"""
from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torchrec_triton.kernels import backward, forward, transpose
from torchrec_triton.kernels.common import SOURCE_UNIT, Bucket, TableLayout, num_sms, num_warps, tile_rows

SUPER = 64  # blocks of a super block
_LONG_ROWS = 4  # times more lookups in flight for the few, long runs
_NO_DECAY, _L2, _DECOUPLE = range(3)


@dataclass(frozen=True)
class Batch:
    """The ids of one call. Saved for its backward.

    indices [N] and offsets [bags + 1] int32 or int64; sample_weights [N] fp32 or None.
    batch_size: bags a feature; under VBE the most bags of any feature.
    bag_output: VBE only, int64 [bags], where each bag's row begins in the 1-D output (elements).
    batch_offsets: VBE only, [F + 1], first bag of each feature.
    output_size: elements of the output.
    mean: divide by the bag length.
    trusted_offsets: the offsets were checked and don't decrease.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    sample_weights: torch.Tensor | None
    batch_size: int
    bag_output: torch.Tensor | None
    batch_offsets: torch.Tensor | None
    output_size: int
    mean: bool
    trusted_offsets: bool


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
    layout: TableLayout, block_output: torch.Tensor, batch_offsets: torch.Tensor, rank_offsets: torch.Tensor, num_bags: int
) -> torch.Tensor:
    """Output offset of each bag under VBE, int64 [num_bags] (elements).

    block_output: int64 [ranks * F], where the block of a rank and feature begins, rank-major.
    batch_offsets: [F + 1], first bag of each feature; rank_offsets: [F, ranks + 1], first bag of each rank in its feature.
    """
    num_ranks = rank_offsets.shape[1] - 1
    bag_output = torch.empty(num_bags, dtype=torch.int64, device=batch_offsets.device)
    with _on(batch_offsets.device):
        forward.bag_output_kernel[(layout.num_features * num_ranks,)](
            bag_output, block_output, batch_offsets, rank_offsets, layout.feature_meta, layout.num_features, num_ranks,
            BLOCK=256, num_warps=2,
        )  # fmt: skip
    return bag_output


def _out_vec(bucket: Bucket, batch: Batch) -> int:
    """What every bag's output offset is a multiple of. Under VBE a block follows blocks of any number of bags and any
    dim, of other operators too (vbe_output_offsets), and only a multiple of 4 is common to all dims."""
    return bucket.out_vec if batch.bag_output is None else 4


def lookup(layout: TableLayout, weights: torch.Tensor, batch: Batch, output: torch.Tensor) -> None:
    """Writes the pooled rows of all bags. output: [B, total_dim], or 1-D under VBE; fp32, fp16 or bf16."""
    if batch.offsets.numel() <= 1:
        return
    bags_in_flight = 32 * num_sms(weights.device)
    with _on(weights.device):
        for bucket in layout.buckets:
            rows = tile_rows(bucket.block_d)
            # Several bags a program only where enough programs remain to fill the device.
            bags = max(1, min(rows, bucket.num_features * batch.batch_size // (2 * bags_in_flight)))
            bags = 1 << (bags.bit_length() - 1)
            forward.tbe_fwd_kernel[(bucket.num_features * triton.cdiv(batch.batch_size, bags),)](
                output, weights, batch.indices, batch.offsets, batch.sample_weights, batch.bag_output, batch.batch_offsets,
                bucket.features, layout.feature_meta, batch.batch_size, batch.indices.numel(), layout.total_dim,
                BAGS=bags, LOOK=rows, SHORT=4 if bags > 1 else 0, BLOCK_D=bucket.block_d,
                WEIGHT_VEC=bucket.weight_vec, OUT_VEC=_out_vec(bucket, batch),
                ACC=tl.float64 if weights.dtype == torch.float32 else tl.float32,
                WEIGHTED=batch.sample_weights is not None, MEAN=batch.mean, VBE=batch.bag_output is not None,
                num_warps=num_warps(bucket.block_d, rows),
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
                BAGS=bags, BLOCK_D=bucket.block_d, WEIGHT_VEC=bucket.weight_vec, OUT_VEC=_out_vec(bucket, batch),
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

    weights: the flat tables; state: the flat fp32 row-wise state (unused by SGD); grad: gradient of the output, contiguous.
    """
    if batch.indices.numel() == 0 or layout.num_keys == 0:
        return
    with _on(weights.device):
        runs = transpose.transpose(
            layout, batch.indices, batch.offsets, batch.sample_weights, batch.mean, batch.batch_size, batch.bag_output,
            batch.batch_offsets, batch.output_size, batch.trusted_offsets,
        )  # fmt: skip
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
    shared = {"UNIT": SOURCE_UNIT, "WIDTH": width, "BLOCK": block, "SUPER": SUPER, "SCALED": runs.scale is not None, "CLIP": clip}
    # Fewest lookups that a run of a class has, which bounds the number of runs.
    shortest = {transpose.SINGLE: 1, transpose.SHORT: 2, transpose.MEDIUM: transpose.SHORT_RUN + 1, transpose.LONG: block}
    for index, bucket in enumerate(layout.buckets):
        rows = tile_rows(bucket.block_d)
        long_rows = tile_rows(bucket.block_d, 4096)
        for super_blocks, partial in ((1, blocks), (SUPER, supers)):
            if partial.shape[0]:
                backward.partial_sums_kernel[(partial.shape[0],)](
                    partial, runs.keys, grad, runs.source, runs.scale, blocks, layout.table_key, layout.table_meta,
                    layout.num_tables, bucket.key_begin, bucket.key_end, max_gradient,
                    LOOK=rows, BLOCK_D=bucket.block_d, STEPS=max(1, (layout.num_tables - 1).bit_length()),
                    **{**shared, "SUPER": super_blocks}, num_warps=num_warps(bucket.block_d, rows),
                )  # fmt: skip
        for kind in range(transpose.CLASSES):
            most = num_ids // shortest[kind]
            if most == 0:
                continue
            many = kind in (transpose.SINGLE, transpose.SHORT)
            look = 1 if many else long_rows if kind == transpose.LONG else rows
            tile = rows if many else 1
            grid = min(triton.cdiv(most, tile), 64 * num_sms(weights.device))
            backward.update_kernel[(grid,)](
                weights, state, grad, runs.first, runs.last, runs.row_key, runs.row_table, runs.bounds, runs.source,
                runs.scale, blocks, supers, layout.table_meta, optimizer.learning_rate, optimizer.eps,
                optimizer.weight_decay, max_gradient, optimizer.seed,
                KIND=kind, BUCKET=index, NUM_BUCKETS=len(layout.buckets), RUNS=tile, LOOK=look, BLOCK_D=bucket.block_d,
                VEC=bucket.weight_vec, ADAGRAD=optimizer.adagrad, DECAY=optimizer.weight_decay_mode,
                STOCHASTIC=optimizer.stochastic_rounding and weights.dtype != torch.float32,
                **shared, num_warps=num_warps(bucket.block_d, look * tile),
            )  # fmt: skip
