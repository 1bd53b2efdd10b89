"""State dicts and distributed checkpoints: each kernel reads what the other writes, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_harness import ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed._shard.metadata import ShardMetadata
from torchrec_cases import Case, Table, Trained, assemble, check_same, local_shards, lookups, shard, snapshot, step

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


def load_and_step(case: Case, path: str) -> tuple[Trained, Trained]:
    """(as loaded, after the next step)."""
    model = shard(case)
    step(model, case, 77, ranks_merged=2)  # so that there is something to overwrite
    state = contents(model)
    checkpoint.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
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


def load_wrong_width(case: Case, path: str) -> str:
    try:
        load_and_step(case, path)
    except checkpoint.CheckpointException as error:
        return str(error)
    return "nothing was raised"


def test_state_of_another_width_is_refused(tmp_path: Path) -> None:
    case = Case((Table("a", "tw0", rows=10),))
    ranks(2).run(train_and_save, case, str(tmp_path))
    for message in ranks(2).run(load_wrong_width, Case((Table("a", "tw0", rows=12),)), str(tmp_path)):
        assert "12" in message and "10" in message, message


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
