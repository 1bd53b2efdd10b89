"""The lookup, its gradients and its update, written for reading: PyTorch, fp64, one feature after another.

This is the only oracle of the tests. It says what the kernels have to compute, not how.

Shapes: T tables, F features (feature f reads table `feature_table_map[f]`), B bags a feature, N ids in all.
    tables[t]   [rows_t, D_t], any float dtype; read as fp64
    states[t]   [rows_t], row-wise Adagrad's sum of mean squares
    indices     [N], ids in [-1, rows); -1 is a pruned id: it adds nothing and updates nothing, yet it counts in a bag's
                length. Ids and offsets are taken as already repaired by the bounds check.
    offsets     [F * B + 1], feature-major: bag b of feature f is offsets[f * B + b] : offsets[f * B + b + 1]
    batch_sizes [F][ranks], variable batch (VBE): offsets then run over feature, rank, bag, and the output is 1-D over
                rank, feature, bag; None: the output is [B, sum of D_f], features side by side
Everything is returned in fp64. The kernels keep the state in fp32, compute an update in fp32 and round the weight once;
a test compares within what that costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Bags(NamedTuple):
    """The bags of one feature on one rank: `ids[i]` lies in bag `bag_of[i]`, counted from 0 within the block."""

    feature: int
    ids: Tensor  # [n]
    positions: slice  # of the ids in `indices`
    bag_of: Tensor  # [n]
    lengths: Tensor  # [bags]
    output_block: tuple[slice, slice] | slice  # of the output: [bags, D], or flat under VBE


class Update(NamedTuple):
    """What one backward does. `touched[t]` marks the rows with at least one occurrence that is not pruned."""

    tables: list[Tensor]
    states: list[Tensor]
    touched: list[Tensor]
    weight_gradients: Tensor  # [N], of the per-sample weights, from the rows before the update


def lookup_reference(
    tables: Sequence[Tensor],
    feature_table_map: Sequence[int],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    *,
    mean: bool = False,
    batch_sizes: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Pooled rows: out[bag] = sum of s_i * W[id_i], divided by the bag's length under MEAN; zeros for an empty bag."""
    dims = [tables[t].shape[1] for t in feature_table_map]
    out = torch.zeros(_output_shape(dims, offsets, batch_sizes), dtype=torch.float64, device=indices.device)
    for bags in _blocks(dims, indices, offsets, batch_sizes):
        table = tables[feature_table_map[bags.feature]]
        kept = bags.ids >= 0
        rows = table[bags.ids[kept]].double() * _coefficients(bags, per_sample_weights, mean)[kept, None]
        pooled = torch.zeros(bags.lengths.numel(), table.shape[1], dtype=torch.float64, device=indices.device)
        pooled.index_add_(0, bags.bag_of[kept], rows)
        out[bags.output_block] = pooled.reshape(out[bags.output_block].shape)
    return out


def row_gradients_reference(
    tables: Sequence[Tensor],
    feature_table_map: Sequence[int],
    indices: Tensor,
    offsets: Tensor,
    grad_output: Tensor,
    per_sample_weights: Tensor | None = None,
    *,
    mean: bool = False,
    batch_sizes: Sequence[Sequence[int]] | None = None,
    max_gradient: float | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """(gradients, touched): a row's gradient is the sum over all its occurrences, over bags and over features that
    share the table, of s_i * grad_output[bag] (over the bag's length under MEAN), clamped before it is summed."""
    dims = [tables[t].shape[1] for t in feature_table_map]
    gradients = [torch.zeros(table.shape, dtype=torch.float64, device=indices.device) for table in tables]
    touched = [torch.zeros(table.shape[0], dtype=torch.bool, device=indices.device) for table in tables]
    for bags in _blocks(dims, indices, offsets, batch_sizes):
        t = feature_table_map[bags.feature]
        kept = bags.ids >= 0
        grad = _block_gradient(bags, grad_output, dims[bags.feature], max_gradient)
        terms = grad[bags.bag_of] * _coefficients(bags, per_sample_weights, mean)[:, None]
        gradients[t].index_add_(0, bags.ids[kept], terms[kept])
        touched[t][bags.ids[kept]] = True
    return gradients, touched


def weight_gradients_reference(
    tables: Sequence[Tensor],
    feature_table_map: Sequence[int],
    indices: Tensor,
    offsets: Tensor,
    grad_output: Tensor,
    *,
    mean: bool = False,
    batch_sizes: Sequence[Sequence[int]] | None = None,
    max_gradient: float | None = None,
    feature_requires_grad: Sequence[int] | None = None,
) -> Tensor:
    """Gradient of the per-sample weights [N]: dot(W[id_i], grad_output[bag]); 0 for a pruned id and for a feature whose
    entry in `feature_requires_grad` is 0."""
    dims = [tables[t].shape[1] for t in feature_table_map]
    gradient = torch.zeros(indices.numel(), dtype=torch.float64, device=indices.device)
    for bags in _blocks(dims, indices, offsets, batch_sizes):
        if feature_requires_grad is not None and not feature_requires_grad[bags.feature]:
            continue
        kept = bags.ids >= 0
        grad = _block_gradient(bags, grad_output, dims[bags.feature], max_gradient)[bags.bag_of]
        rows = tables[feature_table_map[bags.feature]][bags.ids.clamp(min=0)].double()
        dots = (rows * grad).sum(1) * _coefficients(bags, None, mean)
        gradient[bags.positions] = torch.where(kept, dots, torch.zeros_like(dots))
    return gradient


def update_reference(
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    feature_table_map: Sequence[int],
    indices: Tensor,
    offsets: Tensor,
    grad_output: Tensor,
    per_sample_weights: Tensor | None = None,
    *,
    learning_rate: float,
    optimizer: str = "EXACT_ROWWISE_ADAGRAD",
    eps: float = 1.0e-8,
    weight_decay: float = 0.0,
    weight_decay_mode: str = "NONE",
    max_gradient: float | None = None,
    mean: bool = False,
    batch_sizes: Sequence[Sequence[int]] | None = None,
) -> Update:
    """One backward: each touched row is updated exactly once, with the sum of its gradients G.

    EXACT_SGD: W -= lr * G; `states` is passed through and weight decay has no effect.
    EXACT_ROWWISE_ADAGRAD: m += mean(G'^2), step = lr / (sqrt(m) + eps), W = c * W - step * G, where G' = G + wd * W
    under L2 and G otherwise, and c = 1 - step * wd under L2, 1 - lr * wd under DECOUPLE, 1 under NONE. Where
    sqrt(m) + eps is 0 (no gradient so far, eps 0), step is 0; FBGEMM's 0 / 0 makes such a row NaN.
    Raises ValueError for another optimizer or mode.
    """
    if optimizer not in ("EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"):
        raise ValueError(f"optimizer={optimizer}; allowed: EXACT_SGD, EXACT_ROWWISE_ADAGRAD")
    if weight_decay_mode not in ("NONE", "L2", "DECOUPLE"):
        raise ValueError(f"weight_decay_mode={weight_decay_mode}; allowed: NONE, L2, DECOUPLE")
    batch = (tables, feature_table_map, indices, offsets, grad_output)
    layout: dict[str, Any] = {"mean": mean, "batch_sizes": batch_sizes, "max_gradient": max_gradient}
    gradients, touched = row_gradients_reference(*batch, per_sample_weights, **layout)
    new_tables, new_states = [], []
    for weights, state, gradient, hit in zip(tables, states, gradients, touched, strict=True):
        weights, state = weights.double(), state.double()
        if optimizer == "EXACT_SGD":
            new_tables.append(weights - learning_rate * gradient)
            new_states.append(state)
            continue
        squared = (gradient + weight_decay * weights if weight_decay_mode == "L2" else gradient) ** 2
        new_state = torch.where(hit, state + squared.mean(1), state)
        root = (new_state.sqrt() + eps)[:, None]
        step = torch.where(root > 0, learning_rate / root, torch.zeros_like(root))
        decay = {"NONE": 0.0, "L2": step * weight_decay, "DECOUPLE": learning_rate * weight_decay}[weight_decay_mode]
        new_tables.append(torch.where(hit[:, None], (1.0 - decay) * weights - step * gradient, weights))
        new_states.append(new_state)
    return Update(new_tables, new_states, touched, weight_gradients_reference(*batch, **layout))


def _output_shape(dims: Sequence[int], offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None) -> tuple[int, ...]:
    if batch_sizes is None:
        return ((offsets.numel() - 1) // len(dims), sum(dims))
    return (sum(bags * dim for row, dim in zip(batch_sizes, dims, strict=True) for bags in row),)


def _blocks(
    dims: Sequence[int], indices: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
) -> Iterator[Bags]:
    """Every (feature, rank) block of bags with its place in the output; without VBE there is one rank."""
    features = range(len(dims))
    bags_of = batch_sizes or [[(offsets.numel() - 1) // len(dims)] for _ in features]
    columns = [sum(dims[:f]) for f in features]
    flat = {}
    end = 0
    for rank in range(len(bags_of[0])):
        for f in features:
            flat[f, rank] = slice(end, end + bags_of[f][rank] * dims[f])
            end = flat[f, rank].stop
    first = 0
    for f in features:
        for rank, count in enumerate(bags_of[f]):
            bounds = offsets[first : first + count + 1].long()
            first += count
            lengths = bounds.diff()
            positions = slice(int(bounds[0]), int(bounds[-1]))
            yield Bags(
                feature=f,
                ids=indices[positions].long(),
                positions=positions,
                bag_of=torch.repeat_interleave(torch.arange(count, device=indices.device), lengths),
                lengths=lengths,
                output_block=flat[f, rank] if batch_sizes else (slice(None), slice(columns[f], columns[f] + dims[f])),
            )


def _coefficients(bags: Bags, per_sample_weights: Tensor | None, mean: bool) -> Tensor:
    """[n]: what each occurrence is multiplied with."""
    ones = torch.ones(bags.ids.numel(), dtype=torch.float64, device=bags.ids.device)
    scale = ones if per_sample_weights is None else per_sample_weights[bags.positions].double()
    return scale / bags.lengths[bags.bag_of] if mean else scale


def _block_gradient(bags: Bags, grad_output: Tensor, dim: int, max_gradient: float | None) -> Tensor:
    """[bags, D] of one block, clamped."""
    grad = grad_output[bags.output_block].double().reshape(-1, dim)
    return grad if max_gradient is None else grad.clamp(-max_gradient, max_gradient)
