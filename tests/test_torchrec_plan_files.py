"""Plans as JSON files, and the commands that print and write them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import (
    CacheParams,
    CacheStatistics,
    EmbeddingModuleShardingPlan,
    KeyValueParams,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import DataType
from torchrec_cases import Case, Model, Table, collection, make_plan

import torchrec_triton
from torchrec_triton import cli
from torchrec_triton.config import load_config
from torchrec_triton.plan.configured import PlanningSharder, constraints_of, model_of
from torchrec_triton.plan.files import load_plan, save_plan
from torchrec_triton.plan.planner import make_planner, with_compute_kernel

HOSTS = [["tw0", "tw1", "cw", "rw", "twrw", "dp"], ["grid"]]  # hosts of two ranks, and of one


def every_plan() -> ShardingPlan:
    """Every sharding type with either kernel, in one module."""
    together: dict[str, ParameterSharding] = {}
    for kinds in HOSTS:
        names = [(kind, kernel) for kind in kinds for kernel in ("fused", "fused_triton") if kind != "dp"]
        tables = [Table(f"{kind}_{kernel}", kind, kernel) for kind, kernel in names]
        tables += [Table("dp", "dp", "dense")] if "dp" in kinds else []
        case = Case(tuple(tables))
        plan = make_plan(case, Model(collection(case)).ebc, world_size=2)
        together |= plan.plan["ebc"]
    return ShardingPlan({"ebc": EmbeddingModuleShardingPlan(together)})


def test_every_sharding_type_and_kernel_comes_back(tmp_path: Path) -> None:
    plan = every_plan()
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan and type(loaded.plan["ebc"]) is type(plan.plan["ebc"])
    for table, sharding in plan.plan["ebc"].items():
        shards = getattr(sharding.sharding_spec, "shards", [])
        again = getattr(loaded.plan["ebc"][table].sharding_spec, "shards", [])
        assert [(s.placement.rank(), s.placement.device()) for s in shards] == [
            (s.placement.rank(), s.placement.device()) for s in again
        ]
    save_plan(loaded, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_all_that_a_table_may_be_told_comes_back(tmp_path: Path) -> None:
    sharding = every_plan().plan["ebc"]["cw_fused"]
    told = {
        "cache_params": CacheParams(CacheAlgorithm.LFU, 0.5, 2.0, DataType.FP16, True),
        "enforce_hbm": False,
        "stochastic_rounding": True,
        "bounds_check_mode": BoundsCheckMode.V2_WARNING,
        "output_dtype": DataType.BF16,
        "key_value_params": KeyValueParams(ssd_rocksdb_shards=4, ps_hosts=(("::1", 2000), ("::1", 2001))),
    }
    for key, value in told.items():
        setattr(sharding, key, value)
    plan = ShardingPlan({"a.b": EmbeddingModuleShardingPlan({"t": sharding})})
    save_plan(plan, tmp_path / "plan.json")
    (loaded,) = load_plan(tmp_path / "plan.json").plan["a.b"].values()
    assert loaded == sharding
    assert {key: getattr(loaded, key) for key in told} == told


def test_a_plan_in_the_planners_hands(tmp_path: Path) -> None:
    """What a planner makes, swapped, saved and loaded."""
    config = load_config(Path(__file__).parents[1] / "configs" / "demo.yaml")
    topology = Topology(world_size=4, local_world_size=2, compute_device="cuda")
    constraints = constraints_of(config)
    constraints["product"] = ParameterConstraints(sharding_types=["grid_shard"], pooling_factors=[1.0, 50.0])
    planner = make_planner("fused", topology, constraints=constraints, debug=False)
    plan = planner.plan(model_of(config), [PlanningSharder()])
    swapped = with_compute_kernel(plan, {"product": "fused_triton"})
    save_plan(swapped, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == swapped != plan
    assert torchrec_triton.load_plan is load_plan and torchrec_triton.save_plan is save_plan


def test_a_swap_says_what_changes(caplog: pytest.LogCaptureFixture) -> None:
    plan = every_plan()
    with caplog.at_level(logging.INFO, "torchrec_triton"):
        with_compute_kernel(plan, {"tw*": "fused_triton", "cw*": "fused"})
    assert sorted(record.getMessage() for record in caplog.records if record.name == "torchrec_triton") == [
        "table cw_fused_triton: fused_triton -> fused",
        "table tw0_fused: fused -> fused_triton",
        "table tw1_fused: fused -> fused_triton",
        "table twrw_fused: fused -> fused_triton",
    ]


def test_a_swap_for_a_module_without_its_sharder_is_refused() -> None:
    plan = ShardingPlan({"ebc": EmbeddingModuleShardingPlan({"t": every_plan().plan["ebc"]["tw0_fused"]})})
    model = Model(collection(Case((Table("t", "tw0", "fused"),))))
    for given in ({"module": model}, {"module": model, "sharders": []}, {"sharders": [PlanningSharder()]}):
        with pytest.raises(ValueError, match=r"module and sharders .*: give both, or neither"):
            with_compute_kernel(plan, "fused_triton", **given)
    with pytest.raises(ValueError, match=r"module 'ebc' of the plan is none .*: EmbeddingCollectionSharder"):
        with_compute_kernel(plan, "fused_triton", module=model, sharders=[EmbeddingCollectionSharder()])


def test_objects_that_no_file_can_hold_are_named(tmp_path: Path) -> None:
    class Statistics(CacheStatistics):
        expected_lookups = cacheability = 1.0

        def expected_miss_rate(self, clf: float) -> float:
            return clf

    sharding = ParameterSharding("table_wise", "fused_uvm_caching", [0], None, CacheParams(stats=Statistics()))
    plan = ShardingPlan({"ebc": EmbeddingModuleShardingPlan({"t": sharding})})
    with pytest.raises(ValueError, match="table t: cache_params: stats is a Statistics, which a plan file cannot hold"):
        save_plan(plan, tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()
    with pytest.raises(ValueError, match=r"module 'x': a Linear is no plan of tables"):
        save_plan(ShardingPlan({"x": nn.Linear(1, 1)}), tmp_path / "plan.json")


TABLE = {
    "sharding_type": "table_wise",
    "compute_kernel": "fused",
    "ranks": [0],
    "sharding_spec": [{"offsets": [0, 0], "sizes": [10, 8], "placement": "rank:0/cpu"}],
}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sharding_type": "foo"}, "'foo' is none of data_parallel, table_wise, "),
        ({"compute_kernel": "foo"}, "'foo' is none of dense, fused, "),
        ({"compute_kernel": None}, "missing .* 'compute_kernel'"),
        ({"ranks": "x"}, "ranks: 'x' is no list of ranks"),
        ({"ranks": []}, "ranks: at least one is needed"),
        ({"ranks": [1]}, r"placement rank:0/cpu is on none of the ranks \[1\]"),
        ({"sharding_spec": [{"offsets": [5, 0], "sizes": [10, 8], "placement": "rank:0/cpu"}]}, "leave a part"),
        ({"sharding_spec": None}, "sharding_spec is missing"),
        ({"sharding_spec": [{"offsets": [0, 0], "sizes": [10, 8], "placement": "nonsense"}]}, "nonsense"),
        ({"sharding_spec": [{"offsets": [0, 0], "placement": "rank:0/cpu"}]}, "there is no 'sizes'"),
        ({"new": 1}, "no 'new' in this"),
        ({"output_dtype": "FP1"}, "there is no 'FP1'"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    table = {key: value for key, value in {**TABLE, **changes}.items() if value is not None}
    (tmp_path / "plan.json").write_text(json.dumps({"plan": {"ebc": {"good": TABLE, "bad": table}}}))
    with pytest.raises(ValueError, match=f"plan.json is no saved plan: table bad: .*{words}"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "text, words",
    [(b"", "is no saved plan: Expecting value"), (b"{}", "there is no 'plan'"), (b"\xff", "can't decode")],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "plan.json").write_bytes(text)
    with pytest.raises(ValueError, match=f"plan.json .*{words}"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        load_plan(tmp_path / "none.json")


# --- commands --------------------------------------------------------------------------------------------------------

TABLES = """
model:
  interaction: cat
  tables:
    - {name: user, rows: 1_000_000, dim: 64, pooling_factor: 20, sharding: [row_wise]}
    - {name: item, rows: 2, dim: 64, data_type: FP16, sharding: [table_wise]}
rules: [{tables: item, compute_kernel: fused}]
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(TABLES)
    return str(path)


@pytest.fixture
def rates(tmp_path: Path) -> str:
    from test_torchrec_rates import content

    path = tmp_path / "rates.json"
    path.write_text(json.dumps(content()))
    return str(path)


def columns(output: str, table: str) -> list[str]:
    """Of the table's last line: that of the plan."""
    return [line.split() for line in output.splitlines() if line.startswith(table)][-1]


def test_plan_prints_and_writes(config: str, rates: str, tmp_path: Path, capsys: Any) -> None:
    output = str(tmp_path / "plan.json")
    arguments = ["--config", config, "--world-size", "4", "--local-world-size", "2", "--rates", rates]
    assert cli.main(["plan", *arguments, "--memory", "24", "--output", output]) == 0
    printed = capsys.readouterr().out
    assert "4 cuda rank(s) with 24 GiB, 512 samples each" in printed and "rates of Invented, 2026-01-01" in printed
    _, sharding, ranks, kernel, fused, triton, _ = columns(printed, "user")
    assert (sharding, ranks, kernel) == ("row_wise", "0-3", "fused_triton") and float(fused) > float(triton) > 0
    assert columns(printed, "item")[1] == "table_wise" and columns(printed, "item")[3] == "fused"
    assert "    fused was asked for" in printed
    plan = load_plan(output).plan["embeddings"]
    assert {table: sharding.compute_kernel for table, sharding in plan.items()} == {
        "user": "fused_triton",
        "item": "fused",
    }
    assert plan["user"].ranks == [0, 1, 2, 3]


def test_plan_needs_no_triton_and_no_gpu(config: str, rates: str) -> None:
    code = f"""
import sys
sys.modules["triton"] = None
from torchrec_triton.cli import main
assert main(["plan", "--config", {config!r}, "--world-size", "8", "--rates", {rates!r}]) == 0
assert not [name for name in sys.modules if name.startswith(("torchrec_triton.kernels", "torchrec_triton.module"))]
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert columns(done.stdout, "user")[3] == "fused_triton" and not done.stderr


def test_explain_ends_with_the_plan(config: str, rates: str, capsys: Any) -> None:
    assert cli.main(["explain", config, "--device", "cuda", "--rates", rates, "--world-size", "2"]) == 0
    printed = capsys.readouterr().out
    assert columns(printed, "user")[1:4] == ["row_wise", "0-1", "fused_triton"]


def test_plan_for_cpus_has_no_predicted_times(config: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cli.main(["plan", "--config", config, "--topology", "cpu"]) == 1  # TorchRec shards no rows on CPUs
    assert "after applying user provided constraints for user" in capsys.readouterr().err
    Path(config).write_text(TABLES.replace("row_wise", "column_wise"))
    assert cli.main(["plan", "--config", config, "--topology", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert columns(printed, "user")[3:6] == ["fused", "-", "-"] and "device_type=cpu" in printed


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["--memory", "0.01"], 1, "table user: 2"),
        (["--world-size", "3", "--local-world-size", "2"], 2, "3 rank(s) cannot be shared out to hosts of 2"),
        (["--world-size", "0"], 2, "0 rank(s), 0 a host: give 1 or more"),
        (["--world-size", "2", "--local-world-size", "-1"], 2, "2 rank(s), -1 a host: give 1 or more"),
        (["--memory", "-5"], 2, "memory of -5 GiB"),
        (["--memory", "nan"], 2, "memory of nan GiB"),
        (["--rates", "NVIDIA X"], 2, "rates 'NVIDIA X' is neither a file nor a known GPU"),
    ],
)
def test_plan_that_cannot_be_made(config: str, arguments: list[str], status: int, words: str, capsys: Any) -> None:
    Path(config).write_text(TABLES + "compute_kernel: fused_triton\n")
    assert cli.main(["plan", "--config", config, *arguments]) == status
    printed = capsys.readouterr()
    assert words in printed.err and not printed.out


def test_plan_refuses_a_wrong_configuration(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.yaml").write_text(TABLES.replace("fused}", "fuse}"))
    assert cli.main(["plan", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "did you mean fused?" in capsys.readouterr().err


def test_a_plan_that_cannot_be_written_is_told(config: str, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "missing" / "plan.json"
    assert cli.main(["plan", "--config", config, "--output", str(output)]) == 2
    assert f"--output {output}: No such file or directory" in capsys.readouterr().err
