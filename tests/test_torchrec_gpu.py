"""TorchRec on GPUs: one rank over NCCL; two over NCCL with a GPU for each, else over gloo on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_harness import Ranks, ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from test_torchrec_checkpoint import description, load_and_step, train_and_save
from test_torchrec_training import compare_pipelines, resharded
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSparseDist,
)
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec_cases import Case, Table, check, check_same, expected, shard, step, train

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("ranks")]

PIPELINES = (TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist, TrainPipelineFusedSparseDist)
OURS = "BatchedFusedTritonEmbeddingBag"


@pytest.fixture(params=[1, 2], ids=["one", "two"])
def pool(request: pytest.FixtureRequest) -> Ranks:
    return ranks(request.param, "cuda")


def tables(sharding: str, **kwargs: Any) -> tuple[Table, ...]:
    big = Table("b", sharding, rows=5000, dim=128, features=2, **kwargs)
    return Table("a", sharding, rows=300, dim=64, **kwargs), big


def compare(pool: Ranks, case: Case) -> None:
    """Against fp64 and against FBGEMM's CUDA kernel. A sum of at most 64 x 3 terms errs by some 1e-6 of the largest."""
    ours = pool.run(train, case)
    assert {kernel for rank in ours for kernel in rank.kernels.values()} == {OURS}
    check(case, ours, expected(case, world_size=pool.world_size), rtol=1e-5, atol=1e-5)
    check_same(ours, pool.run(train, case.with_kernel("fused")), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("vbe", [False, True])
@pytest.mark.parametrize("sharding", ["tw0", "cw_one_rank", "rw", "twrw"])
def test_sharding(pool: Ranks, sharding: str, vbe: bool, weighted: bool) -> None:
    compare(pool, Case(tables(sharding), vbe=vbe, weighted=weighted, batch=64))


@pytest.mark.parametrize("sharding", ["cw", "twcw"])
def test_column_shards_on_two_ranks(sharding: str) -> None:
    compare(ranks(2, "cuda"), Case(tables(sharding), batch=64))


@pytest.mark.parametrize("sharding", ["tw0", "rw"])
def test_mean_and_sgd(pool: Ranks, sharding: str) -> None:
    compare(pool, Case(tables(sharding, pooling=PoolingType.MEAN), batch=64))
    compare(pool, Case(tables(sharding), batch=64, optimizer=EmbOptimType.EXACT_SGD))


def test_vbe_with_two_groups(pool: Ranks) -> None:
    """FBGEMM's CUDA path writes into a preallocated output too."""
    pair = (Table("a", "tw0", dim=8), Table("b", "tw0", dim=64, pooling=PoolingType.MEAN))
    compare(pool, Case(pair, vbe=True, batch=64))


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_half_precision(pool: Ranks, data_type: DataType) -> None:
    case = Case(tables("rw", data_type=data_type), batch=16, steps=2, fused_params={"stochastic_rounding": False})
    eps = torch.finfo({DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}[data_type]).eps
    check(case, pool.run(train, case), expected(case, world_size=pool.world_size), rtol=2 * eps, atol=32 * eps)


@pytest.mark.parametrize("pipeline_type", PIPELINES)
def test_pipelines(pool: Ranks, pipeline_type: type) -> None:
    # FBGEMM's backward keeps no record of the stream in which it reads gradients: see _backward in module/tbe.py.
    alone = pipeline_type is TrainPipelineFusedSparseDist and pool.world_size > 1
    beside = () if alone else (Table("c", "tw0", kernel="fused", dim=64),)
    compare_pipelines(pool, Case((*tables("rw"), *beside), steps=6, batch=32), pipeline_type)


def described(case: Case) -> dict[str, Any]:
    model = shard(case)
    step(model, case, 0)
    return {"model": description(model.state_dict()), "optimizer": description(model.fused_optimizer.state_dict())}


@pytest.mark.parametrize("saved_by, loaded_by", [("fused", "fused_triton"), ("fused_triton", "fused")])
def test_checkpoints(pool: Ranks, tmp_path: Path, saved_by: str, loaded_by: str) -> None:
    case = Case((*tables("rw"), Table("c", "cw_one_rank", dim=64)), batch=32)
    assert pool.run(described, case) == pool.run(described, case.with_kernel("fused"))
    saved = pool.run(train_and_save, case.with_kernel(saved_by), str(tmp_path))
    other = pool.run(load_and_step, case.with_kernel(loaded_by), str(tmp_path))
    same = pool.run(load_and_step, case.with_kernel(saved_by), str(tmp_path))
    check_same([loaded for loaded, _ in other], [replace(rank, outputs=[]) for rank in saved], rtol=0, atol=0)
    check_same([after for _, after in other], [after for _, after in same], rtol=1e-6, atol=1e-6)


@pytest.mark.multigpu
def test_dynamic_resharding() -> None:
    """A table moves to the other rank between two steps, with weights and state; gloo sends nothing from GPU to GPU."""
    case = Case((Table("a", "tw0"), Table("b", "tw1")), steps=3)
    moved = replace(case, tables=(Table("a", "tw1"), Table("b", "tw1")))
    ours = ranks(2, "cuda").run(resharded, case, moved)
    check(case, ours, expected(case))
    assert {kernel for rank in ours for kernel in rank.kernels.values()} == {OURS}
