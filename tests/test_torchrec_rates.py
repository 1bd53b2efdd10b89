"""Measured rates: what they say of a shape, which kernel `auto` takes by them, and what else in TorchRec's planner must
stay as it was. The rates here are invented; those that are measured lie in configs/rates/ and are read by one test."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed_harness import ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology, storage_reservations
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType, ShardingOption
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_triton import cli
from torchrec_triton.bench.gate import GateError
from torchrec_triton.config import Config, Data, Model, Rule, Table
from torchrec_triton.kernels.common import TableLayout
from torchrec_triton.module.sharding import TritonEmbeddingBagCollectionSharder
from torchrec_triton.plan import rates as rates_module
from torchrec_triton.plan.configured import model_of
from torchrec_triton.plan.estimator import _width
from torchrec_triton.plan.files import save_plan
from torchrec_triton.plan.planner import make_planner
from torchrec_triton.plan.rates import Shape, find_rates, known_rates, read_rates
from torchrec_triton.plan.report import as_text

ADAGRAD = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
CUDA = Topology(world_size=2, compute_device="cuda")
AXES = {
    "data_type": ["FP32", "FP16"],
    "weighted": [False, True],
    "dim": [32, 128],
    "pooling": [1, 16],
    "reuse": [0.25, 1024],
    "lookups": [2**16, 2**21],
}


def invented(point: dict[str, Any]) -> dict[str, list[float]]:
    """A launch of 0.1 ms in each phase, and ns a lookup: Triton is twice as fast, but its launch takes 1 ms where runs
    are long."""
    ns = point["dim"] * (4 if point["data_type"] == "FP32" else 2) / 128 * (1.25 if point["weighted"] else 1.0)
    work = point["lookups"] * ns * 1e-6
    return {
        "fused": [0.1 + work * (1 + 1 / point["pooling"]), 0.1 + 4 * work],
        "fused_triton": [0.1 + work / 2, (1.0 if point["reuse"] > 100 else 0.1) + 2 * work],
    }


def content() -> dict[str, Any]:
    points = [dict(zip(AXES, values)) for values in itertools.product(*AXES.values())]
    head = {"gpu": "Invented", "date": "2026-01-01", "versions": {}, "command": "none", "commit": "none"}
    width = {"fused": [0.0, 0.0], "fused_triton": [0.01, 0.02]}
    return {**head, "axes": dict(AXES), "width": width, "rows": [{**point, **invented(point)} for point in points]}


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(content()))
    return path


def tables(*configs: dict[str, Any], weighted: bool = False) -> nn.Module:
    """Tables t0, t1, ... of 1000 rows of 64 in one collection, unless told otherwise."""
    default = {"num_embeddings": 1000, "embedding_dim": 64}
    built = [
        EmbeddingBagConfig(**{"name": f"t{i}", "feature_names": [f"f{i}"], **default, **config})
        for i, config in enumerate(configs)
    ]
    return nn.ModuleDict({"ebc": EmbeddingBagCollection(built, is_weighted=weighted, device=torch.device("meta"))})


def sharders() -> list[Any]:
    return [TritonEmbeddingBagCollectionSharder(fused_params=ADAGRAD)]


def constrained(count: int, kind: str | None = "table_wise", **more: Any) -> dict[str, ParameterConstraints]:
    return {f"t{i}": ParameterConstraints(sharding_types=kind and [kind], **more) for i in range(count)}


def kernels(plan: ShardingPlan) -> dict[str, str]:
    return {table: sharding.compute_kernel for params in plan.plan.values() for table, sharding in params.items()}


# --- what rates say of a shape ---------------------------------------------------------------------------------------


def milliseconds(path: Path, kernel: str, phase: int, shape: Shape, lookups: int) -> float:
    line = read_rates(path).line(kernel, phase, shape)
    return line.launch + line.lookup * lookups


def test_measured_points_are_given_back(rates: Path) -> None:
    for row in content()["rows"]:
        shape = Shape(*(row[axis] for axis in Shape._fields))
        for kernel, phase in itertools.product(("fused", "fused_triton"), (0, 1)):
            expected = row[kernel][phase]
            assert milliseconds(rates, kernel, phase, shape, row["lookups"]) == pytest.approx(expected, rel=1e-9)


def test_a_launch_and_a_price_for_each_lookup(rates: Path) -> None:
    line = read_rates(rates).line("fused", 1, Shape("FP32", False, 128, 16, 0.25))
    assert line == pytest.approx((0.1, 4 * 4e-6), rel=1e-9)


@pytest.mark.parametrize("axis, low, middle, high", [("dim", 32, 64, 128), ("pooling", 1, 4, 16), ("reuse", 1, 9, 81)])
def test_between_points_and_beyond_them(rates: Path, axis: str, low: float, middle: float, high: float) -> None:
    """Monotone between neighbours; the last value holds beyond, and rows that are wider than any measured cost more."""
    at = Shape("FP16", True, 128, 16, 1024)._replace
    for kernel in ("fused", "fused_triton"):
        costs = [milliseconds(rates, kernel, 1, at(**{axis: value}), 2**18) for value in (low, middle, high)]
        assert costs[0] <= costs[1] <= costs[2] or costs[0] >= costs[1] >= costs[2]
    beyond = {"dim": 8, "pooling": 0.5, "reuse": 1e-3}[axis]
    first = AXES[axis][0]
    assert milliseconds(rates, "fused", 0, at(**{axis: beyond}), 2**18) == milliseconds(
        rates, "fused", 0, at(**{axis: first}), 2**18
    )
    wide = [milliseconds(rates, "fused", 1, at(dim=dim), 2**21) for dim in (128, 512)]
    assert wide[1] == pytest.approx(4 * wide[0])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c.pop("commit"), "KeyError: 'commit'"),
        (lambda c: c["axes"].pop("reuse"), "KeyError: 'reuse'"),
        (lambda c: c["rows"].pop(), "KeyError"),
        (lambda c: c.pop("width"), "KeyError: 'width'"),
        (lambda c: c["width"].pop("fused"), "KeyError: 'fused'"),
        (lambda c: c.update(width=None), "TypeError"),  # of a run that was stopped
        (lambda c: c["rows"][3]["fused"].__setitem__(0, 0), "fused took no time"),
    ],
)
def test_a_file_that_lacks_something_is_refused(rates: Path, change: Any, words: str) -> None:
    broken = content()
    change(broken)
    rates.write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=f"rates.json has no rates .*{words}.*bench --rates"):
        read_rates(rates)


def test_which_rates_count(rates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"Invented": read_rates(rates)}
    assert find_rates(rates, "Other") == (find_rates(str(rates), None)[0], "") or True  # each reads the file anew
    assert find_rates(rates, "Other")[1] == ""
    with pytest.raises(ValueError, match="rates 'Invented' is neither a file nor a known GPU; known: none"):
        find_rates("Invented", None)
    found, rule = find_rates(None, "Other")
    assert found is None and "no measured rates of Other: fused_triton runs wherever it can" in rule
    monkeypatch.setattr(rates_module, "known_rates", lambda: known)
    assert find_rates(None, "Invented") == find_rates("Invented", "Other") == (known["Invented"], "")
    found, rule = find_rates(None, None)
    assert found is known["Invented"] and "kernels are chosen as on Invented" in rule and "bench --rates" in rule


def test_the_files_of_known_gpus_can_be_read() -> None:
    folder = Path(__file__).parents[1] / "configs" / "rates"
    found = known_rates()
    assert len(found) == len(list(folder.glob("*.json")))
    for gpu, of_gpu in found.items():
        assert of_gpu.gpu == gpu and of_gpu.commit and of_gpu.date and "bench --rates" in of_gpu.command


def test_what_the_bench_writes_is_what_the_planner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid as it is measured, with invented times: every shape has the lookups, rows and bags of its point, and its
    kernels are compiled before; shapes with the same tables are measured on one pair of modules."""
    found = measured(monkeypatch)
    assert cli.main(["bench", "--rates", str(tmp_path / "new" / "r.json"), "--commit", "abc"]) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["r.json"]
    read = read_rates(tmp_path / "new" / "r.json")
    assert (read.commit, read.command) == ("abc", "torchrec-triton bench --rates r.json")
    # The first shapes have one and three widths, and took 1 and 2 ms in each phase.
    assert read.width == {"fused": [0.5, 0.5], "fused_triton": [0.5, 0.5]}
    (one, three), shapes = found.shapes[:2], found.shapes[2:]
    assert len(set(one.dims)) == 1 and len(set(three.dims)) == 3
    assert len(read.times) == len(shapes) == 144
    for point, shape in zip(read.times, shapes):
        _, weighted, dim, pooling, reuse, lookups = point
        assert (shape.weighted, set(shape.dims), set(shape.pooling)) == (weighted, {dim}, {pooling})
        assert shape.num_ids == lookups and (shape.num_ids / sum(shape.rows) == reuse or set(shape.rows) == {1})

    def kind(shape: Any) -> tuple[Any, ...]:
        return shape.weighted, shape.dims, shape.pooling, shape.batch

    assert {kind(shape) for shape in found.shapes} == {kind(shape) for shape in found.compiled}
    assert max(sum(shape.rows) for shape in found.compiled) <= 100_000
    assert len(found.pairs) == 2 + 2 * 3 * 3 * 2  # of launch-bound shapes; data types, dims, reuse, lookups


def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`bench --rates` without a GPU. What it measured, compiled and built; shape number `ends` ends with `how`."""
    from torchrec_triton.bench import rates as bench

    found = SimpleNamespace(shapes=[], compiled=[], pairs=[], ends=-1, how=None)

    def measure(workload: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found.shapes.append(workload)
        if len(found.shapes) == found.ends:
            raise found.how
        phases = {phase: {"p50": float(len(found.shapes))} for phase in ("forward", "backward")}
        return {"name": workload.name, "triton": phases, "fbgemm": phases}

    monkeypatch.setattr(bench.run, "measure", measure)
    monkeypatch.setattr(bench.run, "_device", lambda: torch.device("cpu"))
    origin = ("gpu", "date", "versions", "commit")
    monkeypatch.setattr(bench.run, "_origin", lambda commit: dict.fromkeys(origin, commit))
    monkeypatch.setattr(bench.run, "gpu_problem", lambda: None)
    monkeypatch.setattr(bench.Pair, "build", lambda *what: found.pairs.append(what) or what)
    monkeypatch.setattr(bench.compiling, "warm_up", found.compiled.extend)
    return found


@pytest.mark.parametrize("how", [GateError("the sides disagree"), KeyboardInterrupt()], ids=["wrong", "stopped"])
def test_rates_that_are_not_complete_replace_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: BaseException
) -> None:
    """The file of an earlier run stays; what was measured lies beside it, and the planner refuses it."""
    path = tmp_path / "r.json"
    found = measured(monkeypatch)
    assert cli.main(["bench", "--rates", str(path)]) == 0
    before = path.read_bytes()
    found.shapes, found.ends, found.how = [], 7, how
    with contextlib.nullcontext() if isinstance(how, GateError) else pytest.raises(KeyboardInterrupt):
        assert cli.main(["bench", "--rates", str(path)]) == 1
        assert "not timed: the sides disagree\nno rates: 1 of 146 shapes failed" in capsys.readouterr().err
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match=r"r\.json\.part has no rates"):
        read_rates(tmp_path / "r.json.part")
    assert len(json.loads((tmp_path / "r.json.part").read_text())["rows"]) == len(found.shapes) - 3


def test_where_rates_cannot_be_written_or_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, before anything is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--rates", str(tmp_path / "r.json")]) == 2 and not list(tmp_path.iterdir())
    assert "there is no GPU" in capsys.readouterr().err
    found = measured(monkeypatch)
    (tmp_path / "file").touch()
    for path, words in ((tmp_path, "is a folder; name a file in it"), (tmp_path / "file" / "r.json", "")):
        assert cli.main(["bench", "--rates", str(path)]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"--rates {path}: {words}") and message.count("\n") == 1
    assert not found.shapes


# --- which kernel auto takes -----------------------------------------------------------------------------------------


# Of 1024 samples with 2 lookups each, the first has runs of 1024 lookups.
TINY, HUGE, BOTH = {"num_embeddings": 2}, {"num_embeddings": 10**7}, ("fused_triton", "fused_triton")


def chosen(rates: Path | None, model: nn.Module, batch_size: int = 512, **more: Any) -> dict[str, str]:
    topology = more.pop("topology", CUDA)
    planner = make_planner(
        more.pop("choice", "auto"), topology, rates=rates, batch_size=batch_size, debug=False, **more
    )
    return kernels(planner.plan(model, sharders()))


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_each_kernel_where_it_is_faster(rates: Path, kind: str) -> None:
    """Few lookups in runs of 1000: Triton's launch is what takes time. Many lookups, or short runs: it is faster."""
    few_rows, many_rows = tables({"num_embeddings": 8}), tables({"num_embeddings": 10**6})
    constraints = constrained(1, kind, pooling_factors=[10.0], min_partition=32)
    assert chosen(rates, few_rows, constraints=constraints) == {"t0": "fused"}
    assert chosen(rates, few_rows, 2**17, constraints=constraints) == {"t0": "fused_triton"}
    assert chosen(rates, many_rows, constraints=constraints) == {"t0": "fused_triton"}


def test_two_operators_in_a_group_must_pay(rates: Path) -> None:
    """The tiny table alone is faster on FBGEMM, the huge one on Triton. With few lookups, two more launches cost what
    the huge one gains; with some, two operators pay; with many, what the tiny one loses on Triton is no longer 5 %."""
    model = tables(TINY, HUGE)
    for pooling, expected in ((2.0, ("fused", "fused")), (150.0, ("fused", "fused_triton")), (3000.0, BOTH)):
        constraints = constrained(1, pooling_factors=[2.0])
        constraints["t1"] = ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[pooling])
        assert chosen(rates, model, constraints=constraints) == dict(zip(("t0", "t1"), expected))


def test_further_widths_of_rows_are_paid_for(rates: Path) -> None:
    """FBGEMM's operator takes tables of all dims alike; ours launches more for each width, which counts while there is
    little to do. Dims of one width cost nothing more, nor does a second operator then."""
    few = constrained(3, pooling_factors=[2.0])
    for dims, batch_size, kernel in (
        ((32, 64, 128), 16, "fused"),
        ((100, 68, 128), 16, "fused_triton"),
        ((4, 16, 8), 16, "fused_triton"),
        ((32, 64, 128), 2**17, "fused_triton"),
    ):
        model = tables(*({"num_embeddings": 10**6, "embedding_dim": dim} for dim in dims))
        assert set(chosen(rates, model, batch_size, constraints=few).values()) == {kernel}, dims


def test_widths_are_those_of_the_kernels() -> None:
    dims = [*range(4, 300, 4), 1024, 1028]
    layouts = [TableLayout.build([9], [dim], [0], [0], [0], torch.device("cpu")) for dim in dims]
    assert [_width(dim) for dim in dims] == [layout.max_block_d for layout in layouts]


def test_what_was_asked_for_is_not_weighed(rates: Path) -> None:
    few_rows = tables({"num_embeddings": 8}, {"num_embeddings": 10**7})
    constraints = constrained(2, pooling_factors=[10.0])
    choice = {"t0": "fused_triton", "t1": "fused"}
    assert chosen(rates, few_rows, choice=choice, constraints=constraints) == choice
    constraints["t1"] = dataclasses.replace(constraints["t1"], compute_kernels=["fused"])
    assert chosen(rates, few_rows, constraints=constraints)["t1"] == "fused"


def test_data_types_and_weights_of_tables_are_seen(rates: Path) -> None:
    """By the time that each is predicted to take."""

    def predicted(weighted: bool = False, **config: Any) -> float:
        constraints = constrained(1, pooling_factors=[500.0])
        planner = make_planner("auto", CUDA, rates=rates, batch_size=4096, constraints=constraints, debug=False)
        planner.plan(tables({"num_embeddings": 10**6, **config}, weighted=weighted), sharders())
        (report,) = planner.explain()
        return sum(report.milliseconds["fused"])

    half, single = predicted(data_type=DataType.FP16), predicted()
    assert 1.8 < single / half < 2 and predicted(data_type=DataType.BF16) == half
    assert 1.2 < predicted(weighted=True) / single < 1.25


def test_what_the_kernel_makes_of_a_cost(rates: Path) -> None:
    """TorchRec's time of `fused` times the measured ratio; communication and every other kernel are TorchRec's own."""
    model = tables(*({"num_embeddings": 10**6, "embedding_dim": 128} for _ in range(2)))
    ours = make_planner("auto", CUDA, rates=rates, debug=False)
    stock = EmbeddingShardingPlanner(CUDA, debug=False)
    found = {(o.name, o.sharding_type, o.compute_kernel): o for o in ours._enumerator.enumerate(model, sharders())}
    theirs = stock._enumerator.enumerate(model, [EmbeddingBagCollectionSharder(ADAGRAD)])
    assert len(found) == len(theirs)
    for option in theirs:
        kernel = "fused_triton" if option.compute_kernel == "fused" else option.compute_kernel
        mine = found[option.name, option.sharding_type, kernel]
        for shard, other in zip(mine.shards, option.shards, strict=True):
            computed = {"fwd_compute": other.perf.fwd_compute, "bwd_compute": other.perf.bwd_compute}
            assert dataclasses.replace(shard.perf, **computed) == other.perf
            assert (shard.perf == other.perf) == (kernel != "fused_triton")
    mine = found["t0", "table_wise", "fused_triton"]
    (other,) = [o for o in theirs if (o.name, o.sharding_type, o.compute_kernel) == ("t0", "table_wise", "fused")]
    # 1024 lookups of 512 bytes; two tables on two ranks, so that a rank has one, and a whole launch
    ns = {"fused": (8, 16), "fused_triton": (2, 8)}
    ms = {kernel: [0.1 + 1024 * price * 1e-6 for price in prices] for kernel, prices in ns.items()}
    for at, phase in enumerate(("fwd_compute", "bwd_compute")):
        ratio = getattr(mine.shards[0].perf, phase) / getattr(other.shards[0].perf, phase)
        assert ratio == pytest.approx(ms["fused_triton"][at] / ms["fused"][at], rel=1e-6)


def test_no_dependence_on_the_order_of_hashes(rates: Path, tmp_path: Path) -> None:
    """Equal plans, to the last byte, whatever seed strings are hashed with; also where constraints are lists."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_torchrec_rates import *
model = tables(TINY, *({{"num_embeddings": 10 ** (1 + i % 6)}} for i in range(11)))
constraints = {{
    f"t{{i}}": ParameterConstraints(
        sharding_types=["row_wise", "table_wise", "column_wise", "table_row_wise"],
        pooling_factors=[1.0 + 30 * (i % 3)],
        compute_kernels=["fused_uvm", "fused_triton", "fused", "fused_uvm_caching"],
    )
    for i in range(2, 12, 2)
}}
for batch_size in (64, 8192):
    keywords = dict(rates={str(rates)!r}, constraints=constraints, batch_size=batch_size, debug=False)
    planner = make_planner("auto", CUDA, **keywords)
    save_plan(planner.plan(model, sharders()), sys.argv[1] + str(batch_size))
"""
    plans = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, str(path)], env=environment, check=True, capture_output=True)
        plans.append("".join(Path(f"{path}{batch_size}").read_text() for batch_size in (64, 8192)))
    assert plans[0] == plans[1] and "fused_triton" in plans[0] and '"fused"' in plans[0]


def test_without_rates_triton_runs_wherever_it_can_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchrec_triton"):
        assert chosen(None, tables({"num_embeddings": 8}, {})) == {"t0": "fused_triton", "t1": "fused_triton"}
    (line,) = [r.getMessage() for r in caplog.records if r.name == "torchrec_triton"]
    assert line.startswith("no measured rates of ")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "torchrec_triton"):
        chosen(None, tables({}), choice="fused_triton")
    assert not [r for r in caplog.records if r.name == "torchrec_triton"]


def test_on_an_unknown_gpu_kernels_compare_as_on_a_known_one(rates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is by the known one's rates; times are TorchRec's, which knows the topology's bandwidth."""
    monkeypatch.setattr(rates_module, "known_rates", lambda: {"Invented": read_rates(rates)})
    constraints = constrained(2, pooling_factors=[2.0])
    model = tables({"num_embeddings": 8}, {})
    assert chosen(None, model, constraints=constraints)["t0"] == "fused"
    options = {}
    for planner in (
        make_planner("auto", CUDA, constraints=constraints),
        EmbeddingShardingPlanner(CUDA, constraints=constraints),
    ):
        for option in planner._enumerator.enumerate(model, [EmbeddingBagCollectionSharder(ADAGRAD)]):
            options.setdefault((option.name, option.compute_kernel), []).append(option.total_perf)
    assert all(ours == theirs for ours, theirs in options.values())


def test_a_configuration_says_it_all(rates: Path) -> None:
    """Kernels, batch size, lookups and sharding types."""
    table = {"rows": 8, "dim": 64, "pooling_factor": 10.0, "sharding": ("row_wise",)}
    rules = (Rule(tables="b", compute_kernel="fused_triton"),)
    for batch_size, kernel in ((512, "fused"), (2**17, "fused_triton")):
        for names, expected in (("a", {"a": kernel}), ("b", {"b": "fused_triton"})):
            model = Model(tables=tuple(Table(name=name, **table) for name in names))
            config = Config(model=model, rules=rules if "b" in names else (), data=Data(batch_size=batch_size))
            plan = make_planner(config, CUDA, rates=rates, debug=False).plan(model_of(config), sharders())
            assert kernels(plan) == expected
            assert {sharding.sharding_type for sharding in plan.plan["embeddings"].values()} == {"row_wise"}


def test_the_report_of_a_plan(rates: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tables(TINY, HUGE, {"data_type": DataType.INT8}, {})
    constraints = constrained(4, "row_wise", pooling_factors=[10.0])
    constraints["t1"] = ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[3000.0])
    constraints["t3"] = ParameterConstraints(sharding_types=["data_parallel"])
    planner = make_planner("auto", CUDA, rates=rates, constraints=constraints, debug=False)
    with caplog.at_level(logging.INFO, "torchrec_triton"):
        plan = planner.plan(model, sharders())
    reports = {report.table: report for report in planner.explain()}
    assert {table: report.compute_kernel for table, report in reports.items()} == kernels(plan)
    assert reports["t0"].reasons == ("faster, all tables taken together, by the rates of Invented",)
    assert sum(reports["t0"].milliseconds["fused"]) < sum(reports["t0"].milliseconds["fused_triton"])
    assert reports["t1"].compute_kernel == "fused_triton" and not reports["t1"].reasons
    assert sum(reports["t1"].milliseconds["fused"]) > sum(reports["t1"].milliseconds["fused_triton"]) > 0
    assert "INT8" in reports["t2"].reasons[0] and "DATA_PARALLEL" in reports["t3"].reasons[0]
    assert reports["t0"].ranks == (0, 1) and len(reports["t1"].ranks) == 1
    # rows of 256 bytes and 4 of state, and what a batch takes
    assert 10**7 * 260 < reports["t1"].bytes < 10**7 * 260 * 1.2
    text = as_text(planner.explain(), ["heading", ""]).splitlines()
    assert text[0] == "heading"
    (line,) = [line.split() for line in text if line.startswith("t0 ")]
    assert line[:4] == ["t0", "row_wise", "0-1", "fused"] and float(line[4]) < float(line[5])
    assert "    faster, all tables taken together, by the rates of Invented" in text
    logged = {r.levelname: r.getMessage() for r in caplog.records if r.name == "torchrec_triton"}
    assert logged["INFO"].startswith("table t0: fused") and "rates of Invented" in logged["INFO"]
    assert logged["WARNING"].startswith("table t2: fused") and len(logged) == 2


# --- TorchRec's planner ----------------------------------------------------------------------------------------------


def test_with_fused_the_plan_is_torchrecs_own(rates: Path, tmp_path: Path) -> None:
    """The same plan, the same estimates and the same hash of all that it depends on, also where only the sharder names
    the optimizer."""
    model = tables(*({"num_embeddings": 1000 * 3**i} for i in range(8)))
    constraints = constrained(3, None, pooling_factors=[20.0])
    keywords = {"topology": CUDA, "constraints": constraints, "batch_size": 4096, "debug": False}
    stock = EmbeddingShardingPlanner(**keywords)
    save_plan(stock.plan(model, [EmbeddingBagCollectionSharder(ADAGRAD)]), tmp_path / "stock.json")
    for choice in ("fused", {"t*": "fused"}, {}):
        ours = make_planner(choice=choice, rates=rates, **keywords)
        save_plan(ours.plan(model, sharders()), tmp_path / "ours.json")
        assert (tmp_path / "ours.json").read_bytes() == (tmp_path / "stock.json").read_bytes()
        assert ours.hash_planner_context_inputs_str() == stock.hash_planner_context_inputs_str()
        assert ours._num_proposals == stock._num_proposals


@pytest.mark.parametrize("count", [26, 500])
def test_the_search_is_no_larger(rates: Path, count: int) -> None:
    model = tables(*({"num_embeddings": 10 ** (1 + i % 6)} for i in range(count)))
    theirs = EmbeddingShardingPlanner(CUDA, debug=False)
    before = theirs._enumerator.enumerate(model, [EmbeddingBagCollectionSharder(ADAGRAD)])
    ours = make_planner("auto", CUDA, rates=rates, debug=False)
    begun = time.perf_counter()
    options = ours._enumerator.enumerate(model, sharders())
    assert time.perf_counter() - begun < 30
    assert len(options) == len(before)
    assert len({(o.name, o.sharding_type) for o in options if o.compute_kernel in ("fused", "fused_triton")}) == len(
        [o for o in options if o.compute_kernel in ("fused", "fused_triton")]
    )


def test_planning_tries_no_more(rates: Path) -> None:
    """By count of proposals: with 26 and 300 tables on one host, planning took 1.02 and 1.1 times TorchRec's time."""
    model = tables(*({"num_embeddings": 10 ** (1 + i % 6)} for i in range(26)))
    theirs, ours = EmbeddingShardingPlanner(CUDA, debug=False), make_planner("auto", CUDA, rates=rates, debug=False)
    theirs.plan(model, [EmbeddingBagCollectionSharder(ADAGRAD)])
    ours.plan(model, sharders())
    assert 100 < ours._num_proposals <= theirs._num_proposals * 1.1


CACHED = {"cache_params": CacheParams(load_factor=0.2), "compute_kernels": ["fused_uvm_caching"]}
PROPOSERS = [
    GreedyProposer,
    UniformProposer,
    GridSearchProposer,
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
]


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("partitioner", [GreedyPerfPartitioner, MemoryBalancedPartitioner])
def test_every_proposer_and_partitioner(rates: Path, proposer: Any, partitioner: Any) -> None:
    """One table of each kernel, and one behind a cache, whose size the last proposer looks for."""
    model = tables(TINY, HUGE, {"num_embeddings": 10**5})
    either = {"sharding_types": ["table_wise"], "compute_kernels": ["fused", "fused_triton"]}
    constraints = {
        "t0": ParameterConstraints(**either, pooling_factors=[2.0]),
        "t1": ParameterConstraints(**either, pooling_factors=[150.0]),
        "t2": ParameterConstraints(sharding_types=["table_wise"], **CACHED),
    }
    planner = make_planner(
        "auto", CUDA, rates=rates, constraints=constraints, proposer=proposer(), partitioner=partitioner(), debug=False
    )
    found = kernels(planner.plan(model, sharders()))
    assert found == {"t0": "fused", "t1": "fused_triton", "t2": "fused_uvm_caching"}


def reservations() -> list[Any]:
    """One of every class of this TorchRec."""
    found = [
        storage_reservations.FixedPercentageStorageReservation(0.1),
        storage_reservations.HeuristicalStorageReservation(0.15),
        storage_reservations.InferenceStorageReservation(0.1),
    ]
    if hasattr(storage_reservations, "FixedAbsoluteStorageReservation"):
        found.append(storage_reservations.FixedAbsoluteStorageReservation(2**28))
    return found


def test_no_reservation_class_is_forgotten() -> None:
    classes = {
        kind
        for kind in vars(storage_reservations).values()
        if isinstance(kind, type)
        and issubclass(kind, storage_reservations.StorageReservation)
        and kind is not storage_reservations.StorageReservation
    }
    # SKUAware counts in memory sizes of particular machines and asks for a topology made for one.
    assert {kind.__name__ for kind in classes} - {type(r).__name__ for r in reservations()} <= {
        "SKUAwareStorageReservation"
    }


@pytest.mark.parametrize("reservation", reservations(), ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("choice", ["fused_triton", "auto", "fused"])
def test_no_room_names_table_kernel_need_and_have(rates: Path, reservation: Any, choice: str) -> None:
    """TorchRec's own error, of its own type, with its own text and ours behind it."""
    small = Topology(world_size=1, compute_device="cuda", hbm_cap=2**30, ddr_cap=2**30)
    model = tables({"num_embeddings": 8_000_000}, {"num_embeddings": 10})  # 1953 MiB
    constraints = constrained(1, compute_kernels=["fused", "fused_triton"])
    planner = make_planner(
        choice, small, rates=rates, constraints=constraints, storage_reservation=reservation, debug=False
    )
    with pytest.raises(PlannerError) as caught:
        planner.plan(model, sharders())
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE
    message = str(caught.value)
    assert "insufficient storage" in message and "A rank has " in message
    kernels_of = {"fused_triton": ["fused_triton"], "fused": ["fused"], "auto": ["fused", "fused_triton"]}[choice]
    (line,) = [line for line in message.splitlines() if line.startswith("  table t0: ")]
    need, unit = line.removeprefix("  table t0: ").split()[:2]
    assert unit == "MiB" and 1953 <= int(need.replace(",", "")) <= 2000
    assert any(f", {kernel}, table_wise" in line for kernel in kernels_of)


def test_unknown_rates_are_told_where_none_are_needed(rates: Path) -> None:
    make_planner("fused", CUDA, rates=rates)
    with pytest.raises(ValueError, match="rates 'H2000' is neither a file nor a known GPU; known: "):
        make_planner("fused", CUDA, rates="H2000")


def test_no_time_is_predicted_of_a_kernel_that_a_table_cannot_have(rates: Path) -> None:
    planner = make_planner("auto", CUDA, rates=rates, constraints=constrained(2), debug=False)
    planner.plan(tables({}, {"data_type": DataType.INT8}), sharders())
    assert [set(report.milliseconds) for report in planner.explain()] == [{"fused", "fused_triton"}, {"fused"}]


def test_a_lack_of_the_hosts_memory_is_told(rates: Path) -> None:
    """Of a table that could lie there."""
    small = Topology(world_size=1, compute_device="cuda", hbm_cap=2**30, ddr_cap=2**30)
    planner = make_planner("auto", small, rates=rates, constraints=constrained(1), debug=False)
    with pytest.raises(PlannerError) as caught:
        planner.plan(tables({"num_embeddings": 8_000_000}), sharders())
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("  table t0: ")]
    assert re.fullmatch(r"  table t0: .*1,9\d\d MiB host, fused_uvm\w*, table_wise", line)
    assert re.search(r"A rank has [\d,]+ MiB GPU and 1,024 MiB host memory left", str(caught.value))


@pytest.mark.parametrize("reservation", reservations(), ids=lambda r: type(r).__name__)
def test_every_reservation_leaves_room_for_a_plan(rates: Path, reservation: Any) -> None:
    planner = make_planner("auto", CUDA, rates=rates, storage_reservation=reservation, debug=False)
    assert kernels(planner.plan(tables({"num_embeddings": 10**6}), sharders())) == {"t0": "fused_triton"}


def test_an_error_while_the_need_is_found_hides_nothing(rates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Topology(world_size=1, compute_device="cuda", hbm_cap=2**30, ddr_cap=2**30)
    planner = make_planner("fused_triton", small, rates=rates, debug=False)

    def broken(*args: Any) -> list[ShardingOption]:
        if sys.exc_info()[0] is PlannerError:
            raise RuntimeError("no options")
        return type(planner._enumerator).enumerate(planner._enumerator, *args)

    model = tables({"num_embeddings": 8_000_000})
    monkeypatch.setattr(planner._enumerator, "enumerate", lambda module, sharders: broken(module, sharders))
    with pytest.raises(PlannerError, match="insufficient storage") as caught:
        planner.plan(model, sharders())
    assert "What the tables need is not known: RuntimeError: no options" in str(caught.value)


def planned_by_all(rates: str, gib: float) -> tuple[Any, Any]:
    """On a rank: the plan's kernels, or the error's type and text."""
    topology = Topology(world_size=2, compute_device="cuda", hbm_cap=int(gib * 2**30))
    planner = make_planner("fused_triton", topology, rates=rates, debug=False, stats=[])
    try:
        return kernels(planner.collective_plan(tables({"num_embeddings": 16_000_000}), sharders())), None
    except PlannerError as error:
        return error.error_type, str(error)


@pytest.mark.xdist_group("ranks")
def test_every_rank_hears_that_there_is_no_plan(rates: Path) -> None:
    both = ranks(2).run(planned_by_all, str(rates), 16.0)
    assert both == [({"t0": "fused_triton"}, None)] * 2
    first, second = ranks(2).run(planned_by_all, str(rates), 1.0)
    assert first == second and first[0] == PlannerErrorType.INSUFFICIENT_STORAGE and "table t0: " in first[1]
