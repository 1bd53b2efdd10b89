"""Two groups of ranks with a copy of the tables each: TorchRec's DMPCollection averages the copies in `sync`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed_harness import rank_device, ranks, use_local_size
from torch import Tensor
from torch import distributed as dist
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingPlan
from torchrec_cases import (
    PATH,
    Case,
    Model,
    Table,
    Trained,
    check_same,
    collection,
    fill,
    fused_params,
    make_plan,
    snapshot,
    step,
)

from torchrec_triton.module.sharding import TritonEmbeddingBagCollectionSharder

pytestmark = pytest.mark.xdist_group("ranks")


class DMPCollectionOnCpu(DMPCollection):
    """TorchRec refuses a CPU before it does anything that a CPU can't do. Made with a stand-in for a GPU's device."""

    device = _device = property(lambda self: torch.device("cpu"), lambda self, value: None)

    def _remap_sharding_plan(self, plan: ShardingPlan, *args: Any, **kwargs: Any) -> None:
        super()._remap_sharding_plan(plan, *args, **kwargs)
        for sharding in plan.plan[PATH].values():
            for shard in sharding.sharding_spec.shards:
                shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")  # without a GPU's number


def mean_over(group: Callable[[], Any]) -> Callable[..., None]:
    """Gloo has no average. TorchRec 1.9 calls its hook with the group before the tensors."""

    def reduce(*given: Any) -> None:
        for tensor in given[-1]:
            dist.all_reduce(tensor, group=group())
            tensor /= dist.get_world_size(group())

    return reduce


def replicated(case: Case, group_size: int) -> list[Trained]:
    """On a rank, whose group of `group_size` has a copy: after three steps, after a sync, and a step later."""
    use_local_size(group_size)
    tables, device = collection(case), rank_device()
    on_cpu = device.type == "cpu"
    model = (DMPCollectionOnCpu if on_cpu else DMPCollection)(
        Model(tables),
        SimpleNamespace(type="cuda") if on_cpu else device,
        make_plan(case, tables, world_size=group_size),
        dist.get_world_size(),
        group_size,
        dist.GroupMember.WORLD,
        sharders=[TritonEmbeddingBagCollectionSharder(fused_params=fused_params(case))],
    )
    if dist.get_backend() == "gloo":  # which has no coalesced reduction on GPUs, and no mean
        model.set_all_reduce_hook(mean_over(lambda: model._default_ctx.replica_pg))
    fill(model, {t.name: t.initial() for t in case.tables})
    outputs = [step(model, case, number) for number in range(3)]
    apart = snapshot(model, outputs)
    model.sync()
    together = snapshot(model, [])
    return [apart, together, snapshot(model, [step(model, case, 3)])]


def values(trained: Trained) -> dict[str, Tensor]:
    parts = (("weight", trained.weights), ("state", trained.state))
    return {f"{kind} {t} {at}": x for kind, part in parts for t, shards in part.items() for at, x in shards}


def check_replicas(world_size: int, group_size: int, device_type: str, case: Case) -> None:
    ours = ranks(world_size, device_type).run(replicated, case, group_size)
    copies = world_size // group_size
    for shard in range(group_size):  # TorchRec lays the copies of a shard on ranks that follow each other
        apart, together, after = (
            [values(ours[shard * copies + copy][moment]) for copy in range(copies)] for moment in range(3)
        )
        for name in apart[0]:
            assert not torch.equal(apart[0][name], apart[1][name]), name  # each group has its own batches
            mean = torch.stack([one[name] for one in apart]).mean(0)
            for one in together:
                torch.testing.assert_close(one[name], mean, rtol=1e-6, atol=1e-6)
            assert all(torch.equal(one[name], together[0][name]) for one in together)
            assert not torch.equal(after[0][name], together[0][name]), name  # and it trains on
    theirs = ranks(world_size, device_type).run(replicated, case.with_kernel("fused"), group_size)
    for moment in range(3):
        check_same([one[moment] for one in ours], [one[moment] for one in theirs], rtol=1e-5, atol=1e-5)
    kernels = {kernel for one in ours for kernel in one[0].kernels.values()}
    assert kernels == {"BatchedFusedTritonEmbeddingBag"}


@pytest.mark.parametrize("weighted", [False, True])
def test_copies_are_averaged(weighted: bool) -> None:
    tables = (Table("a", "tw1"), Table("b", "rw", features=2), Table("c", "cw", dim=16))
    check_replicas(4, 2, "cpu", Case(tables, weighted=weighted))


@pytest.mark.gpu
def test_copies_are_averaged_on_gpus() -> None:
    tables = (Table("a", "tw0", rows=300, dim=64), Table("b", "rw", rows=5000, dim=128, features=2))
    check_replicas(2, 1, "cuda", Case(tables, batch=64))
