"""State dicts and distributed checkpoints: each kernel reads what the other writes, on any number of ranks."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_harness import rank_device, ranks, use_local_size
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec_cases import (
    PATH,
    Case,
    Model,
    Table,
    Trained,
    assemble,
    check_same,
    collection,
    fused_params,
    local_shards,
    lookups,
    shard,
    snapshot,
    step,
)

from torchrec_triton.module.sharding import TritonEmbeddingBagCollectionSharder
from torchrec_triton.plan.planner import make_planner

pytestmark = pytest.mark.xdist_group("ranks")

ONE_HOST = ("tw0", "tw1", "cw", "cw_one_rank", "twcw", "rw", "twrw", "grid_one_host")
TWO_HOSTS = ("grid",)


def all_shardings(names: tuple[str, ...], **kwargs: Any) -> Case:
    """One table a sharding type, and one table of `fused` among them."""
    tables = [Table(f"{name}_table", name, rows=6 + i, dim=8 + 8 * (i % 2)) for i, name in enumerate(names)]
    return Case((*tables, Table("stays_fused", names[0], kernel="fused")), **kwargs)


def description(value: Any) -> Any:
    """What a checkpoint knows of an entry, without its values."""
    if isinstance(value, dict):
        return {key: description(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [description(entry) for entry in value]
    if isinstance(value, torch.Tensor) or hasattr(value, "local_shards"):
        local = [(offsets, tuple(tensor.shape), tensor.dtype) for offsets, tensor in local_shards(value)]
        return type(value).__name__, tuple(value.size()), value.dtype, local
    return value if not isinstance(value, ShardMetadata) else str(value)


def described(case: Case, steps: int) -> dict[str, Any]:
    model = shard(case)
    for number in range(steps):
        step(model, case, number)
    return {"model": description(model.state_dict()), "optimizer": description(model.fused_optimizer.state_dict())}


@pytest.mark.parametrize("optimizer", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_SGD])
@pytest.mark.parametrize("dtensor", [False, True])
@pytest.mark.parametrize("names", [ONE_HOST, TWO_HOSTS])
def test_keys_shapes_and_dtypes(names: tuple[str, ...], dtensor: bool, optimizer: EmbOptimType) -> None:
    case = all_shardings(names, dtensor=dtensor, optimizer=optimizer)
    for steps in (0, 1):
        ours = ranks(2).run(described, case, steps)
        assert ours == ranks(2).run(described, case.with_kernel("fused"), steps)
    if optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        state = ours[0]["optimizer"]["state"][f"ebc.embedding_bags.{case.tables[0].name}.weight"]
        _, shape, dtype, _ = state[f"{case.tables[0].name}.momentum1"]
        columns = 2 if names == TWO_HOSTS else 1
        assert (shape, dtype) == ((case.tables[0].rows * columns,), torch.float32)  # rows scalars, unpadded


@pytest.mark.parametrize("sharding", ["tw0", "rw", "twrw"])
def test_table_of_one_row(sharding: str) -> None:
    """Its state has one element, like the step counters that other optimizers keep; it stays momentum1."""
    case = Case((Table("one", sharding, rows=1), Table("other", sharding)))
    assert ranks(2).run(described, case, 1) == ranks(2).run(described, case.with_kernel("fused"), 1)


def contents(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def train_and_save(case: Case, path: str) -> Trained:
    model = shard(case)
    outputs = [step(model, case, number, ranks_merged=2) for number in range(case.steps)]
    checkpoint.save(contents(model), checkpoint_id=path)
    return snapshot(model, outputs)


def load(model: Any, path: str) -> None:
    state = contents(model)
    checkpoint.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])


def load_and_step(case: Case, path: str) -> tuple[Trained, Trained]:
    """(as loaded, after the next step)."""
    model = shard(case)
    step(model, case, 77, ranks_merged=2)  # so that there is something to overwrite
    load(model, path)
    loaded = snapshot(model, [])
    return loaded, snapshot(model, [step(model, case, case.steps, ranks_merged=2)])


@pytest.mark.parametrize("dtensor", [False, True])
@pytest.mark.parametrize("names", [ONE_HOST, TWO_HOSTS])
@pytest.mark.parametrize("saved_by", ["fused", "fused_triton"])
def test_other_kernel_resumes(tmp_path: Path, saved_by: str, names: tuple[str, ...], dtensor: bool) -> None:
    loaded_by = "fused" if saved_by == "fused_triton" else "fused_triton"
    case = all_shardings(names, dtensor=dtensor)
    saved = ranks(2).run(train_and_save, case.with_kernel(saved_by), str(tmp_path))
    other = ranks(2).run(load_and_step, case.with_kernel(loaded_by), str(tmp_path))
    check_same([loaded for loaded, _ in other], [replace(rank, outputs=[]) for rank in saved], rtol=0, atol=0)
    same = ranks(2).run(load_and_step, case.with_kernel(saved_by), str(tmp_path))
    check_same([after for _, after in other], [after for _, after in same], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "saved_by, loaded_by", [("fused", "fused_triton"), ("fused_triton", "fused"), ("fused_triton", "fused_triton")]
)
@pytest.mark.parametrize(
    "before, after",  # ranks, shardings of two tables
    [((2, "rw", "rw"), (1, "tw0", "tw0")), ((2, "rw", "rw"), (2, "tw0", "tw1")), ((1, "tw0", "tw0"), (2, "rw", "rw"))],
)
def test_other_number_of_ranks(
    tmp_path: Path, before: tuple[int, str, str], after: tuple[int, str, str], saved_by: str, loaded_by: str
) -> None:
    """Three steps on the one, the fourth on the other; the global batch is the same."""
    world, *shardings = before
    case = Case((Table("a", shardings[0], saved_by), Table("b", shardings[1], saved_by, rows=13, features=2)))
    saved = ranks(world).run(train_and_save, case, str(tmp_path))
    want = ranks(world).run(load_and_step, case, str(tmp_path))
    world, *shardings = after
    tables = [replace(t, sharding=to, kernel=loaded_by) for t, to in zip(case.tables, shardings, strict=True)]
    got = ranks(world).run(load_and_step, replace(case, tables=tuple(tables)), str(tmp_path))
    for table in case.tables:
        for field in ("weights", "state"):

            def full(trained: list[Trained], field: str = field, table: Table = table) -> torch.Tensor:
                return assemble(s for rank in trained for s in getattr(rank, field).get(table.name, []))

            assert torch.equal(full([loaded for loaded, _ in got]), full(saved))
            torch.testing.assert_close(
                full([stepped for _, stepped in got]), full([stepped for _, stepped in want]), rtol=1e-6, atol=1e-7
            )


class OfferingAll(TritonEmbeddingBagCollectionSharder):
    """To planners: TorchRec's offers no sharding by rows on a CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


def planned(case: Case, kind: str) -> Any:
    """A model, sharded by the plan that our planner finds."""
    use_local_size(2)
    device, sharders = rank_device().type, [OfferingAll(fused_params=fused_params(case))]
    constraints = {t.name: ParameterConstraints(sharding_types=[kind], min_partition=4) for t in case.tables}
    topology = Topology(world_size=2, local_world_size=2, compute_device=device)
    planner = make_planner("fused_triton", topology, constraints=constraints, debug=False)
    tables = collection(case)
    plan = planner.collective_plan(Model(tables), sharders, dist.GroupMember.WORLD)
    assert {sharding.sharding_type for sharding in plan.plan[PATH].values()} == {kind}
    return shard(case, tables, plan=plan)


def pass_on(case: Case, kind: str, path: str) -> list[tuple[Trained, Trained]]:
    """Each (as it is, after the next step): a trained model, one that has its state dict, one loaded from a checkpoint
    of the latter."""
    models = [planned(case, kind) for _ in range(3)]
    for number, model in enumerate(models):
        step(model, case, 77 + number)  # so that there is something to overwrite
    first, second, third = models
    second.load_state_dict(first.state_dict())
    second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
    checkpoint.save(contents(second), checkpoint_id=path)
    load(third, path)
    before = [snapshot(model, []) for model in models]
    return [(was, snapshot(model, [step(model, case, 0)])) for was, model in zip(before, models, strict=True)]


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise", "table_row_wise"])
def test_what_the_planner_shards_is_passed_on(tmp_path: Path, kind: str) -> None:
    case = Case((Table("a", "tw0", rows=7), Table("b", "tw0", dim=16, features=2)))
    of_ranks = ranks(2).run(pass_on, case, kind, str(tmp_path))
    first, *others = zip(*of_ranks, strict=True)  # of both ranks
    shards = [s for was, _ in first for s in was.weights["a"]]
    assert len(shards) == (1 if kind == "table_wise" else 2)
    assert {kernel for was, _ in first for kernel in was.kernels.values()} == {"BatchedFusedTritonEmbeddingBag"}
    for other in others:
        for moment in range(2):
            check_same([one[moment] for one in other], [one[moment] for one in first], rtol=0, atol=0)


def stored(path: Path, entry: str) -> list[torch.Tensor]:
    """The pieces of an entry as they lie in a checkpoint's files."""
    pieces = []
    for index, place in checkpoint.FileSystemReader(path).read_metadata().storage_data.items():
        if index.fqn == entry:
            content = (path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            pieces.append(torch.load(io.BytesIO(content), weights_only=True))
    return pieces


@pytest.mark.parametrize("sharding, pieces", [("tw0", 1), ("rw", 2)])
def test_row_state_is_a_scalar_a_row(tmp_path: Path, sharding: str, pieces: int) -> None:
    """In the files too, whatever the dim: nothing is padded."""
    case = Case(tuple(Table(f"t{dim}", sharding, rows=7, dim=dim) for dim in (4, 20, 1020)), steps=1)
    saved = ranks(2).run(train_and_save, case, str(tmp_path))
    metadata = checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for table in case.tables:
        entry = f"optimizer.state.ebc.embedding_bags.{table.name}.weight.{table.name}.momentum1"
        assert (metadata[entry].size, metadata[entry].properties.dtype) == ((7,), torch.float32)
        tensors = stored(tmp_path, entry)
        assert len(tensors) == pieces and sum(t.untyped_storage().nbytes() for t in tensors) == 4 * 7
        values = assemble(s for rank in saved for s in rank.state.get(table.name, []))
        assert sorted(torch.cat(tensors).tolist()) == sorted(values.tolist()) and values.count_nonzero()


def load_wrong_width(case: Case, path: str) -> str:
    try:
        load_and_step(case, path)
    except checkpoint.CheckpointException as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    "other, sizes", [({"rows": 12}, ("[10, 20]", "[12, 20]")), ({"dim": 12}, ("[10, 20]", "[10, 12]"))]
)
def test_state_of_another_width_is_refused(tmp_path: Path, other: dict[str, int], sizes: tuple[str, str]) -> None:
    case = Case((Table("a", "tw0", rows=10, dim=20),))
    ranks(2).run(train_and_save, case, str(tmp_path))
    changed = Case((replace(case.tables[0], **other),))
    for message in ranks(2).run(load_wrong_width, changed, str(tmp_path)):
        assert all(size in message for size in sizes), message


def set_step(kernel: str) -> int:
    model = shard(Case((Table("a", "tw0", kernel),)))
    if dist.get_rank() == 1:
        return 2**24 + 1
    operator = lookups(model)[0]._emb_modules[0].emb_module
    operator.set_optimizer_step(2**24 + 1)
    return int(operator.iter.item())


def test_optimizer_step_beyond_fp32() -> None:
    for kernel in ("fused", "fused_triton"):
        assert ranks(2).run(set_step, kernel) == [2**24 + 1] * 2
