"""Sharding from the meta device takes the memory of the local shard and its state, once; training takes what a plan
counts."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_harness import rank_device, ranks, use_local_size
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_cases import Case, Model, Table, collection, fused_params, make_plan

from torchrec_triton import make_planner
from torchrec_triton.module.sharding import TritonEmbeddingBagCollectionSharder

pytestmark = pytest.mark.xdist_group("ranks")

DIM, MB = 64, 1_000_000
BYTES = {DataType.FP32: 4, DataType.FP16: 2}


def sharded(case: Case) -> DistributedModelParallel:
    use_local_size(2)
    tables = collection(case, on="meta")
    return DistributedModelParallel(
        Model(tables),
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=rank_device(),
        plan=make_plan(case, tables),
        sharders=[TritonEmbeddingBagCollectionSharder(fused_params=fused_params(case))],
    )


def host(name: str) -> int:
    """Bytes of this process. VmRSS: now; VmHWM: the most since this was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def growth(rows: int, data_type: DataType) -> tuple[int, int]:
    """On a rank: by how much sharding raised the most that was held at one moment, in bytes of host and GPU."""
    for size in (100, rows):  # the first loads libraries and joins the ranks
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before, on_gpu = host("VmRSS"), 0
        if rank_device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            on_gpu = -torch.cuda.memory_allocated()
        model = sharded(Case((Table("a", "rw", rows=size, dim=DIM, data_type=data_type),)))
        if rank_device().type == "cuda":
            torch.cuda.synchronize()
            on_gpu += torch.cuda.max_memory_allocated()
        grown = host("VmHWM") - before, on_gpu
        del model
    return grown


@pytest.mark.parametrize("data_type", BYTES)
def test_no_rank_holds_more_than_its_shard(data_type: DataType) -> None:
    """A table of 1,000,000 rows, as a whole or in fp32 beside fp16, would be far above the bound."""
    need = 500_000 * (DIM * BYTES[data_type] + 4)
    for on_host, _ in ranks(2).run(growth, 1_000_000, data_type):
        assert 0.8 * need < on_host < 1.1 * need + 20 * MB  # zeros of the state that nobody wrote take no memory


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2], ids=["one", "two"])
@pytest.mark.parametrize("data_type", BYTES)
def test_no_gpu_holds_more_than_its_shard(world_size: int, data_type: DataType) -> None:
    rows = 16_000_000  # 4 GB in fp32
    need = rows // world_size * (DIM * BYTES[data_type] + 4)
    for on_host, on_gpu in ranks(world_size, "cuda").run(growth, rows, data_type):
        assert on_host < 200 * MB
        assert need <= on_gpu < 1.1 * need


def planned_and_taken(choice: Any, weighted: bool, rows: int, batch: int, length: int) -> tuple[int, int]:
    """On the only rank: bytes that the plan of 8 tables counts, and the most that sharding and two steps hold."""
    names = [f"t{i}" for i in range(8)]
    case = Case(tuple(Table(name, "tw0", rows=rows, dim=128) for name in names), weighted=weighted)
    constraints = {name: ParameterConstraints(["table_wise"], pooling_factors=[float(length)]) for name in names}
    device, sharders = rank_device(), [TritonEmbeddingBagCollectionSharder(fused_params=fused_params(case))]
    topology = Topology(world_size=1, compute_device=device.type)
    planner = make_planner(choice, topology, batch_size=batch, constraints=constraints, debug=False)
    module = Model(collection(case, on="meta"))
    plan = planner.collective_plan(module, sharders)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = DistributedModelParallel(module, device=device, plan=plan, sharders=sharders)
    for _ in range(2):
        ids = torch.randint(rows, (8 * batch * length,), device=device)
        lengths = torch.full((8 * batch,), length, device=device)
        weights = torch.rand(ids.numel(), device=device) if weighted else None
        keys = [feature for table in case.tables for feature in table.feature_names()]
        model(KeyedJaggedTensor(keys, ids, weights, lengths)).values().sum().backward()
    torch.cuda.synchronize()
    return sum(report.bytes for report in planner.explain()), torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("choice", ["fused_triton", {"t0": "fused_triton", "*": "fused"}], ids=["triton", "both"])
def test_training_takes_what_the_plan_counts(choice: Any, weighted: bool) -> None:
    """1.6 GB of tables; ids, outputs and the backward's lists are a tenth of it."""
    ((planned, taken),) = ranks(1, "cuda").run(planned_and_taken, choice, weighted, 400_000, 16_384, 20)
    print(f"{choice}{' weighted' * weighted}: planned {planned / MB:,.0f} MB, taken {taken / MB:,.0f} MB")
    assert taken == pytest.approx(planned, rel=0.1)
