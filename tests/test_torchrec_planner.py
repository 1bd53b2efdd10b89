"""Which tables get which kernel: plans before and after planning, refusals and fallbacks, without any rank or GPU."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingEnv2D, ShardingPlan, ShardingStrategy
from torchrec.distributed.utils import _group_sharded_modules
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_cases import Case, Model, Table, collection, lookups, make_plan

from torchrec_triton.ab.arm import place
from torchrec_triton.module.sharding import (
    TritonEmbeddingBagCollectionSharder,
    TritonFeatureProcessedEmbeddingBagCollectionSharder,
    TritonShardedEmbeddingBagCollection,
)
from torchrec_triton.plan.planner import make_planner, with_compute_kernel
from torchrec_triton.plan.reasons import UnsupportedTableError, sharding_reasons
from torchrec_triton.plan.storage import backward_bytes

ADAGRAD = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
CUDA = Topology(world_size=2, compute_device="cuda")


def tables(*configs: dict[str, Any], weighted: bool = False) -> Model:
    defaults = {"num_embeddings": 1000, "embedding_dim": 64}
    return Model(
        EmbeddingBagCollection(
            device=torch.device("meta"),
            is_weighted=weighted,
            tables=[EmbeddingBagConfig(**{**defaults, "feature_names": [f"f_{c['name']}"], **c}) for c in configs],
        )
    )


def sharders(**fused_params: Any) -> list[Any]:
    return [TritonEmbeddingBagCollectionSharder(fused_params={**ADAGRAD, **fused_params})]


def kernels(plan: ShardingPlan) -> dict[str, str]:
    return {table: sharding.compute_kernel for params in plan.plan.values() for table, sharding in params.items()}


def fallbacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record.getMessage() for record in caplog.records if record.name == "torchrec_triton"]
    return [line for line in ours if line.startswith("table ")]


def on_one_type(kind: str, *names: str, **constraint: Any) -> dict[str, ParameterConstraints]:
    return {name: ParameterConstraints(sharding_types=[kind], **constraint) for name in names}


def planned(model: nn.Module, topology: Topology = CUDA, choice: Any = "auto", **kwargs: Any) -> ShardingPlan:
    the_sharders = kwargs.pop("sharders", None) or sharders()
    return make_planner(choice, topology, debug=False, **kwargs).plan(model, the_sharders)


# --- while planning --------------------------------------------------------------------------------------------------


def test_auto_gives_triton_for_a_cuda_topology() -> None:
    """This host has no GPU: the topology decides."""
    names = [f"t{i}" for i in range(4)]
    constraints = on_one_type("table_wise", *names)
    assert set(kernels(planned(tables(*({"name": n} for n in names)), constraints=constraints)).values()) == {
        "fused_triton"
    }


def test_auto_falls_back_for_a_table_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tables({"name": "good"}, {"name": "quantised", "data_type": DataType.INT8})
    with caplog.at_level(logging.INFO, "torchrec_triton"):
        plan = planned(model, constraints=on_one_type("table_wise", "good", "quantised"))
    assert kernels(plan) == {"good": "fused_triton", "quantised": "fused"}
    (line,) = fallbacks(caplog)
    assert "quantised" in line and "INT8" in line and "good" not in line


@pytest.mark.parametrize("optimizer", [EmbOptimType.ADAM, EmbOptimType.EXACT_ADAGRAD])
def test_auto_falls_back_for_all_tables_of_an_optimizer(optimizer: EmbOptimType) -> None:
    model = tables({"name": "a"}, {"name": "b"})
    plan = planned(model, sharders=sharders(optimizer=optimizer), constraints=on_one_type("row_wise", "a", "b"))
    assert kernels(plan) == {"a": "fused", "b": "fused"}


def test_explicit_choice_that_cannot_be_met_names_tables_and_all_reasons() -> None:
    model = tables(
        {"name": "good"},
        {"name": "bad_type", "data_type": DataType.INT8},
        {"name": "bad_mean", "pooling": PoolingType.MEAN},
    )
    with pytest.raises(UnsupportedTableError) as caught:
        planned(
            model,
            choice="fused_triton",
            sharders=sharders(max_norm=1.0),
            constraints=on_one_type("grid_shard", "good", "bad_type", "bad_mean"),
        )
    assert caught.value.reasons.keys() == {"good", "bad_type", "bad_mean"}
    message = str(caught.value)
    assert message.count("max_norm=1.0") == 3 and "INT8" in message and "GRID_SHARD" in message


def test_choice_by_glob_and_constraints() -> None:
    """The first glob that matches counts; TorchRec's own constraint on a table wins over both."""
    names = ["user_a", "user_b", "item_a", "item_b", "other"]
    constraints = on_one_type("table_wise", *names)
    constraints["user_b"] = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    plan = planned(
        tables(*({"name": n} for n in names)),
        choice={"user_*": "fused_triton", "item_b": "auto", "item_*": "fused", "user_a": "fused"},
        constraints=constraints,
    )
    triton = {table for table, kernel in kernels(plan).items() if kernel == "fused_triton"}
    assert triton == {"user_a", "item_b"} and set(kernels(plan).values()) == {"fused", "fused_triton"}


@pytest.mark.parametrize("choice", ["auto", "fused_triton"])
def test_a_constraint_to_another_kernel_is_kept(choice: str) -> None:
    constraints = on_one_type("table_wise", "a", compute_kernels=["fused_uvm"]) | on_one_type("table_wise", "b")
    plan = planned(tables({"name": "a"}, {"name": "b"}), CUDA, choice, constraints=constraints)
    assert kernels(plan) == {"a": "fused_uvm", "b": "fused_triton"}


@pytest.mark.parametrize("order", [("plain", "mean"), ("mean", "plain")])
def test_tables_of_one_name_in_two_collections_are_judged_together(order: tuple[str, str]) -> None:
    parts = {
        "plain": tables({"name": "t"}),
        "mean": tables({"name": "t", "pooling": PoolingType.MEAN}, weighted=True),
    }
    plan = planned(nn.ModuleDict({name: parts[name] for name in order}), constraints=on_one_type("table_wise", "t"))
    found = [sharding.compute_kernel for params in plan.plan.values() for sharding in params.values()]
    assert found == ["fused", "fused"]


def test_the_line_about_a_fallback_says_what_the_plan_holds(caplog: pytest.LogCaptureFixture) -> None:
    constraints = on_one_type("data_parallel", "replicated") | on_one_type("table_wise", "t")
    with caplog.at_level(logging.WARNING, logger="torchrec_triton"):
        plan = planned(
            tables({"name": "replicated"}, {"name": "t"}),
            sharders=sharders(optimizer=EmbOptimType.ADAM),
            constraints=constraints,
        )
    assert kernels(plan) == {"replicated": "dense", "t": "fused"}
    (line,) = fallbacks(caplog)
    assert line.startswith("table t: fused")


def test_a_refusal_names_what_no_sharding_type_escapes() -> None:
    with pytest.raises(UnsupportedTableError) as error:
        planned(tables({"name": "t"}), CUDA, "fused_triton", sharders=sharders(optimizer=EmbOptimType.ADAM))
    (reason,) = error.value.reasons["t"]
    assert "ADAM" in reason


def test_other_kernels_stay_on_offer() -> None:
    """A table too big for device memory still goes to unified memory under auto, and stays data-parallel if told to."""
    small = Topology(world_size=2, compute_device="cuda", hbm_cap=2 * 1024**3, ddr_cap=128 * 1024**3)
    plan = planned(tables({"name": "big", "num_embeddings": 60_000_000}), small)
    assert kernels(plan)["big"].startswith("fused_uvm")
    plan = planned(tables({"name": "t"}), constraints=on_one_type("data_parallel", "t"))
    assert kernels(plan) == {"t": "dense"}


@pytest.mark.parametrize("reservation", [FixedPercentageStorageReservation(0.1), HeuristicalStorageReservation(0.15)])
def test_no_room_is_the_planners_own_error(reservation: Any) -> None:
    small = Topology(world_size=1, compute_device="cuda", hbm_cap=1024**3, ddr_cap=1024**3)
    model = tables({"name": "big", "num_embeddings": 8_000_000})
    with pytest.raises(PlannerError, match=r"big|[Ss]torage"):
        planned(model, small, "fused_triton", storage_reservation=reservation)


def test_explicit_choice_has_no_other_kernel() -> None:
    with pytest.raises(UnsupportedTableError, match=r"table t: sharding_type=DATA_PARALLEL"):
        planned(tables({"name": "t"}), choice="fused_triton", constraints=on_one_type("data_parallel", "t"))


def test_on_a_cpu_host_auto_depends_on_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Topology(world_size=1, compute_device="cpu")
    model = tables({"name": "t"})
    constraints = on_one_type("table_wise", "t")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels(planned(model, cpu, constraints=constraints)) == {"t": "fused_triton"}
    monkeypatch.delenv("TRITON_INTERPRET")
    assert kernels(planned(model, cpu, constraints=constraints)) == {"t": "fused"}
    with pytest.raises(UnsupportedTableError, match=r"table t: .*TRITON_INTERPRET=1"):
        planned(model, cpu, "fused_triton", constraints=constraints)


def test_weighted_mean_is_no_triton_table() -> None:
    """TorchRec's own collections refuse it as well."""
    sharding = ParameterSharding("table_wise", "fused_triton")
    assert sharding_reasons(sharding, "cuda", pooling_mode=PoolingType.MEAN, weighted=True)
    assert not sharding_reasons(sharding, "cuda", pooling_mode=PoolingType.MEAN, weighted=False)


def test_only_sharders_that_can_build_it_are_given_it() -> None:
    stock = [EmbeddingBagCollectionSharder(fused_params=ADAGRAD)]
    constraints = on_one_type("table_wise", "t")
    assert kernels(planned(tables({"name": "t"}), sharders=stock, constraints=constraints)) == {"t": "fused"}
    with pytest.raises(UnsupportedTableError, match=r"table t: EmbeddingBagCollectionSharder cannot build it"):
        planned(tables({"name": "t"}), CUDA, "fused_triton", sharders=stock, constraints=constraints)


def test_feature_processed_collection() -> None:
    inner = tables({"name": "t"}, weighted=True).ebc
    model = Model(FeatureProcessedEmbeddingBagCollection(inner, PositionWeightedModuleCollection({"f_t": 4})))
    both = [*sharders(), TritonFeatureProcessedEmbeddingBagCollectionSharder(sharders()[0])]
    plan = planned(model, sharders=both, constraints=on_one_type("table_wise", "t"))
    assert kernels(plan) == {"t": "fused_triton"} and list(plan.plan) == ["ebc"]


def test_output_dtype_of_one_table() -> None:
    """A table's constraint wins over the sharder's fused_params, and either may be what Triton cannot write."""
    model = tables({"name": "a"}, {"name": "b"})
    constraints = on_one_type("table_wise", "a") | on_one_type("table_wise", "b", output_dtype=DataType.INT8)
    assert kernels(planned(model, constraints=constraints)) == {"a": "fused_triton", "b": "fused"}
    both = sharders(output_dtype=SparseType.INT8)
    constraints = on_one_type("table_wise", "a") | on_one_type("table_wise", "b", output_dtype=DataType.FP16)
    assert kernels(planned(model, sharders=both, constraints=constraints)) == {"a": "fused", "b": "fused_triton"}


# --- search and cost -------------------------------------------------------------------------------------------------


def options(planner: EmbeddingShardingPlanner, model: nn.Module, the_sharders: list[Any]) -> list[tuple[Any, ...]]:
    found = planner._enumerator.enumerate(model, the_sharders)
    return sorted(
        (o.name, o.sharding_type, o.compute_kernel, str(o.total_perf), str(o.total_storage), len(o.shards))
        for o in found
    )


@pytest.mark.parametrize("count", [26, 300])
def test_search_is_as_large_as_before(count: int) -> None:
    """With "fused" the search is TorchRec's to the last number; with "fused_triton" it has no option more, and only the
    storage is more."""
    model = tables(*({"name": f"t{i}", "num_embeddings": 1000 * (i + 1)} for i in range(count)))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    stock = options(EmbeddingShardingPlanner(CUDA, debug=False), model, [EmbeddingBagCollectionSharder(ADAGRAD)])
    begun = time.perf_counter()
    assert options(make_planner("fused", CUDA, debug=False), model, sharders()) == stock
    assert time.perf_counter() - begun < 60
    ours = options(make_planner("auto", CUDA, debug=False), model, sharders())
    assert [(o[0], o[1], o[2].replace("fused_triton", "fused"), o[3], o[5]) for o in ours] == [
        (*o[:4], o[5]) for o in stock
    ]


@pytest.mark.parametrize(
    "count, kinds, rates",
    # with rates, kernels are weighed as well; of all sharding types, TorchRec plans 500 tables for minutes
    [(26, None, None), (500, ["table_wise"], Path(__file__).parents[1] / "configs" / "rates" / "nvidia-h200.json")],
)
def test_planning_takes_no_longer_and_proposes_no_more(count: int, kinds: Any, rates: Path | None) -> None:
    """The processor's time, least of up to three. The bound leaves room for the noise of a machine that others use."""
    names = [f"t{i}" for i in range(count)]
    model = tables(*({"name": name, "num_embeddings": 1000 * (i + 1)} for i, name in enumerate(names)))
    keys = {"constraints": {name: ParameterConstraints(sharding_types=kinds) for name in names}, "debug": False}
    stock = [EmbeddingBagCollectionSharder(ADAGRAD)]

    def planning(planner: EmbeddingShardingPlanner, the_sharders: list[Any]) -> tuple[float, int]:
        begun = time.process_time()
        planner.plan(model, the_sharders)
        return time.process_time() - begun, planner._num_proposals

    stock_seconds = seconds = float("inf")
    for _ in range(3):
        took, stock_proposals = planning(EmbeddingShardingPlanner(CUDA, **keys), stock)
        stock_seconds = min(stock_seconds, took)
        took, proposals = planning(make_planner("auto", CUDA, rates=rates, **keys), sharders())
        seconds = min(seconds, took)
        assert proposals == stock_proposals
        if seconds < 1.4 * stock_seconds:
            break
    assert seconds < 1.4 * stock_seconds


def test_output_dtype_of_one_table_in_outputs_and_estimates() -> None:
    """Of tables alike but for the constraint of one: its operator writes FP16, and half is counted."""
    model = tables({"name": "a"}, {"name": "b"})
    constraints = on_one_type("table_wise", "a", output_dtype=DataType.FP16) | on_one_type("table_wise", "b")
    the_sharders = sharders(output_dtype=SparseType.FP32)
    cpu = Topology(world_size=1, compute_device="cpu")
    planner = make_planner("fused_triton", cpu, constraints=constraints, debug=False)
    stored = {o.name: o.total_storage.ddr for o in planner._enumerator.enumerate(model, the_sharders)}
    assert stored["b"] - stored["a"] == 512 * 64 * 2  # samples, dim, bytes
    with place() as here:
        plan = planner.plan(model, the_sharders)
        sharded = DistributedModelParallel(model, device=here.device, plan=plan, sharders=the_sharders)
        written = {}
        for kernel in lookups(sharded)[0]._emb_modules:
            kernel.emb_module.register_forward_hook(
                lambda module, _, output: written.update(dict.fromkeys(module.table_names, output.dtype))
            )
        ids = KeyedJaggedTensor.from_lengths_sync(["f_a", "f_b"], torch.tensor([1, 2]), torch.tensor([1, 1]))
        sharded(ids).values()
    assert written == {"a": torch.float16, "b": torch.float32}


def shard_bytes(planner: EmbeddingShardingPlanner, model: nn.Module, the_sharders: list[Any]) -> list[int]:
    """Storage of each shard of the only table, on the topology's device, with the kernel that is asked for."""
    options = planner._enumerator.enumerate(model, the_sharders)
    (option,) = [o for o in options if o.name == "t" and o.compute_kernel in ("fused", "fused_triton")]
    return [shard.storage.hbm + shard.storage.ddr for shard in option.shards]


def workspace(model: nn.Module, constraints: Any, kernel: str = "fused_triton") -> list[int]:
    """What a kernel needs beyond what TorchRec counts, on 4 ranks of 2 hosts, 10 samples a rank, without state."""
    keys = {"batch_size": 10, "constraints": constraints, "debug": False}
    four = Topology(world_size=4, local_world_size=2, compute_device="cuda")
    inner = sharders(optimizer=EmbOptimType.EXACT_SGD)[0]
    both = [inner, TritonFeatureProcessedEmbeddingBagCollectionSharder(inner)]
    counted, torchrecs = (
        shard_bytes(make_planner(choice, four, **keys), model, both)
        for choice in ({"t": kernel, "*": "auto"}, "fused")  # the latter leaves TorchRec's planner as it is
    )
    return [a - b for a, b in zip(counted, torchrecs, strict=True)]


@pytest.mark.parametrize(
    "device, kind, rows",
    [
        ("cuda", "table_wise", [1000]),
        ("cuda", "column_wise", [1000] * 2),
        ("cuda", "row_wise", [250] * 4),
        ("cpu", "table_wise", [1000]),
    ],
)
def test_state_counts_where_only_the_sharder_names_the_optimizer(device: str, kind: str, rows: list[int]) -> None:
    topology = Topology(world_size=4, local_world_size=2, compute_device=device)
    keys = {"constraints": on_one_type(kind, "t", compute_kernels=["fused"], min_partition=32), "debug": False}
    stock = EmbeddingShardingPlanner(topology, **keys)
    # of 512 samples with one lookup on each rank
    rest = 40 * 512 * 4 // (4 if kind == "row_wise" else 1) if device == "cuda" else 0
    for fused_params, bytes_a_row in ((ADAGRAD, 4), ({"optimizer": EmbOptimType.EXACT_SGD}, 0), ({}, 0)):
        before = shard_bytes(stock, tables({"name": "t"}), [EmbeddingBagCollectionSharder(fused_params)])
        ours = [TritonEmbeddingBagCollectionSharder(fused_params)]
        after = shard_bytes(make_planner("auto", topology, **keys), tables({"name": "t"}), ours)
        assert [b - a for a, b in zip(before, after, strict=True)] == [bytes_a_row * count + rest for count in rows]


@pytest.mark.parametrize(
    "kind, lookups",
    [
        # 10 samples on each of 4 ranks, 2 features with 3 and 5 lookups a sample: 80 lookups from each rank
        ("table_wise", [320]),
        ("column_wise", [320, 320]),
        ("table_column_wise", [320, 320]),
        ("row_wise", [80] * 4),
        ("table_row_wise", [160] * 2),
        ("grid_shard", [160] * 4),
    ],
)
def test_workspace_of_the_backward_counts(kind: str, lookups: list[int]) -> None:
    model = tables({"name": "t", "feature_names": ["f", "g"]})
    constraints = on_one_type(kind, "t", pooling_factors=[3.0, 5.0], min_partition=32)
    for kernel, each in (("fused", 40), ("fused_triton", 26)):
        assert workspace(model, constraints, kernel) == [each * count for count in lookups]


@pytest.mark.parametrize("pooling, weighted, fused", [(PoolingType.MEAN, False, 40), (PoolingType.SUM, True, 56)])
def test_workspace_of_scaled_rows(pooling: PoolingType, weighted: bool, fused: int) -> None:
    model = tables({"name": "t", "pooling": pooling}, {"name": "other"}, weighted=weighted)
    constraints = on_one_type("table_wise", "t", pooling_factors=[3.0], batch_sizes=[20])
    constraints |= on_one_type("row_wise", "other")
    assert workspace(model, constraints) == [30 * 240]
    assert workspace(model, constraints, "fused") == [fused * 240]


def test_workspace_of_a_feature_processed_collection_and_of_no_rows() -> None:
    """The processor weights its lookups, and a rank without rows of the table gets none."""
    inner = tables({"name": "t", "num_embeddings": 2}, weighted=True).ebc
    model = Model(FeatureProcessedEmbeddingBagCollection(inner, PositionWeightedModuleCollection({"f_t": 4})))
    assert workspace(model, on_one_type("row_wise", "t", pooling_factors=[3.0])) == [30 * 30, 30 * 30, 0, 0]


@pytest.mark.parametrize("side, kernel", [("triton", "fused_triton"), ("fbgemm", "fused")])
def test_workspace_is_what_the_newest_report_measured(side: str, kernel: str) -> None:
    """Of shapes large enough that a launch's own buffers are nothing beside it."""
    folder = Path(__file__).parents[1] / "docs" / "benchmarks"
    rows = json.loads(max(folder.glob("*.json")).read_text())["rows"]
    large = [row for row in rows if row["ids"] > 4_000_000]
    assert len(large) >= 5
    for row in large:
        expected = backward_bytes(kernel, max(row["shape"]["dims"]), "weighted" in row["name"])
        assert row[side]["backward_bytes"] == pytest.approx(expected * row["ids"], rel=0.1), row


@pytest.mark.parametrize("how", ["make_planner", "stock"])
def test_no_tie_between_the_kernels(how: str) -> None:
    """Equal cost would leave the choice to the order of a hash."""
    stock = how == "stock"
    planner = EmbeddingShardingPlanner(CUDA, debug=False) if stock else make_planner("auto", CUDA, debug=False)
    offered = {o[2] for o in options(planner, tables({"name": "t"}), sharders()) if o[1] == "table_wise"}
    assert "fused_triton" in offered and "fused" not in offered


def test_offering_both_to_torchrecs_planner() -> None:
    model = tables({"name": "a"}, {"name": "b"})
    constraints = on_one_type("table_wise", "a", compute_kernels=["fused"])
    constraints |= on_one_type("table_wise", "b", compute_kernels=["fused_triton"])
    both = [TritonEmbeddingBagCollectionSharder(ADAGRAD, compute_kernels_offered=("fused", "fused_triton"))]
    plan = EmbeddingShardingPlanner(CUDA, constraints=constraints, debug=False).plan(model, both)
    assert kernels(plan) == {"a": "fused", "b": "fused_triton"}
    with pytest.raises(ValueError, match=r"compute_kernels_offered has \['dense'\]"):
        TritonEmbeddingBagCollectionSharder(compute_kernels_offered=("dense",))


@pytest.mark.parametrize(
    "dim, min_partition, expected",
    [(20, 8, None), (96, 32, [32] * 3), (128, 32, [32] * 4), (20, 4, None)],  # None: TorchRec cuts as it likes
)
def test_column_shards_have_legal_widths(dim: int, min_partition: int, expected: list[int] | None) -> None:
    constraints = on_one_type("column_wise", "t", min_partition=min_partition)
    plan = planned(tables({"name": "t", "embedding_dim": dim}), choice="fused_triton", constraints=constraints)
    (sharding,) = plan.plan["ebc"].values()
    widths = [shard.shard_sizes[1] for shard in sharding.sharding_spec.shards]
    assert sum(widths) == dim and all(width > 0 and width % 4 == 0 for width in widths)
    assert widths == (expected or widths)


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 6, 10])
def test_dims_that_fbgemm_cannot_store(dim: int) -> None:
    with pytest.raises(UnsupportedTableError, match=f"table t: embedding dim {dim} is not a multiple of 4"):
        planned(
            tables({"name": "t", "embedding_dim": dim}), choice="fused_triton", constraints=on_one_type("row_wise", "t")
        )


def test_rows_wider_than_the_kernels_tile() -> None:
    """Whole rows run on FBGEMM; cut by columns the same table has shards that fit."""
    model = tables({"name": "t", "embedding_dim": 16384})
    for kind, kernel in (("table_wise", "fused"), ("row_wise", "fused"), ("column_wise", "fused_triton")):
        assert kernels(planned(model, constraints=on_one_type(kind, "t"))) == {"t": kernel}
    with pytest.raises(UnsupportedTableError, match=r"table t: embedding dim 16384 .*; allowed: up to 8192"):
        planned(model, choice="fused_triton", constraints=on_one_type("table_wise", "t"))


def operators(model: nn.Module) -> dict[str, Any]:
    return {table: operator for operator in _group_sharded_modules(model) for table in operator.table_names}


def test_two_sharders_share_their_fused_params() -> None:
    """What constraints, applied optimizers and new rates make of the tables of the one reaches neither the dict nor the
    tables of the other."""
    inner = tables({"name": "b"}, weighted=True).ebc
    processed = FeatureProcessedEmbeddingBagCollection(inner, PositionWeightedModuleCollection({"f_b": 4}))
    model = nn.ModuleDict({"one": tables({"name": "a", "data_type": DataType.FP16}).ebc, "other": processed})
    apply_optimizer_in_backward(RowWiseAdagrad, model["one"].parameters(), {"lr": 0.5, "eps": 1e-3})
    shared = {
        "optimizer": EmbOptimType.EXACT_SGD,
        "learning_rate": 0.1,
        "output_dtype": SparseType.FP32,
        "stochastic_rounding": True,
    }
    before = deepcopy(shared)
    both = [
        TritonEmbeddingBagCollectionSharder(shared),
        TritonFeatureProcessedEmbeddingBagCollectionSharder(TritonEmbeddingBagCollectionSharder(shared)),
    ]
    constraints = on_one_type("table_wise", "a", output_dtype=DataType.FP16, stochastic_rounding=False)
    constraints |= on_one_type("table_wise", "b")
    with place() as here:
        cpu = Topology(world_size=1, compute_device="cpu")
        plan = planned(model, cpu, "fused_triton", constraints=constraints, sharders=both)
        assert shared == before
        sharded = DistributedModelParallel(model, device=here.device, plan=plan, sharders=both)
        a, b = (operators(sharded)[table] for table in "ab")
        a.set_learning_rate(0.7)
        assert shared == before
        assert (a.optimizer, a.output_dtype, a.stochastic_rounding, a.optimizer_args.eps) == (
            EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            SparseType.FP16.as_int(),
            False,
            pytest.approx(1e-3),
        )
        assert (b.optimizer, b.output_dtype, b.stochastic_rounding, b.get_learning_rate()) == (
            EmbOptimType.EXACT_SGD,
            SparseType.FP32.as_int(),
            True,
            pytest.approx(0.1),
        )


@pytest.mark.parametrize(
    "of_sharder, applied, expected",
    [
        (EmbOptimType.EXACT_SGD, None, EmbOptimType.EXACT_SGD),
        (EmbOptimType.EXACT_SGD, {"lr": 0.5}, EmbOptimType.EXACT_ROWWISE_ADAGRAD),
        # Beside its class: the class counted before some release of TorchRec.
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"lr": 0.5, "optimizer": EmbOptimType.EXACT_SGD}, None),
    ],
)
def test_an_explicit_optimizer_is_what_torchrec_makes_of_it(
    of_sharder: EmbOptimType, applied: dict[str, Any] | None, expected: EmbOptimType | None
) -> None:
    """What is applied to a parameter counts more than the sharder's, which stays."""
    keys = {"constraints": on_one_type("table_wise", "t"), "debug": False}
    cpu = Topology(world_size=1, compute_device="cpu")
    given = {**ADAGRAD, "optimizer": of_sharder}
    found = []
    with place() as here:
        for planner, sharder in (
            (EmbeddingShardingPlanner(cpu, **keys), EmbeddingBagCollectionSharder(given)),
            (make_planner("fused", cpu, **keys), TritonEmbeddingBagCollectionSharder(given)),
            (make_planner("fused_triton", cpu, **keys), TritonEmbeddingBagCollectionSharder(given)),
        ):
            model = tables({"name": "t"})
            if applied:
                (parameter,) = model.parameters()
                parameter._optimizer_classes, parameter._optimizer_kwargs = [RowWiseAdagrad], [dict(applied)]
            plan = planner.plan(model, [sharder])
            sharded = DistributedModelParallel(model, device=here.device, plan=plan, sharders=[sharder])
            operator = operators(sharded)["t"]
            found.append((operator.optimizer, operator.get_learning_rate()))
            assert given == {**ADAGRAD, "optimizer": of_sharder}
    assert kernels(plan) == {"t": "fused_triton"} and found[1:] == found[:1] * 2
    assert found[0] == (expected or found[0][0], pytest.approx(0.5 if applied else 0.1))


def test_planning_leaves_applied_optimizers_alone() -> None:
    """Their keywords are the caller's dict, one for all parameters."""
    model, keywords = tables({"name": "a"}, {"name": "b"}), {"lr": 0.1}
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), keywords)
    assert set(kernels(planned(model, constraints=on_one_type("table_wise", "a", "b"))).values()) == {"fused_triton"}
    assert keywords == {"lr": 0.1}
    apply_optimizer_in_backward(torch.optim.Adagrad, [nn.Parameter(torch.zeros(1))], keywords)


def test_constraints_and_fused_params_are_left_alone() -> None:
    constraints = on_one_type("table_wise", "t", output_dtype=DataType.FP16)
    the_sharders = sharders(eps=1e-3)
    before = deepcopy((constraints, the_sharders[0].fused_params))
    planned(tables({"name": "t"}), constraints=constraints, sharders=the_sharders)
    assert (constraints, the_sharders[0].fused_params) == before


@pytest.mark.parametrize(
    "choice, message", [("triton", "compute kernel 'triton'"), ({"a*": "Fused"}, "for tables 'a\\*'")]
)
def test_unknown_kernel(choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*; allowed: fused_triton, fused, auto"):
        make_planner(choice, CUDA)
    with pytest.raises(ValueError, match="allowed: fused_triton, fused, auto"):
        with_compute_kernel(ShardingPlan({}), choice)


def test_planning_needs_no_triton_and_no_gpu() -> None:
    """In a process where triton and the kernels cannot be imported."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec_triton.plan.planner import make_planner

class Sharder(EmbeddingBagCollectionSharder):
    def compute_kernels(self, sharding_type, device):
        return ["fused_triton"]

config = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=64, feature_names=["f"])
model = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[config], device=torch.device("meta"))})
constraints = {"t": ParameterConstraints(sharding_types=["row_wise"])}
topology = Topology(world_size=8, compute_device="cuda")
plan = make_planner("auto", topology, constraints=constraints, debug=False).plan(model, [Sharder()])
assert plan.plan["ebc"]["t"].compute_kernel == "fused_triton"
assert not [name for name in sys.modules if name.startswith(("torchrec_triton.kernels", "torchrec_triton.module"))]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# --- a finished plan -------------------------------------------------------------------------------------------------

MIXED = Case(
    (Table("tw", "tw0", "fused"), Table("rw", "rw", "fused"), Table("cw", "cw", "fused"), Table("dp", "dp", "dense"))
)


def mixed_plan() -> tuple[Model, ShardingPlan]:
    model = Model(collection(MIXED))
    return model, make_plan(MIXED, model.ebc, world_size=2)


def test_swap_some_tables() -> None:
    _, plan = mixed_plan()
    swapped = with_compute_kernel(plan, {"cw": "fused", "?w": "fused_triton"})
    assert kernels(swapped) == {"tw": "fused_triton", "rw": "fused_triton", "cw": "fused", "dp": "dense"}
    assert kernels(plan) == {"tw": "fused", "rw": "fused", "cw": "fused", "dp": "dense"}
    for table, sharding in plan.plan["ebc"].items():
        other = swapped.plan["ebc"][table]
        assert (sharding.sharding_type, sharding.ranks) == (other.sharding_type, other.ranks)
        assert sharding.sharding_spec == other.sharding_spec


def test_swap_back_and_auto() -> None:
    _, plan = mixed_plan()
    everywhere = with_compute_kernel(plan, "auto")
    assert kernels(everywhere) == {"tw": "fused_triton", "rw": "fused_triton", "cw": "fused_triton", "dp": "dense"}
    assert kernels(with_compute_kernel(everywhere, "fused")) == kernels(plan)


def test_swap_of_a_replicated_table_is_refused() -> None:
    with pytest.raises(UnsupportedTableError, match=r"table dp: .*DATA_PARALLEL") as caught:
        with_compute_kernel(mixed_plan()[1], "fused_triton")
    assert caught.value.reasons.keys() == {"dp"}


def test_swap_of_a_table_in_unified_memory() -> None:
    _, plan = mixed_plan()
    plan.plan["ebc"]["rw"].compute_kernel = "fused_uvm_caching"
    assert kernels(with_compute_kernel(plan, "auto"))["rw"] == "fused_uvm_caching"
    with pytest.raises(UnsupportedTableError, match="table rw: compute_kernel=fused_uvm_caching"):
        with_compute_kernel(plan, {"rw": "fused_triton"})


def test_swap_with_the_model_judges_every_setting(caplog: pytest.LogCaptureFixture) -> None:
    model, plan = mixed_plan()
    judged = {"module": model, "sharders": sharders(optimizer=EmbOptimType.LAMB)}
    with pytest.raises(UnsupportedTableError, match="optimizer=LAMB"):
        with_compute_kernel(plan, {"tw": "fused_triton"}, **judged)
    with caplog.at_level(logging.INFO, "torchrec_triton"):
        assert kernels(with_compute_kernel(plan, "auto", **judged)) == kernels(plan)
    lines = [record for record in caplog.records if record.name == "torchrec_triton"]
    assert len(lines) == 3  # one a table that could have been exchanged


def test_swap_with_a_glob_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match="no table matches 'users_\\*'; tables: cw, dp, rw, tw"):
        with_compute_kernel(mixed_plan()[1], {"users_*": "fused_triton"})


# --- sharding --------------------------------------------------------------------------------------------------------


def refused(case: Case, env: Any, **fused_params: Any) -> UnsupportedTableError:
    module = collection(case)
    params = make_plan(case.with_kernel("fused"), module, world_size=2).plan["ebc"]
    for sharding in params.values():
        sharding.compute_kernel = "fused_triton"
    with pytest.raises(UnsupportedTableError) as caught:
        TritonShardedEmbeddingBagCollection(module, params, env, {**ADAGRAD, **fused_params}, torch.device("cpu"))
    return caught.value


@pytest.mark.parametrize(
    "table, fused_params, words",
    [
        (Table("t", "dp"), {}, "DATA_PARALLEL"),
        (Table("t", "grid", pooling=PoolingType.MEAN), {}, "GRID_SHARD"),
        (Table("t", "tw1", data_type=DataType.INT8), {}, "INT8"),
        (Table("t", "tw1"), {"max_norm": 1.0}, "max_norm"),
        (Table("t", "tw1"), {"output_dtype": SparseType.INT8}, "output_dtype"),
        (Table("t", "rw"), {"optimizer": EmbOptimType.ADAM}, "ADAM"),
        (Table("t", "rw"), {"some_new_key": 1}, "some_new_key"),
    ],
)
def test_sharder_refuses_before_any_collective(table: Table, fused_params: dict[str, Any], words: str) -> None:
    """No process group exists here, so nothing collective can be tried; each rank judges the tables of all."""
    env = ShardingEnv.from_local(world_size=2, rank=0)
    error = refused(Case((table,)), env, **fused_params)
    assert error.reasons.keys() == {"t"} and words in str(error)


def test_fully_sharded_replicas_are_refused() -> None:
    env = object.__new__(ShardingEnv2D)
    env.sharding_strategy = ShardingStrategy.FULLY_SHARDED
    assert "FULLY_SHARDED" in str(refused(Case((Table("t", "tw0"),)), env))


def test_column_shard_of_an_odd_width_is_refused() -> None:
    sharding = make_plan(Case((Table("t", "cw", "fused", dim=16),)), collection(Case((Table("t", "cw", dim=16),))), 2)
    for shard in sharding.plan["ebc"]["t"].sharding_spec.shards:
        shard.shard_sizes = [10, 6]
    with pytest.raises(UnsupportedTableError, match="table t: embedding dim 6 is not a multiple of 4"):
        with_compute_kernel(sharding, "fused_triton")


def test_sharder_names_every_table_and_reason() -> None:
    case = Case((Table("good", "tw0"), Table("bad", "tw1", data_type=DataType.INT8), Table("worse", "dp")))
    error = refused(case, ShardingEnv.from_local(world_size=2, rank=0), max_norm=1.0)
    assert error.reasons.keys() == {"good", "bad", "worse"}
    assert [len(why) for why in error.reasons.values()] == [1, 2, 2]
