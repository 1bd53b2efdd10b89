"""Compiling ahead: which operators it reaches, what it leaves alone, and that the first step finds everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_harness import ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec_cases import Case, Table, shard, step

from torchrec_triton import TritonTableBatchedEmbeddingBags, warm_up

TABLES = ((50, 8), (300, 128), (7, 20))


def operator(device: torch.device, **more: Any) -> TritonTableBatchedEmbeddingBags:
    settings = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weights_precision": SparseType.FP16} | more
    return TritonTableBatchedEmbeddingBags(TABLES, strict=True, device=device, learning_rate=0.1, **settings)


def test_nothing_changes(device):
    tbe = operator(device)
    tbe.flat_weights().uniform_(-1, 1)
    before = [tbe.flat_weights().clone(), tbe.flat_state().clone(), tbe.iter.clone(), torch.get_rng_state()]
    for weighted in (False, True):
        for vbe in (False, True):
            tbe.warm_up(weighted=weighted, vbe=vbe)
    after = [tbe.flat_weights(), tbe.flat_state(), tbe.iter, torch.get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    assert tbe.step == 0
    assert int(tbe.bounds_check_warning) == 0


def reached(case: Case) -> list[tuple[list[str], bool]]:
    """On a rank: tables and `weighted` of each operator that a warm-up of the sharded model comes to."""
    model, found = shard(case), []
    original = TritonTableBatchedEmbeddingBags.warm_up

    def note(self: TritonTableBatchedEmbeddingBags, *, weighted: bool, **rest: Any) -> list[str]:
        found.append((self.table_names, weighted))
        return ["a kernel"]

    TritonTableBatchedEmbeddingBags.warm_up = note  # type: ignore[method-assign]
    try:
        kernels, seconds = warm_up(model)
    finally:
        TritonTableBatchedEmbeddingBags.warm_up = original  # type: ignore[method-assign]
    assert kernels == len(found)
    assert seconds >= 0
    return found


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("weighted", [False, True])
def test_every_operator_of_a_sharded_model_is_reached(weighted):
    case = Case((Table("a", "tw0"), Table("b", "rw"), Table("c", "cw", dim=16)), weighted=weighted)
    first, second = ranks(2).run(reached, case)
    assert {name for names, _ in first for name in names} == {"a", "b", "c"}
    assert {name for names, _ in second for name in names} == {"b", "c"}
    assert {flag for _, flag in first + second} == {weighted}


def compiled_in_first_steps(case: Case) -> tuple[int, int, int]:
    """On a rank: kernels ready after a warm-up, and variants known to Triton before and after three steps."""
    from test_operator_gpu import compiled_kernels

    model = shard(case)
    kernels, _ = warm_up(model, vbe=case.vbe)
    before = compiled_kernels()
    for number in range(3):
        step(model, case, number)
    return kernels, before, compiled_kernels()


@pytest.mark.gpu
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("vbe", [False, True])
def test_the_first_step_compiles_nothing(weighted, vbe):
    tables = (Table("a", "tw0", rows=3, dim=64), Table("b", "rw", rows=5000, dim=128))
    [(kernels, before, after)] = ranks(1, "cuda").run(
        compiled_in_first_steps, Case(tables, weighted=weighted, vbe=vbe, batch=2000)
    )
    assert kernels > 5
    assert before == after > 0


@pytest.mark.gpu
def test_batches_of_any_size_compile_nothing(device):
    from test_operator_gpu import compiled_kernels

    tbe = operator(device)
    assert tbe.warm_up()
    before = compiled_kernels()
    for bags, length in ((12, 0), (12, 1), (12, 3000), (12, 25_000), (65_538, 1), (270_000, 1), (30_000, 1), (3, 3000)):
        offsets = torch.arange(bags + 1, device=device) * length
        ids = torch.randint(0, 7, (bags * length,), device=device)
        tbe(ids, offsets).sum().backward()
    assert compiled_kernels() == before
