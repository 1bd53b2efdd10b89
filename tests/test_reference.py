"""The fp64 reference against numbers worked out by hand: nothing else checks the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torchrec_triton.kernels.reference import (
    lookup_reference,
    row_gradients_reference,
    update_reference,
    weight_gradients_reference,
)


def ones(rows: int, dim: int) -> Tensor:
    return torch.ones(rows, dim)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def bag_gradients(*values: float, dim: int = 4) -> Tensor:
    """[bags, dim], each bag's gradient constant over the columns."""
    return torch.tensor(values)[:, None].expand(-1, dim)


def close(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-8)


def test_an_id_that_occurs_twice_is_summed_before_one_update() -> None:
    batch = ([0], ids(1, 1, 2), ids(0, 2, 3), bag_gradients(1.0, 2.0))
    first = update_reference([ones(4, 4)], [torch.zeros(4)], *batch, learning_rate=0.1, eps=0.0)
    close(first.tables[0][:, 0], [1.0, 0.9, 0.9, 1.0])
    close(first.states[0], [0.0, 4.0, 4.0, 0.0])
    assert first.touched[0].tolist() == [False, True, True, False]
    second = update_reference(first.tables, first.states, *batch, learning_rate=0.1, eps=0.0)
    close(second.tables[0][:, 3], [1.0, 0.82928932, 0.82928932, 1.0])
    close(second.states[0], [0.0, 8.0, 8.0, 0.0])


def test_features_that_share_a_table_are_summed_before_one_update() -> None:
    update = update_reference(
        [ones(3, 4)],
        [torch.zeros(3)],
        [0, 0],
        ids(1, 1),
        ids(0, 1, 2),
        torch.cat([bag_gradients(1.0), bag_gradients(3.0)], 1),
        learning_rate=0.1,
        eps=0.0,
    )
    close(update.states[0], [0.0, 16.0, 0.0])


@pytest.mark.parametrize("length, exact", [(4096, 409.6000061), (100_000, 10000.000149)])
def test_a_long_bag_is_summed_in_fp64(length: int, exact: float) -> None:
    out = lookup_reference([torch.full((1, 4), 0.1)], [0], torch.zeros(length, dtype=torch.int64), ids(0, length))
    torch.testing.assert_close(out, torch.full((1, 4), exact, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "mode, weights, state",
    [
        ("NONE", [1.96348516, 1.92697033, 1.89045549, 1.85394065], 7.5),
        ("L2", [1.95893685, 1.92471755, 1.89049825, 1.85627896], 8.54),
        ("DECOUPLE", [1.94348516, 1.90697033, 1.87045549, 1.83394065], 7.5),
    ],
)
def test_weight_decay_modes(mode: str, weights: list[float], state: float) -> None:
    update = update_reference(
        [torch.full((2, 4), 2.0)],
        [torch.zeros(2)],
        [0],
        ids(0),
        ids(0, 1),
        torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
        learning_rate=0.1,
        eps=0.0,
        weight_decay=0.1,
        weight_decay_mode=mode,
    )
    close(update.tables[0], [weights, [2.0] * 4])
    close(update.states[0], [state, 0.0])


def test_exact_sgd_has_no_state_and_no_weight_decay() -> None:
    update = update_reference(
        [ones(2, 4)],
        [torch.zeros(2)],
        [0],
        ids(1, 1),
        ids(0, 1, 2),
        bag_gradients(1.0, 2.0),
        learning_rate=0.5,
        optimizer="EXACT_SGD",
        weight_decay=0.1,
        weight_decay_mode="L2",
    )
    close(update.tables[0][:, 0], [1.0, -0.5])
    close(update.states[0], [0.0, 0.0])


def test_mean_of_an_empty_bag_is_zero_and_has_no_gradient() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    close(lookup_reference([table], [0], ids(0, 1, 2), ids(0, 3, 3), mean=True), [[4, 5, 6, 7], [0, 0, 0, 0]])
    update = update_reference(
        [table],
        [torch.zeros(3)],
        [0],
        ids(0, 1, 2),
        ids(0, 3, 3),
        bag_gradients(3.0, 1.0),
        learning_rate=0.1,
        eps=0.0,
        mean=True,
    )
    close(update.states[0], [1.0, 1.0, 1.0])
    close(update.tables[0], table.double() - 0.1)


def test_a_pruned_id_adds_nothing_updates_nothing_and_counts_in_the_length() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    batch = ([0], ids(-1, 1, -1), ids(0, 2, 3))
    close(lookup_reference([table], *batch), [[4, 5, 6, 7], [0, 0, 0, 0]])
    close(lookup_reference([table], *batch, mean=True), [[2, 2.5, 3, 3.5], [0, 0, 0, 0]])
    update = update_reference([table], [torch.zeros(3)], *batch, bag_gradients(1.0, 5.0), learning_rate=0.1)
    assert update.touched[0].tolist() == [False, True, False]
    close(update.weight_gradients, [0.0, 22.0, 0.0])


def test_variable_batch_output_runs_over_rank_then_feature_then_bag() -> None:
    tables = [torch.arange(8.0).reshape(2, 4), torch.arange(24.0).reshape(3, 8)]
    batch = ([0, 1], ids(0, 1, 1, 0, 2, 2, 1), ids(0, 1, 2, 3, 4, 6, 6, 7))
    sizes = [[1, 2], [3, 1]]
    out = lookup_reference(tables, *batch, batch_sizes=sizes)
    expected = [*range(4), *range(8), *range(32, 48, 2), *([0] * 8), *range(4, 8), *range(4, 8), *range(8, 16)]
    close(out, expected)
    update = update_reference(
        tables, [torch.zeros(2), torch.zeros(3)], *batch, torch.ones(44), learning_rate=0.1, eps=0.0, batch_sizes=sizes
    )
    close(update.states[0], [1.0, 4.0])
    close(update.states[1], [1.0, 1.0, 4.0])
    close(update.tables[1], tables[1].double() - 0.1)


def test_variable_batch_with_equal_sizes_is_the_fixed_batch_flattened_by_rank() -> None:
    torch.manual_seed(0)
    tables = [torch.randn(5, 4), torch.randn(3, 8)]
    lengths = torch.tensor([2, 0, 1, 3, 1, 1, 0, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    indices = torch.randint(0, 3, (10,))
    fixed = lookup_reference(tables, [0, 1], indices, offsets)
    variable = lookup_reference(tables, [0, 1], indices, offsets, batch_sizes=[[2, 2], [2, 2]])
    ranks, features = (slice(2), slice(2, 4)), (slice(4), slice(4, 12))
    close(variable, torch.cat([fixed[bags, columns].flatten() for bags in ranks for columns in features]))


def test_gradients_are_clamped_before_they_are_summed() -> None:
    batch = ([0], ids(1, 1), ids(0, 1, 2), bag_gradients(5.0, 5.0))
    clamped, _ = row_gradients_reference([ones(2, 4)], *batch, max_gradient=1.0)
    close(clamped[0], [[0.0] * 4, [2.0] * 4])
    update = update_reference([ones(2, 4)], [torch.zeros(2)], *batch, learning_rate=0.1, max_gradient=1.0)
    close(update.states[0], [0.0, 4.0])
    close(update.weight_gradients, [4.0, 4.0])
    unclamped = update_reference([ones(2, 4)], [torch.zeros(2)], *batch, learning_rate=0.1)
    close(unclamped.states[0], [0.0, 100.0])


def test_per_sample_weights_scale_the_row_and_their_gradient_is_a_dot_product() -> None:
    table = torch.arange(3.0)[:, None].expand(3, 4)
    weights = torch.tensor([10.0, 100.0])
    batch = ([0], ids(1, 2), ids(0, 2))
    close(lookup_reference([table], *batch), [[3.0] * 4])
    close(lookup_reference([table], *batch, weights), [[210.0] * 4])
    grad = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    gradients, _ = row_gradients_reference([table], *batch, grad, weights)
    close(gradients[0][1:], torch.stack([10 * grad[0], 100 * grad[0]]))
    close(weight_gradients_reference([table], *batch, grad), [10.0, 20.0])


def test_the_weight_gradient_mask_is_by_feature() -> None:
    gradient = weight_gradients_reference(
        [ones(2, 4)], [0, 0], ids(0, 1), ids(0, 1, 2), torch.ones(1, 8), feature_requires_grad=[0, 1]
    )
    close(gradient, [0.0, 4.0])


def test_two_half_batches_are_two_updates() -> None:
    half = ([0], ids(1), ids(0, 1), bag_gradients(1.0))
    first = update_reference([ones(2, 4)], [torch.zeros(2)], *half, learning_rate=0.1, eps=0.0)
    second = update_reference(first.tables, first.states, *half, learning_rate=0.1, eps=0.0)
    close(second.states[0], [0.0, 2.0])
    close(second.tables[0][1], [1 - 0.1 - 0.1 / math.sqrt(2)] * 4)
    both = ([0], ids(1, 1), ids(0, 1, 2), bag_gradients(1.0, 1.0))
    whole = update_reference([ones(2, 4)], [torch.zeros(2)], *both, learning_rate=0.1, eps=0.0)
    close(whole.states[0], [0.0, 4.0])
    close(whole.tables[0][1], [0.9] * 4)


def test_eps_is_added_outside_the_root() -> None:
    update = update_reference(
        [ones(1, 4)], [torch.zeros(1)], [0], ids(0), ids(0, 1), bag_gradients(0.01), learning_rate=0.1, eps=0.1
    )
    close(update.tables[0], [[0.99090909] * 4])


@pytest.mark.parametrize("features, bags", [(1, 0), (3, 0), (2, 4)])
def test_empty_batches_and_empty_tables(features: int, bags: int) -> None:
    tables = [torch.empty(0, 4)] * features
    offsets = torch.zeros(features * bags + 1, dtype=torch.int64)
    out = lookup_reference(tables, range(features), ids(), offsets)
    assert out.shape == (bags, 4 * features) and not out.any()
    update = update_reference(
        tables, [torch.empty(0)] * features, range(features), ids(), offsets, out, learning_rate=0.1
    )
    assert [t.shape for t in update.tables] == [(0, 4)] * features


def test_unknown_optimizer_and_mode_are_refused() -> None:
    batch = ([ones(1, 4)], [torch.zeros(1)], [0], ids(0), ids(0, 1), bag_gradients(1.0))
    with pytest.raises(ValueError, match="optimizer=ADAM; allowed: EXACT_SGD, EXACT_ROWWISE_ADAGRAD"):
        update_reference(*batch, learning_rate=0.1, optimizer="ADAM")
    with pytest.raises(ValueError, match="weight_decay_mode=COUNTER; allowed: NONE, L2, DECOUPLE"):
        update_reference(*batch, learning_rate=0.1, weight_decay_mode="COUNTER")
