"""Sharding from the meta device takes the memory of the local shard and its state, once."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from distributed_harness import ranks, use_local_size
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec_cases import Case, Model, Table, collection, fused_params, make_plan, rank_device

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
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.multigpu)], ids=["one", "two"])
@pytest.mark.parametrize("data_type", BYTES)
def test_no_gpu_holds_more_than_its_shard(world_size: int, data_type: DataType) -> None:
    rows = 16_000_000  # 4 GB in fp32
    need = rows // world_size * (DIM * BYTES[data_type] + 4)
    for on_host, on_gpu in ranks(world_size, "nccl").run(growth, rows, data_type):
        assert on_host < 200 * MB
        assert need <= on_gpu < 1.1 * need
