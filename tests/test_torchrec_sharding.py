"""Every sharding type on two gloo ranks: against the unsharded tables in fp64, and against TorchRec's `fused`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed_harness import ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch import distributed as dist
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_cases import (
    SHARDINGS,
    Case,
    Table,
    Trained,
    assemble,
    batches,
    check,
    check_same,
    collection,
    expected,
    fill,
    jagged,
    shard,
    snapshot,
    step,
    train,
)

pytestmark = pytest.mark.xdist_group("ranks")

MODEL_PARALLEL = [name for name in SHARDINGS if name not in ("tw1", "dp")]
OURS = "BatchedFusedTritonEmbeddingBag"


def compare(case: Case, with_fused: bool = True) -> list[Trained]:
    """The case against the oracle and against itself with `fused`; returns our ranks."""
    ours = ranks(2).run(train, case)
    used = {name: kernel for rank in ours for name, kernel in rank.kernels.items()}
    for table in case.tables:
        assert (used[table.name] == OURS) == (table.kernel == "fused_triton"), used
    check(case, ours, expected(case))
    if with_fused:
        check_same(ours, ranks(2).run(train, case.with_kernel("fused")))
    return ours


# Two tables, so that a group has several; the second has two features, an odd number of rows and another dim.
def two_tables(sharding: str, **kwargs: Any) -> tuple[Table, ...]:
    return Table("a", sharding, **kwargs), Table("b", sharding, rows=13, dim=16, features=2, **kwargs)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sharding", MODEL_PARALLEL)
def test_sharding(sharding: str, weighted: bool) -> None:
    compare(Case(two_tables(sharding), weighted=weighted))


@pytest.mark.parametrize("sharding", MODEL_PARALLEL)
def test_exact_sgd(sharding: str) -> None:
    """Row-wise Adagrad hides a gradient of the wrong scale, SGD shows it."""
    compare(Case(two_tables(sharding), optimizer=EmbOptimType.EXACT_SGD))


@pytest.mark.parametrize("sharding", ["tw0", "cw", "twcw", "rw", "twrw"])
def test_mean(sharding: str) -> None:
    """TorchRec divides itself under row-wise sharding, the operator does under the others."""
    compare(Case(two_tables(sharding, pooling=PoolingType.MEAN)))


@pytest.mark.parametrize("sharding", ["tw0", "rw"])
def test_mean_and_sum_in_one_collection(sharding: str) -> None:
    mean, sum_ = Table("mean", sharding, pooling=PoolingType.MEAN), Table("sum", sharding)
    compare(Case((mean, sum_)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sharding", ["tw0", "cw", "twcw", "rw", "twrw"])
def test_vbe(sharding: str, weighted: bool) -> None:
    compare(Case(two_tables(sharding), vbe=True, weighted=weighted))


@pytest.mark.parametrize("sharding", ["tw0", "cw", "rw", "twrw"])
def test_vbe_with_two_groups(sharding: str) -> None:
    """Two operators write into one preallocated output, which FBGEMM's CPU path cannot: the oracle alone judges."""
    case = Case((Table("a", sharding), Table("b", sharding, pooling=PoolingType.MEAN, dim=16)), vbe=True)
    if sharding in ("rw", "twrw"):  # TorchRec passes SUM for both, so a group needs another difference
        case = replace(case, tables=(Table("a", sharding), Table("b", sharding, dim=16, data_type=DataType.FP16)))
        ours = ranks(2).run(train, case)
        check(case, ours, expected(case), rtol=2e-3, atol=2e-3)  # fp16 rows round by 5e-4 of their value a step
    else:
        compare(case, with_fused=False)


@pytest.mark.parametrize("dtensor", [False, True])
def test_kernels_mixed_in_one_collection(dtensor: bool) -> None:
    case = Case(
        (
            Table("triton_tw", "tw0"),
            Table("fused_tw", "tw0", kernel="fused"),
            Table("triton_other_rank", "tw1", dim=4),
            Table("fused_rw", "rw", kernel="fused", rows=11),
            Table("triton_rw", "rw", rows=11),
            Table("triton_cw", "cw"),
            Table("fused_cw", "cw", kernel="fused"),
            *(() if dtensor else (Table("replicated", "dp", kernel="dense"),)),
        ),
        dtensor=dtensor,
    )
    ours = ranks(2).run(train, case)
    check(case, ours, expected(case))
    check_same(ours, ranks(2).run(train, case.with_kernel("fused")))


# TorchRec cannot describe an empty row shard in two column shards of one host, with `fused` either.
@pytest.mark.parametrize("sharding", [name for name in MODEL_PARALLEL if name != "grid_one_host"])
def test_fewer_rows_than_ranks(sharding: str) -> None:
    """A one-row table has an empty shard under row-wise sharding and a state of one element everywhere."""
    compare(Case((Table("one", sharding, rows=1), Table("three", sharding, rows=3))))


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_half_precision_tables(data_type: DataType) -> None:
    """fp16 against `fused`, which on the CPU has no bf16; bf16 against the oracle, to the rounding of its rows."""
    tables = tuple(Table(f"table_{sharding}", sharding, data_type=data_type) for sharding in ("tw0", "rw", "cw"))
    case = Case(tables, steps=2, fused_params={"stochastic_rounding": False})
    ours = ranks(2).run(train, case)
    assert all(out.dtype == torch.float32 for rank in ours for step in rank.outputs for out in step.values())
    eps = torch.finfo({DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}[data_type]).eps
    # Each row is rounded at the start and after each step; a sum of up to 9 rows of size up to 4 keeps those errors.
    check(case, ours, expected(case), rtol=2 * eps, atol=32 * eps)


# --- what TorchRec does around the operator ---------------------------------------------------------------------------


def one_step(rank_ids: list[list[int]], sharding: str, grad: float, divide: bool, case: Case) -> Trained:
    """One bag a rank with rank_ids[rank]; every element of its output gets the gradient `grad`."""
    set_gradient_division(divide)
    try:
        model = shard(case)
        with torch.no_grad():
            for value in model.state_dict().values():
                for piece in value.local_shards():
                    piece.tensor.zero_()
        ids = torch.tensor(rank_ids[dist.get_rank()])
        out = model(KeyedJaggedTensor(["a_f0"], ids, lengths=torch.tensor([ids.numel()])))
        (out.values() * grad).sum().backward()
        return snapshot(model, [])
    finally:
        set_gradient_division(True)


@pytest.mark.parametrize("kernel", ["fused_triton", "fused"])
@pytest.mark.parametrize("sharding", ["tw0", "rw", "twrw", "cw"])
def test_gradient_division(sharding: str, kernel: str) -> None:
    """TorchRec divides gradients by the world size unless told otherwise; the operator does not meddle with it."""
    for divide, gradient in ((True, 0.25), (False, 0.5)):
        for optimizer in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
            case = Case((Table("a", sharding, kernel, rows=8),), optimizer=optimizer, learning_rate=1.0)
            got = ranks(2).run(one_step, [[0, 1], [2, 3]], sharding, 0.5, divide, case)
            weights = assemble(s for rank in got for s in rank.weights["a"])
            if optimizer == EmbOptimType.EXACT_SGD:
                want = torch.tensor([-gradient] * 4 + [0.0] * 4)
                torch.testing.assert_close(weights, want[:, None].expand(8, 8))
            else:
                state = assemble(s for rank in got for s in rank.state.get("a", [])).view(-1, 8)
                want = torch.tensor([gradient**2] * 4 + [0.0] * 4).expand(state.shape)
                torch.testing.assert_close(state, want)


def mean_of_one_bag(sharding: str, kernel: str) -> tuple[Tensor, KeyedJaggedTensor]:
    case = Case((Table("a", sharding, kernel, rows=8, pooling=PoolingType.MEAN),))
    model = shard(case)
    with torch.no_grad():
        for value in model.state_dict().values():
            for piece in value.local_shards():
                piece.tensor.fill_(2.0)
    features = KeyedJaggedTensor(["a_f0"], torch.tensor([0, 5]), lengths=torch.tensor([2]))
    return model(features).values().detach(), features


@pytest.mark.parametrize("sharding", ["rw", "twrw", "tw0", "cw"])
def test_mean_of_a_bag_on_two_ranks(sharding: str) -> None:
    for out, features in ranks(2).run(mean_of_one_bag, sharding, "fused_triton"):
        torch.testing.assert_close(out, torch.full((1, 8), 2.0))
        assert features.lengths().tolist() == [2] and features.values().tolist() == [0, 5]


def weights_without_is_weighted(kernel: str, weighted: bool) -> Tensor:
    case = Case((Table("a", "tw0", kernel, rows=8, dim=4),), weighted=weighted)
    model = shard(case)
    with torch.no_grad():
        for value in model.state_dict().values():
            for piece in value.local_shards():
                piece.tensor.copy_(torch.arange(8.0)[:, None].expand(8, 4))
    features = KeyedJaggedTensor(
        ["a_f0"], torch.tensor([1, 2]), lengths=torch.tensor([2]), weights=torch.tensor([10.0, 100.0])
    )
    return model(features).values().detach()


@pytest.mark.parametrize("weighted", [False, True])
def test_weights_count_whatever_the_collection_says(weighted: bool) -> None:
    """As in FBGEMM's training path."""
    for kernel in ("fused_triton", "fused"):
        for out in ranks(2).run(weights_without_is_weighted, kernel, weighted):
            torch.testing.assert_close(out, torch.full((1, 4), 210.0))


def mean_with_weights(kernel: str, sharding: str) -> Trained:
    """A MEAN table in an unweighted collection, and a batch that has weights nevertheless."""
    case = Case((Table("a", sharding, kernel, pooling=PoolingType.MEAN),))
    model = shard(case)
    weights = torch.tensor([1.0, 3.0, 0.5])
    features = KeyedJaggedTensor(["a_f0"], torch.tensor([0, 5, 7]), lengths=torch.tensor([2, 1]), weights=weights)
    out = model(features).values()
    (out * torch.arange(8.0)).sum().backward()
    return snapshot(model, [{"a_f0": out.detach().clone()}])


@pytest.mark.parametrize("sharding", ["tw0", "cw", "rw", "twrw"])
def test_mean_with_weights_is_what_fused_gives(sharding: str) -> None:
    """Row-wise, TorchRec pools with SUM and divides by the sum of weights; otherwise FBGEMM's path runs the call."""
    ours, theirs = (ranks(2).run(mean_with_weights, kernel, sharding) for kernel in ("fused_triton", "fused"))
    check_same(ours, theirs)


def row_state_of_columns() -> Trained:
    case = Case((Table("a", "cw", rows=4, dim=128),))
    model = shard(case)
    out = model(KeyedJaggedTensor(["a_f0"], torch.tensor([2]), lengths=torch.tensor([1]))).values()
    grad = torch.cat([torch.full((1, 64), 1.0), torch.full((1, 64), 3.0)], dim=1)
    (out * grad).sum().backward()
    return snapshot(model, [])


def test_row_state_belongs_to_a_column_shard() -> None:
    """The mean of squares is over the shard's columns: 1 and 9, where the whole row's would be 5."""
    got = ranks(2).run(row_state_of_columns)
    state = assemble(s for rank in got for s in rank.state["a"])
    assert state.shape == (8,)
    torch.testing.assert_close(state.view(2, 4)[:, 2], torch.tensor([1.0, 9.0]))
    weights = assemble(s for rank in got for s in rank.weights["a"])
    moved = Table("a", "cw", rows=4, dim=128).initial()[2] - weights[2]
    torch.testing.assert_close(moved, torch.full((128,), 0.1), atol=1e-6, rtol=0)


def backwards(case: Case, how: str) -> tuple[Trained, bool]:
    """Row 1 is looked up twice with gradient 1; with it, whether the optimizer's own methods left the tables alone."""
    model = shard(case)
    fill(model, {"a": torch.ones(3, 8)})
    optimizer, alone = model.fused_optimizer, True

    def call(method: Callable[[], Any]) -> None:
        nonlocal alone
        before = snapshot(model, [])
        method()
        after = snapshot(model, [])
        for was, now in ((before.weights, after.weights), (before.state, after.state)):
            alone &= all(torch.equal(x, y) for t in was for (_, x), (_, y) in zip(was[t], now[t], strict=True))

    for ids in [[1, 1]] if how == "whole" else [[1]] if how == "retained" else [[1], [1]]:
        # One bag a lookup, on rank 0 alone; the gradient is 1 after the division by two ranks.
        values, lengths = torch.tensor(ids), torch.ones(len(ids), dtype=torch.long)
        if dist.get_rank() == 1:
            values, lengths = values[:0], torch.zeros_like(lengths)
        call(optimizer.zero_grad)
        loss = (model(KeyedJaggedTensor(["a_f0"], values, lengths=lengths)).values() * 2).sum()
        loss.backward(retain_graph=how == "retained")
        if how == "retained":
            loss.backward()
        call(optimizer.step)
        call(optimizer.zero_grad)
    return snapshot(model, []), alone


@pytest.mark.parametrize(
    "how, state, weight",
    [
        ("halves", 2.0, 1 - 0.1 - 0.1 / 2**0.5),
        ("retained", 2.0, 1 - 0.1 - 0.1 / 2**0.5),
        ("whole", 4.0, 1 - 0.1),
    ],
)
def test_each_backward_updates(how: str, state: float, weight: float) -> None:
    """Two halves of a batch are two updates, as with FBGEMM; step() and zero_grad() change no weight."""
    case = Case((Table("a", "tw0", rows=3),), fused_params={"eps": 0.0})
    ours, theirs = (ranks(2).run(backwards, case.with_kernel(kernel), how) for kernel in ("fused_triton", "fused"))
    for got in (ours, theirs):
        assert all(alone for _, alone in got)
        trained = got[0][0]
        torch.testing.assert_close(assemble(trained.state["a"]), torch.tensor([0.0, state, 0.0]))
        expected = torch.tensor([1.0, weight, 1.0])[:, None].expand(3, 8)
        torch.testing.assert_close(assemble(trained.weights["a"]), expected, rtol=0, atol=2e-7)
    check_same([trained for trained, _ in ours], [trained for trained, _ in theirs], rtol=0, atol=2e-7)
    assert set(ours[0][0].kernels.values()) == {OURS}


# --- feature processors ---------------------------------------------------------------------------------------------


def processed(case: Case, as_collection: bool, kernel: str) -> tuple[dict[str, Tensor], Trained]:
    """Gradients of the position weights on this rank after `case.steps` steps with SGD on them, and the tables."""
    case = case.with_kernel(kernel)
    lengths = {name: 4 for table in case.tables for name in table.feature_names()}
    if as_collection:
        processors: Any = PositionWeightedModuleCollection(lengths)
        parameters = list(processors.position_weights.values())
    else:
        processors = {name: PositionWeightedModule(length) for name, length in lengths.items()}
        parameters = [module.position_weight for module in processors.values()]
    with torch.no_grad():
        for i, parameter in enumerate(parameters):
            parameter.copy_(torch.linspace(0.5, 1.5, 4) + 0.1 * i)
    inner = collection(case)
    model = shard(case, FeatureProcessedEmbeddingBagCollection(inner, processors), inner)
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "position" in n], lr=0.1)
    outputs = []
    for number in range(case.steps):
        features = batches(case, number, dist.get_rank())
        optimizer.zero_grad()
        out = model(jagged(replace(case, weighted=False), features)).to_dict()
        sum((out[name] * part.grad).sum() for name, part in features.items()).backward()
        outputs.append({name: out[name].detach().clone() for name in features})
        optimizer.step()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if "position" in n}
    return gradients, snapshot(model, outputs)


@pytest.mark.parametrize("as_collection", [False, True])
@pytest.mark.parametrize("sharding", ["tw0", "rw", "cw"])
def test_feature_processors(sharding: str, as_collection: bool) -> None:
    case = Case(two_tables(sharding), weighted=True)
    ours = ranks(2).run(processed, case, as_collection, "fused_triton")
    theirs = ranks(2).run(processed, case, as_collection, "fused")
    check_same([trained for _, trained in ours], [trained for _, trained in theirs])
    for (mine, _), (other, _) in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys() and mine
        # A gradient sums up to 48 dots of 16 products; fp32 order alone makes some 1e-6 of it.
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    # A rank without the table of a processor has no gradient for it; some rank has.
    assert all(sum(float(mine[name].abs().sum()) for mine, _ in ours) > 0 for name in ours[0][0])


def quantised(case: Case) -> Trained:
    registry = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16), device=torch.device("cpu")
    )
    model = shard(case, registry=registry)
    return snapshot(model, [step(model, case, i) for i in range(case.steps)])


@pytest.mark.parametrize("sharding", ["tw0", "rw"])
def test_quantised_communication(sharding: str) -> None:
    """Gradients arrive rounded to fp16, for both kernels alike."""
    case = Case(two_tables(sharding))
    check_same(ranks(2).run(quantised, case), ranks(2).run(quantised, case.with_kernel("fused")))
