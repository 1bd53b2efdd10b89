"""A whole model around sharded tables: optimizers, schedules, clipping, pipelines, meta device, dynamic resharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from distributed_harness import Ranks, rank_device, ranks, use_local_size
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv
from torchrec.distributed.utils import _group_sharded_modules
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from torchrec_cases import (
    Case,
    Model,
    Table,
    Trained,
    assemble,
    batches,
    check,
    check_same,
    collection,
    expected,
    fill,
    fused_params,
    jagged,
    lookups,
    make_plan,
    plan_of,
    shard,
    snapshot,
    step,
)

from torchrec_triton.module.sharding import TritonEmbeddingBagCollectionSharder

pytestmark = pytest.mark.xdist_group("ranks")

CASE = Case((Table("a", "tw0"), Table("b", "rw", features=2), Table("c", "cw", dim=16)), steps=4)
ONE_RANK_WITHOUT_TABLES = Case((Table("a", "tw0"),), steps=4)


@dataclass
class Sample(Pipelineable):
    """What a pipeline carries."""

    features: KeyedJaggedTensor
    targets: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Sample:
        return Sample(self.features.to(device, non_blocking), self.targets.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.features.record_stream(stream)
        self.targets.record_stream(stream)

    def pin_memory(self) -> Sample:
        return self


class Tower(nn.Module):
    """Tables and a dense layer on top; a loss and a prediction come out, as pipelines want."""

    def __init__(self, tables: EmbeddingBagCollection, width: int) -> None:
        super().__init__()
        self.ebc = tables
        self.dense = nn.Linear(width, 1)

    def forward(self, sample: Sample) -> tuple[Tensor, Tensor]:
        prediction = self.dense(self.ebc(sample.features).values()).squeeze(1)
        return ((prediction - sample.targets) ** 2).mean(), prediction


def tower(case: Case) -> DistributedModelParallel:
    use_local_size(2)
    torch.manual_seed(3)
    tables = collection(case)
    model = DistributedModelParallel(
        Tower(tables, sum(t.dim * t.features for t in case.tables)),
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=rank_device(),
        plan=make_plan(case, tables),
        sharders=[TritonEmbeddingBagCollectionSharder(fused_params=fused_params(case))],
    )
    fill(model, {t.name: t.initial() for t in case.tables})
    return model


def samples(case: Case) -> Iterator[Sample]:
    for number in range(case.steps):
        features = batches(case, number, dist.get_rank())
        targets = torch.stack([part.grad[:, 0] for part in features.values()]).sum(0)
        yield Sample(jagged(case, features), targets.to(rank_device()))


def optimizers(model: DistributedModelParallel, lr: float = 0.001) -> CombinedOptimizer:
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.SGD(params, lr=lr)
    )
    return CombinedOptimizer([("tables", model.fused_optimizer), ("dense", dense)])


def dense_of(model: DistributedModelParallel) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if "dense" in name}


Result = tuple[list[float], dict[str, Tensor], Trained]


def train_tower(case: Case, wrap: Callable[[KeyedOptimizer], Any]) -> Result:
    model = tower(case)
    optimizer = wrap(optimizers(model))
    losses = []
    for sample in samples(case):
        optimizer.zero_grad()
        loss, _ = model(sample)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dense_of(model), snapshot(model, [])


def same_results(ours: list[Result], theirs: list[Result]) -> None:
    for (losses, dense, trained), (other_losses, other_dense, other_trained) in zip(ours, theirs, strict=True):
        # Predictions are sums of some 50 products of fp32, a loss a mean of their squares.
        torch.testing.assert_close(losses, other_losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dense, other_dense, rtol=1e-5, atol=1e-5)
        check_same([trained], [other_trained], rtol=1e-5, atol=1e-5)


def compare(case: Case, wrap: Callable[[KeyedOptimizer], Any]) -> list[Result]:
    ours = ranks(2).run(train_tower, case, wrap)
    same_results(ours, ranks(2).run(train_tower, case.with_kernel("fused"), wrap))
    return ours


def unwrapped(optimizer: KeyedOptimizer) -> KeyedOptimizer:
    return optimizer


def warming_up(optimizer: KeyedOptimizer) -> WarmupOptimizer:
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.1), WarmupStage(WarmupPolicy.CONSTANT, max_iters=9)]
    return WarmupOptimizer(optimizer, stages, lr=0.1)


class Decaying:
    """A scheduler of torch beside the optimizer."""

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self.optimizer = optimizer
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.schedule.step()


def clipped(how: GradientClipping, norm: float) -> Callable[[KeyedOptimizer], Any]:
    return _Clipped(how, norm)


@dataclass
class _Clipped:  # a class, because it travels to other processes
    how: GradientClipping
    norm: float

    def __call__(self, optimizer: KeyedOptimizer) -> Any:
        return GradientClippingOptimizer(optimizer, clipping=self.how, max_gradient=0.05, norm_type=self.norm)


def test_keyed_and_combined_optimizer() -> None:
    compare(CASE, unwrapped)


@pytest.mark.parametrize("wrap", [warming_up, Decaying])
def test_learning_rate_schedules(wrap: Callable[[KeyedOptimizer], Any]) -> None:
    scheduled = compare(CASE, wrap)
    constant = ranks(2).run(train_tower, CASE, unwrapped)
    tables = [assemble(s for _, _, r in run for s in r.weights["b"]) for run in (scheduled, constant)]
    assert (tables[0] - tables[1]).abs().max() > 1e-3  # the schedule has reached the tables


@pytest.mark.parametrize("case", [CASE, ONE_RANK_WITHOUT_TABLES])
@pytest.mark.parametrize(
    "how, norm", [(GradientClipping.NORM, 2.0), (GradientClipping.NORM, float("inf")), (GradientClipping.VALUE, 2.0)]
)
def test_gradient_clipping(how: GradientClipping, norm: float, case: Case) -> None:
    """It acts on dense parameters; tables update inside backward and take no part in the norm."""
    compare(case, clipped(how, norm))


def test_max_gradient_of_the_operator() -> None:
    case = replace(CASE, fused_params={"gradient_clipping": True, "max_gradient": 0.01})
    clipped_result = compare(case, unwrapped)
    free = ranks(2).run(train_tower, CASE, unwrapped)
    states = [assemble(s for _, _, r in run for s in r.state["b"]) for run in (clipped_result, free)]
    assert states[0].max() < 0.1 * states[1].max()


def in_backward(case: Case) -> Trained:
    tables = collection(case, on="cpu")
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1, "eps": 1e-8})
    use_local_size(2)
    model = DistributedModelParallel(
        Model(tables),
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=rank_device(),
        plan=make_plan(case, tables),
        sharders=[TritonEmbeddingBagCollectionSharder()],
    )
    fill(model, {t.name: t.initial() for t in case.tables})
    return snapshot(model, [step(model, case, number) for number in range(case.steps)])


def test_apply_optimizer_in_backward() -> None:
    ours = ranks(2).run(in_backward, CASE)
    check(CASE, ours, expected(CASE))
    check_same(ours, ranks(2).run(in_backward, CASE.with_kernel("fused")))


def storage_of_meta(case: Case) -> tuple[bool, int]:
    tables = collection(case)
    model = shard(case, tables)
    held = sum(k.emb_module.weights_host.numel() for lookup in lookups(model) for k in lookup._emb_modules)
    return all(p.is_meta for p in tables.parameters()), held


def test_meta_device_allocates_the_local_shard_only() -> None:
    case = Case((Table("a", "rw", rows=1000), Table("b", "tw1", rows=100)))
    got = ranks(2).run(storage_of_meta, case)
    assert got == [(True, 500 * 8), (True, 500 * 8 + 100 * 8)]


def on_meta(case: Case) -> list[tuple[int, ...]]:
    use_local_size(2)
    tables = collection(case)
    sharder = TritonEmbeddingBagCollectionSharder(fused_params=fused_params(case))
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    sharded = sharder.shard(tables, make_plan(case, tables).plan["ebc"], env, torch.device("meta"))
    operators = [kernel.emb_module for lookup in sharded._lookups for kernel in lookup._emb_modules]
    assert all(weight.is_meta for operator in operators for weight in operator.split_embedding_weights())
    return [tuple(w.shape) for operator in operators for w in operator.split_embedding_weights()]


def test_dry_run_on_the_meta_device() -> None:
    assert ranks(2).run(on_meta, CASE) == ranks(2).run(on_meta, CASE.with_kernel("fused"))


def untouched(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    params = fused_params(case)
    before = deepcopy(params)
    use_local_size(2)
    sharder = TritonEmbeddingBagCollectionSharder(fused_params=params)
    tables = collection(case)
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    sharder.shard(tables, make_plan(case, tables).plan["ebc"], env, rank_device())
    return before, params


def test_fused_params_are_left_alone() -> None:
    """Two sharders may share one dict."""
    for before, after in ranks(2).run(untouched, CASE):
        assert before == after


def replicated_tensors(case: Case) -> tuple[int, list[bool]]:
    """What 2D parallelism would all-reduce: operators found, and whether their state tensors are the live ones."""
    model = shard(case)
    operators = _group_sharded_modules(model)
    step(model, case, 0)
    return len(operators), [
        state["sum"].data_ptr() == operator.momentum1_host[operator.momentum1_physical_offsets[i] :].data_ptr()
        for operator in operators
        for i, state in enumerate(operator.get_optimizer_state())
    ]


def test_replica_sync_finds_the_operators() -> None:
    """TorchRec looks for FBGEMM's class; an operator of another class would be left out and replicas would drift."""
    for found, live in ranks(2).run(replicated_tensors, Case((Table("a", "rw"), Table("b", "rw")))):
        assert (found, live) == (1, [True, True])


# --- pipelines --------------------------------------------------------------------------------------------------------

# The prefetch and fused pipelines and dynamic resharding run on CUDA only, in TorchRec too: test_torchrec_gpu.py.
CPU_PIPELINES = (TrainPipelineBase, TrainPipelineSparseDist)


def piped(case: Case, pipeline_type: type) -> tuple[Result, list[str]]:
    model = tower(case)
    pipeline = pipeline_type(model, optimizers(model), rank_device())
    source = samples(case)
    predictions = []
    while True:
        try:
            predictions.append(pipeline.progress(source))
        except StopIteration:
            break
    sums = [float(p.detach().sum()) for p in predictions]
    pipelined = [m.__class__.__name__ for m in getattr(pipeline, "_pipelined_modules", [])]
    return (sums, dense_of(model), snapshot(model, [])), pipelined


@pytest.mark.parametrize("pipeline_type", CPU_PIPELINES)
def test_pipelines(pipeline_type: type) -> None:
    compare_pipelines(ranks(2), CASE, pipeline_type)


def compare_pipelines(pool: Ranks, case: Case, pipeline_type: type) -> None:
    """Against FBGEMM's kernel in the pipeline that overlaps nothing."""
    ours = pool.run(piped, case, pipeline_type)
    theirs = pool.run(piped, case.with_kernel("fused"), TrainPipelineBase)
    same_results([result for result, _ in ours], [result for result, _ in theirs])
    for (sums, _, _), pipelined in ours:
        assert len(sums) == case.steps
        assert pipelined == ([] if pipeline_type is TrainPipelineBase else ["TritonShardedEmbeddingBagCollection"])


def test_sparse_pipeline_changes_nothing() -> None:
    """Its batches overlap in time, yet each lookup sees the update of the batch before."""
    plain = ranks(2).run(piped, CASE, TrainPipelineBase)
    same_results([r for r, _ in ranks(2).run(piped, CASE, TrainPipelineSparseDist)], [r for r, _ in plain])


# --- resharding -------------------------------------------------------------------------------------------------------


def resharded(case: Case, moved: Case) -> Trained:
    model = shard(case)
    outputs = [step(model, case, number) for number in range(2)]
    new = EmbeddingModuleShardingPlan({"a": plan_of(moved)["a"]})
    model.reshard({"ebc": (0.0, new)}, "ebc")
    return snapshot(model, [*outputs, step(model, case, 2)])


def other_kernel(case: Case, moved: Case) -> str:
    model = shard(case)
    try:
        model.reshard({"ebc": (0.0, EmbeddingModuleShardingPlan({"a": plan_of(moved)["a"]}))}, "ebc")
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_resharding_keeps_the_kernel() -> None:
    case = Case((Table("a", "tw0"), Table("b", "tw1")))
    moved = replace(case, tables=(Table("a", "tw1", kernel="fused"), Table("b", "tw1")))
    for message in ranks(2).run(other_kernel, case, moved):
        assert "table a" in message and "fused_triton" in message


def test_sgd_has_no_state() -> None:
    case = replace(CASE, optimizer=EmbOptimType.EXACT_SGD)
    for _, _, trained in compare(case, unwrapped):
        assert trained.state == {}
