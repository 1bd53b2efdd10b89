"""The A/B comparison on the CPU: arms that differ in their kernels alone, what is measured, verdict and report."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from distributed_harness import ranks
from harness import compiled_kernels
from torch import distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

from torchrec_triton.ab import arm as arm_module
from torchrec_triton.ab import compare as compare_module
from torchrec_triton.ab import report as reports
from torchrec_triton.ab.arm import Arm, Feed, LaunchError, Place, in_step, place
from torchrec_triton.ab.compare import _covered, _differences, _largest, _ratio, compare
from torchrec_triton.ab.model import fill
from torchrec_triton.ab.run import _plan, run
from torchrec_triton.ab.sources import open_source
from torchrec_triton.cli import main
from torchrec_triton.config import Config, ConfigError, Limits, build, load_config
from torchrec_triton.plan.configured import model_of
from torchrec_triton.plan.files import save_plan
from torchrec_triton.plan.planner import _Planner, with_compute_kernel
from torchrec_triton.plan.reasons import UnsupportedTableError

ROOT = Path(__file__).parents[1]
TABLES = [
    {"name": "one", "rows": 50, "dim": 8, "pooling_factor": 3},
    {"name": "two", "rows": 7, "dim": 8, "features": ["f", "g"], "pooling": "MEAN"},
    {"name": "three", "rows": 200, "dim": 8, "pooling_factor": 2},
]
TINY: dict[str, Any] = {
    "model": {"tables": TABLES, "bottom": [8], "hidden": [8]},
    "optimizer": {"learning_rate": 0.1},
    "data": {"batch_size": 8, "options": {"dense": 2, "jagged": True, "evaluation_batches": 2}},
    "steps": 12,
    "ab": {"warmup": 2, "profile_steps": 2},
}


def with_changes(**changes: Any) -> dict[str, Any]:
    """TINY with some keys replaced; `a__b` is key b under key a."""
    content = copy.deepcopy(TINY)
    for path, value in changes.items():
        at, *rest = path.split("__")
        inner = content
        for key in rest:
            inner, at = inner.setdefault(at, {}), key
        inner[at] = value
    return content


def placed(config: Config, shardings: str) -> ShardingPlan:
    """A plan by hand; TorchRec's planner cuts no rows on the CPU, and columns only from a width of 128."""
    makers = {"tw": table_wise(rank=0), "tw1": table_wise(rank=1), "cw": column_wise(ranks=[0, 1]), "rw": row_wise()}
    tables = {table.name: makers[kind] for table, kind in zip(config.model.tables, shardings.split())}
    collection = model_of(config)["embeddings"]
    size = dist.get_world_size()
    made = construct_module_sharding_plan(collection, tables, local_size=size, world_size=size, device_type="cpu")
    plan = with_compute_kernel(ShardingPlan({"embeddings": made}), "fused")  # TorchRec's helpers give `dense`
    return with_compute_kernel(plan, config.kernels())


def compared(content: dict[str, Any], shardings: str = "") -> dict[str, Any]:
    config = build(Config, content)
    with place() as here:
        plan = placed(config, shardings) if shardings else None
        return compare(config, here, open_source(config), lambda step, steps, loss: None, plan)


@pytest.fixture(scope="module")
def fused_report() -> dict[str, Any]:
    """Two ranks, both arms on FBGEMM, 200 steps and more of the pipeline that overlaps batches."""
    config = with_changes(compute_kernel="fused", steps=220)
    mine, other = ranks(2).run(compared, config)
    assert mine["curves"]["loss"] == other["curves"]["loss"] and mine["tables"] == other["tables"]
    mine["verdict"] = reports.judge(mine, Limits(loss_difference=0.0, weight_difference=0.0, state_difference=0.0))
    return mine


def test_arms_that_are_the_same_do_the_same(fused_report):
    """To the bit: nothing of one arm's training reaches the other, and both see the same batches."""
    report = fused_report
    assert report["initial_difference"] == 0 and report["loss_difference"] == 0
    for table in report["tables"]:
        assert table["weight_difference"]["absolute"] == table["state_difference"]["absolute"] == 0
    assert report["arms"]["A"]["metrics"] == report["arms"]["B"]["metrics"]
    assert report["verdict"]["passed"] and len(report["verdict"]["checks"]) == 3
    assert "Both arms ran FBGEMM" in report["notes"][0] and not any("turns" in note for note in report["notes"])
    losses = report["curves"]["loss"]["A"]
    assert len(losses) == 220 and np.mean(losses[-20:]) < 0.95 * np.mean(losses[:20])  # it learns


def test_what_is_measured_adds_up(fused_report):
    arm = fused_report["arms"]["A"]
    assert arm["step_ms"]["p50"] <= arm["step_ms"]["p90"] <= arm["step_ms"]["p99"]
    assert min(arm["phase_ms"].values()) > 0 and sum(arm["phase_ms"].values()) < 3 * arm["step_ms"]["p90"]
    assert arm["examples_per_second"] == pytest.approx(2 * 8 / arm["step_ms"]["mean"] * 1e3)
    # gloo's operations between two ranks, in steps that the profiler slows down
    assert 0 < arm["profile"]["collective_ms"] < 10 * arm["step_ms"]["p99"]
    assert arm["peak_memory_mb"] is None  # a CPU
    low, high = fused_report["speed_ratio"]["p50"]["interval"]
    assert low <= fused_report["speed_ratio"]["p50"]["value"] <= high
    assert arm["metrics"]["samples"] == 2 * 2 * 8 and arm["metrics"]["normalized_entropy"] > 0


def test_the_profiler_watches_both_arms_by_turns_and_full_pipelines(monkeypatch):
    config = build(Config, with_changes(compute_kernel="fused", steps=10, ab__profile_steps=3))
    arms: list[Arm] = []
    turns: list[tuple[str, int]] = []
    left: list[int] = []
    construct, original = Arm.__init__, Arm.advance

    def advance(self: Arm, batches: Any, steps: int) -> None:
        turns.append(("AB"[arms.index(self)], steps))
        original(self, batches, steps)
        left.append(len(self.pipeline.batches))

    monkeypatch.setattr(Arm, "__init__", lambda self, *args, **kw: (arms.append(self), construct(self, *args, **kw))[1])
    monkeypatch.setattr(Arm, "advance", advance)
    with place() as here:
        compare(config, here, open_source(config), lambda *_: None)
    assert turns[-4:] == [("A", 2), ("B", 2), ("B", 1), ("A", 1)]
    assert len(set(left)) == 1 and left[0] > 0


def test_neither_arm_is_always_first_nor_waits_for_data(monkeypatch):
    """Who goes first alternates from turn to turn, and a turn's batches are made before either arm takes it."""
    config = build(Config, with_changes(compute_kernel="fused", steps=10, ab__steps_a_turn=2, ab__profile_steps=2))
    source, events = open_source(config), list[Any]()
    training, original = type(source).training, Arm.advance

    def made(self: Any, rank: int, world_size: int) -> Any:
        for number, batch in enumerate(training(self, rank, world_size)):
            events.append(number)
            yield batch

    def advance(self: Arm, batches: Any, steps: int) -> None:
        if self not in arms:
            arms.append(self)
        events.append("AB"[arms.index(self)])
        original(self, batches, steps)
        events.append("end")

    arms: list[Arm] = []
    monkeypatch.setattr(type(source), "training", made)
    monkeypatch.setattr(Arm, "advance", advance)
    with place() as here:
        compare(config, here, source, lambda *_: None)
    assert "".join(event for event in events if event in ("A", "B")) == "ABBA" * 3  # two turns under the profiler
    assert [event for event in events if isinstance(event, int)] == list(range(10 + compare_module._AHEAD))
    assert all(after == "end" for event, after in pairwise(events) if event in ("A", "B"))


WEIGHTED = {"model__weighted": True, "model__tables": [TABLES[0]], "pipeline": "base", "ab__steps_a_turn": 3}
RULES = {"rules": [{"tables": "three", "compute_kernel": "fused"}], "steps": 8}


@pytest.mark.parametrize(
    ("world_size", "shardings", "changes"),
    [(2, "rw tw1 cw", {}), (2, "rw", WEIGHTED), (4, "", RULES)],
    ids=["row, table and column wise", "weighted, other pipeline, turns of 3", "4 ranks, kernels mixed"],
)
def test_triton_in_the_interpreter_trains_as_fbgemm(world_size, shardings, changes):
    report = ranks(world_size).run(compared, with_changes(**changes), shardings)[0]
    got = {table["name"]: (table["A"]["kernel"], table["B"]["kernel"]) for table in report["tables"]}
    expected = {name: ("fused", "fused_triton") for name in got}
    if "rules" in changes:
        expected["three"] = ("fused", "fused")
    assert got == expected
    assert not any(table["moved"] for table in report["tables"])
    assert report["initial_difference"] == 0
    # Adam's first steps blow a difference in the last bit up; a wrong update would show in the first digits.
    assert 0 <= report["loss_difference"] < 1e-3
    for table in report["tables"]:
        assert table["weight_difference"]["share"] < 1e-3 and table["state_difference"]["share"] < 1e-3
    assert "interpreter" in report["notes"][0]
    assert re.match(r"Only [48] turns were timed", report["notes"][-1])


def test_the_comparison_would_notice(monkeypatch):
    """A learning rate one per cent too large in one arm is far outside what the test above allows."""
    config = build(Config, with_changes(compute_kernel="fused"))
    original = Arm.advance

    def advance(self: Arm, batches: Any, steps: int) -> None:
        if self is arms[1]:
            self.model.fused_optimizer.param_groups[0]["lr"] = 0.101
        original(self, batches, steps)

    arms: list[Arm] = []
    construct = Arm.__init__
    monkeypatch.setattr(Arm, "__init__", lambda self, *args, **kw: (arms.append(self), construct(self, *args, **kw))[1])
    monkeypatch.setattr(Arm, "advance", advance)
    with place() as here:
        report = compare(config, here, open_source(config), lambda *_: None)
    assert max(table["weight_difference"]["share"] for table in report["tables"]) > 2e-3
    assert not reports.judge(report, Limits(weight_difference=1e-3))["passed"]


def two_placements(content: dict[str, Any], *shardings: str) -> list[dict[str, Any]]:
    config = build(Config, content)
    with place() as here:
        arms = [Arm(config, here, 2, config.kernels(), placed(config, one)) for one in shardings]
        same = _differences(arms[0].model.state_dict(), arms[1].model.state_dict(), here)
        state = _differences(arms[0].table_state(), arms[1].table_state(), here)
        for weight, (row, _) in arms[1].weights()["embeddings.embedding_bags.one.weight"]:
            if row == 0:
                weight[0, 0] += 0.5
        return [same, state, _differences(arms[0].model.state_dict(), arms[1].model.state_dict(), here)]


def test_weights_start_alike_wherever_they_lie():
    """Tables that the planner put elsewhere for the other arm are still the same tables, and are compared."""
    config = with_changes(compute_kernel="fused")
    same, state, changed = ranks(2).run(two_placements, config, "rw tw cw", "tw1 rw rw")[0]
    assert {d["absolute"] for d in same.values()} == {0.0}
    assert set(state.values()) == {None}
    assert changed["embeddings.embedding_bags.one.weight"]["absolute"] == pytest.approx(0.5, rel=1e-6)


def test_tables_of_several_widths():
    tables = [{**table, "dim": dim} for table, dim in zip(TABLES, (4, 8, 16))]
    config = build(Config, with_changes(model__tables=tables, model__interaction="cat", compute_kernel="fused"))
    with place() as here:
        assert compare(config, here, open_source(config), lambda *_: None)["loss_difference"] == 0


def moved_to_unified_memory(plan: ShardingPlan, *names: str) -> ShardingPlan:
    for name in names:
        plan.plan["embeddings"][name].compute_kernel = "fused_uvm_caching"
    return plan


@pytest.mark.parametrize("changes", [{}, {"compute_kernel": "fused_triton"}])
def test_a_table_in_unified_memory_stays_there(monkeypatch, changes):
    """The planner puts one there for A, and another for B: B's arm has A's plan."""
    found = iter((["one"], ["two"]))
    original = EmbeddingShardingPlanner.collective_plan
    monkeypatch.setattr(
        _Planner, "collective_plan", lambda *args: moved_to_unified_memory(original(*args), *next(found))
    )
    config = build(Config, with_changes(**changes))
    with place() as here:
        if changes:
            with pytest.raises(UnsupportedTableError, match="table one: compute_kernel=fused_uvm_caching"):
                compare(config, here, open_source(config), lambda *_: None)
            return
        report = compare(config, here, open_source(config), lambda *_: None)
    got = {table["name"]: (table["A"]["kernel"], table["B"]["kernel"]) for table in report["tables"]}
    assert got == {
        "one": ("fused_uvm_caching", "fused_uvm_caching"),
        "two": ("fused", "fused_triton"),
        "three": ("fused", "fused_triton"),
    }
    assert report["tables"][0]["B"]["reasons"] == ["the plan has fused_uvm_caching"]


def test_auto_chooses_for_the_tables_as_they_lie_in_a_frozen_plan(monkeypatch):
    """Which kernel is faster depends on the sharding type, so B's planner may choose among A's types only."""
    asked = []
    original = arm_module.make_planner

    def noted(kernels: Any, topology: Any, **keywords: Any) -> Any:
        constraints = keywords["constraints"]
        asked.append((set(kernels.values()), {name: c.sharding_types for name, c in constraints.items()}))
        return original(kernels, topology, **keywords)

    monkeypatch.setattr(arm_module, "make_planner", noted)
    config = build(Config, with_changes(steps=8))
    with place() as here:
        report = compare(config, here, open_source(config), lambda *_: None)
    (baseline, of_a), (auto, of_b) = asked
    assert (baseline, auto) == ({"fused"}, {"auto"}) and all(len(kinds) > 1 for kinds in of_a.values())
    assert of_b == {table["name"]: [table["A"]["sharding"]] for table in report["tables"]}
    assert {table["B"]["kernel"] for table in report["tables"]} == {"fused_triton"}


@pytest.mark.parametrize("mode", ["train", "ab"])
def test_the_kernels_of_a_plan_on_file_count(tmp_path, capsys, mode):
    path, plan_path, content = tmp_path / "run.yaml", tmp_path / "plan.json", with_changes()
    with place():
        plan = placed(build(Config, content), "tw tw tw")
    save_plan(with_compute_kernel(moved_to_unified_memory(plan, "three"), {"two": "fused"}), plan_path)
    path.write_text(yaml.safe_dump(content))
    assert run(mode, str(path), tmp_path / "out", 0, plan_path) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert mode == "train" or report["plan"] == "given"
    tables = report["tables"]
    got = {t["name"]: t["B"]["kernel"] for t in tables} if mode == "ab" else {n: t["kernel"] for n, t in tables.items()}
    assert got == {"one": "fused_triton", "two": "fused", "three": "fused_uvm_caching"}
    capsys.readouterr()
    path.write_text(yaml.safe_dump(with_changes(rules=[{"tables": "one", "compute_kernel": "fused"}])))
    assert run(mode, str(path), tmp_path / "out", 0, plan_path) == 2
    told = capsys.readouterr().err
    assert "plan.json: table one has fused_triton in the plan, and the configuration asks for fused" in told


def test_the_plan_of_a_baseline_does_not_depend_on_a_hash(tmp_path):
    """TorchRec's, of tables that tie in its estimates."""
    tables = [{"name": f"t{i}", "rows": 1000 * (i + 1), "dim": 128, "pooling_factor": i + 1} for i in range(12)]
    content = {"model": {"tables": tables}, "compute_kernel": "fused"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    code = """
import sys
from torchrec_triton.ab.arm import Place, _planner
from torchrec_triton.config import load_config
from torchrec_triton.plan.configured import PlanningSharder, model_of
import torch
config, sharder = load_config(sys.argv[1]), PlanningSharder()
planner = _planner(config, Place(torch.device("cpu"), 0, 8, 8), config.kernels(), sharder, 2)
plan = planner.plan(model_of(config), [sharder])
print([(name, s.sharding_type, s.ranks) for name, s in plan.plan["embeddings"].items()])
"""
    printed = set()
    for seed in "0123":
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run.yaml")],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout.splitlines()[-1])
    assert len(printed) == 1


def test_replan_lets_the_planner_choose():
    config = build(Config, with_changes(ab__plan="replan", compute_kernel="fused"))
    with place() as here:
        report = compare(config, here, open_source(config), lambda *_: None)
    report["verdict"] = reports.judge(report, config.ab.limits)
    assert report["loss_difference"] == 0
    assert "the planner chose for each arm; moved: nothing" in reports.markdown(report)


def test_initial_weights_do_not_depend_on_how_they_are_cut():
    whole = torch.empty(100, 12)
    fill(whole, "t", 3, 0.5, 0, 0, 12)
    part = torch.empty(40, 4)
    fill(part, "t", 3, 0.5, 30, 8, 12)
    assert torch.equal(part, whole[30:70, 8:])
    for name, seed in (("u", 3), ("t", 4)):
        other = torch.empty(100, 12)
        fill(other, name, seed, 0.5, 0, 0, 12)
        assert (other == whole).float().mean() < 0.01
    large = torch.empty(5000, 12)
    fill(large, "t", 0, 1.0, 0, 0, 12)
    # Uniform on [-1, 1): variance 1/3, and neighbours know nothing of each other; 60,000 draws leave 0.4 % of noise.
    assert abs(large.mean()) < 0.02 and abs(large.var() - 1 / 3) < 0.01
    assert abs((large[:, 1:] * large[:, :-1]).mean()) < 0.02 and abs((large[1:] * large[:-1]).mean()) < 0.02


def test_a_feed_makes_each_batch_once_for_all_readers():
    made = []

    def batches():
        for number in range(100):
            made.append(number)
            yield number

    feed = Feed(batches(), 5, pin=False)
    one, two = feed.reader(), feed.reader()
    feed.prepare(3)
    assert made == [0, 1, 2]
    assert list(islice(one, 2)) == [0, 1] and made == [0, 1, 2]
    assert list(two) == [0, 1, 2, 3, 4] and list(one) == [2, 3, 4]
    feed.prepare(9)
    with pytest.raises(ConfigError, match="ended after 3 batches, 5 are needed"):
        Feed(iter(range(3)), 5, pin=False).prepare(4)
    assert made == [0, 1, 2, 3, 4] and len(feed._held) <= 1


def test_the_interval_of_a_ratio():
    random = np.random.default_rng(1)
    drift = 1 + np.linspace(0, 1, 400)  # of the machine, which meets both arms
    one, two = (drift * random.normal(10, 0.3, 400) for _ in range(2))
    steps = np.arange(400)
    same, twice = _ratio(one, two, 50, steps), _ratio(2 * one, two, 50, steps)
    assert same["interval"][0] < 1 < same["interval"][1] and same["interval"][1] - same["interval"][0] < 0.05
    assert twice["interval"][0] < 2 < twice["interval"][1]
    assert _ratio(one, two, 50, steps) == same


def test_the_interval_knows_that_steps_of_a_turn_are_alike(monkeypatch):
    """Of arms that are the same but for a slow or fast moment a turn: the true ratio is 1."""
    monkeypatch.setattr(compare_module, "RESAMPLES", 200)
    random, turns, missed = np.random.default_rng(1), np.arange(243) // 5, {"turns": 0, "steps": 0}
    for _ in range(100):
        moments = (10 * np.exp(random.normal(0, 0.02, turns[-1] + 1))[turns] for _ in range(2))
        one, two = (moment * random.normal(1, 0.02, 243) for moment in moments)
        for name, drawn in (("turns", turns), ("steps", np.arange(243))):
            low, high = _ratio(one, two, 50, drawn)["interval"]
            missed[name] += not low <= 1 <= high
    assert missed["turns"] <= 10 < missed["steps"]  # of 100, where 5 are meant


# --- sources ----------------------------------------------------------------------------------------------------------


def test_synthetic_batches_are_repeatable_and_differ_by_rank():
    config = build(Config, with_changes(data__options={"dense": 2, "zipf": 1.2}))
    source = open_source(config)
    first, again, other = (next(source.training(rank, 2)) for rank in (0, 0, 1))
    assert torch.equal(first.sparse_features.values(), again.sparse_features.values())
    assert not torch.equal(first.dense_features, other.dense_features)
    assert first.sparse_features.keys() == ["one", "f", "g", "three"]
    assert first.sparse_features.lengths().tolist() == [3] * 8 + [1] * 16 + [2] * 8
    held_out = next(source.evaluation(0, 2))
    assert not torch.equal(first.dense_features, held_out.dense_features)


@pytest.mark.parametrize("drawn", [0, 3])
def test_synthetic_batches_come_again_where_that_is_asked_for(drawn):
    source = open_source(build(Config, with_changes(data__options={"dense": 2, "training_batches": drawn})))
    batches = [batch.dense_features for batch in islice(source.training(0, 1), 7)]
    same = [[torch.equal(one, other) for other in batches] for one in batches]
    assert same == [[i == j or (drawn > 0 and (i - j) % drawn == 0) for j in range(7)] for i in range(7)]


def test_synthetic_bags_have_the_mean_that_was_asked_for():
    table = [{"name": "half", "rows": 9, "dim": 4, "pooling_factor": 0.5}]
    table += [{"name": "more", "rows": 9, "dim": 4, "pooling_factor": 2.25}]
    config = build(Config, {"model": {"tables": table}, "data": {"batch_size": 4000, "options": {"dense": 0}}})
    half, more = next(open_source(config).training(0, 1)).sparse_features.lengths().reshape(2, -1)
    assert set(half.tolist()) == {0, 1} and set(more.tolist()) == {2, 3}
    assert half.float().mean() == pytest.approx(0.5, abs=0.03) and more.float().mean() == pytest.approx(2.25, abs=0.03)


def test_synthetic_ids_follow_their_law():
    table = [{"name": "t", "rows": 1000, "dim": 4, "pooling_factor": 20}]
    shares = []
    for zipf in (0, 1.0, 1.05):
        options = {"zipf": zipf, "dense": 0}
        config = build(Config, {"model": {"tables": table}, "data": {"batch_size": 500, "options": options}})
        ids = next(open_source(config).training(0, 1)).sparse_features.values()
        assert ids.min() >= 0 and ids.max() < 1000
        shares.append(torch.bincount(ids, minlength=1000).max().item() / len(ids))
    # Of 1000 rows the hottest has 1/1000 of uniform ids, and ln(2) / ln(1001) = 10 % under the continuous law of 1.
    assert shares[0] < 0.005 and shares[1] == pytest.approx(0.10, abs=0.02) and shares[2] > shares[1]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"data__options": {"zipff": 1}}, ["data.options.zipff", "did you mean zipf?", "jagged"]),
        ({"data__source": "sintetic"}, ["data.source", "'sintetic'", "synthetic", "FILE.py:CLASS"]),
        ({"data__source": "/nowhere/data.py:Mine"}, ["data.source", "no file /nowhere/data.py"]),
        ({"data__source": f"{__file__}:Mine"}, ["data.source", "test_ab.py", "no class 'Mine'"]),
    ],
)
def test_a_wrong_source_is_told(changes, parts):
    content = with_changes(**changes)
    with pytest.raises(ConfigError) as told:
        open_source(build(Config, content))
    for part in parts:
        assert part in str(told.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model__bottom": []}, ["model.bottom", "has 2"]),
        ({"model__bottom": [4]}, ["model.interaction", "one 8", "bottom 4", "cat"]),
        ({"data__options": {"dense": 0}}, ["model.bottom", "has none"]),
        (
            {"model__tables": [{**TABLES[0], "sharding": ["row_wise"]}]},
            ["one: sharding row_wise", "on cpu", "table_wise, column_wise"],
        ),
        ({"steps": 5}, ["5 steps", "ab.warmup (2)", "leave 1"]),
        ({"optimizer__name": "ADAM"}, ["optimizer.name", "CPU kernels have no ADAM", "EXACT_SGD"]),
    ],
)
def test_a_wrong_run_is_told(changes, parts):
    config = build(Config, with_changes(compute_kernel="fused", **changes))
    with place() as here, pytest.raises(ConfigError) as told:
        compare(config, here, open_source(config), lambda *_: None)
    for part in parts:
        assert part in str(told.value)


# --- verdict and report -----------------------------------------------------------------------------------------------


def changed(report: dict[str, Any], **values: Any) -> dict[str, Any]:
    report = copy.deepcopy(report)
    report.update(values)
    return report


def test_each_limit_can_fail(fused_report):
    good = changed(fused_report, speed_ratio={"p50": {"value": 1.3, "interval": [1.2, 1.4]}}, memory_ratio=1.0)
    worse = copy.deepcopy(good)
    worse["loss_difference"] = 0.2
    worse["arms"]["B"]["metrics"]["auc"] += 0.1
    for key in ("weight_difference", "state_difference"):
        worse["tables"][1][key] = {"absolute": 1.0, "share": 0.5}
    worse["speed_ratio"]["p50"]["interval"][0] = 0.8
    worse["memory_ratio"] = 1.5
    limits = {
        "loss_difference": 0.1,
        "metric_difference": 0.05,
        "weight_difference": 0.4,
        "state_difference": 0.4,
        "speed_ratio": 1.1,
        "memory_ratio": 1.2,
    }
    for name, limit in limits.items():
        only = Limits(**{name: limit})
        assert reports.judge(good, only)["passed"], name
        verdict = reports.judge(worse, only)
        assert not verdict["passed"] and verdict["line"].startswith("FAIL: ") and name in verdict["line"]
    assert reports.judge(worse, Limits())["passed"]  # no limits


def test_a_number_that_is_none_fails_unasked_and_is_named(fused_report):
    """Also where Python's max would lose it: after a number."""
    nothing = {"absolute": math.nan, "share": math.nan}
    bad = {name: copy.deepcopy(fused_report) for name in ("loss", "auc", "log_loss", "weight", "state", "dense")}
    bad["loss"]["loss_difference"] = math.inf
    for metric in ("auc", "log_loss"):
        bad[metric]["arms"]["B"]["metrics"][metric] = math.nan
    for what in ("weight", "state"):
        bad[what]["tables"][1][f"{what}_difference"] = nothing
    bad["dense"]["dense_difference"] = nothing
    for name, said in (
        ("loss", "loss_difference inf"),
        ("auc", "metric_difference (auc) nan"),
        ("log_loss", "metric_difference (log_loss) nan"),
        ("weight", "weight_difference (table two) nan"),
        ("state", "state_difference (table two) nan"),
        ("dense", "weight_difference (dense layers) nan"),
    ):
        for limits in (Limits(), Limits(loss_difference=1.0, metric_difference=1.0, weight_difference=1.0)):
            verdict = reports.judge(bad[name], limits)
            assert not verdict["passed"] and said in verdict["line"], verdict["line"]


def test_each_ratio_says_which_way_round_it_is(fused_report):
    """Of an arm B that is twice as fast and needs half the memory."""
    report = changed(fused_report, memory_ratio=0.5)
    for p in ("p50", "p90", "p99"):
        report["speed_ratio"][p] = {"value": 2.0, "interval": [1.9, 2.1]}
    for arm, factor in (("A", 2.0), ("B", 1.0)):
        one = report["arms"][arm]
        one |= {"peak_memory_mb": [factor * 100], "examples_per_second": 1000 / factor, "profile": None}
        one["phase_ms"] = dict.fromkeys(one["phase_ms"], factor)
    rows = {row[0]: row[3] for row in reports.figures(report)}
    assert rows["step, ms, P50"] == "A / B 2.000 (1.900 to 2.100)" and rows["forward, ms"] == "A / B 2.000"
    assert rows["examples a second"] == "B / A 2.000" and rows["peak GPU memory, MB"] == "B / A 0.500"
    assert rows["AUC, held out"] == "A - B 0"
    assert not reports.judge(report, Limits(memory_ratio=0.4))["passed"]
    assert reports.judge(report, Limits(memory_ratio=0.6, speed_ratio=1.8))["passed"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_an_infinite_difference(value):
    with place() as here:
        one, two = torch.ones(3, 2), torch.ones(3, 2)
        for ours in (one.clone(), two):  # of B alone, then of both
            two[1, 1] = value
            (found,) = _differences({"w": ours}, {"w": two}, here).values()
            assert not math.isfinite(found["share"])
    assert not math.isfinite(_largest(torch.tensor([0.0, value])))


def test_what_was_not_measured_is_said(fused_report):
    verdict = reports.judge(fused_report, Limits(memory_ratio=1.1))
    assert verdict["passed"] and "not measured here: memory_ratio" in verdict["line"]
    assert verdict["checks"][0]["passed"] is None


def test_a_pass_without_limits_says_that_nothing_was_checked(fused_report):
    verdict = reports.judge(fused_report, Limits())
    assert verdict["passed"] and not verdict["checks"] and "nothing was checked, because ab.limits" in verdict["line"]


def test_an_arm_is_named_by_what_its_tables_ask_for_and_get(fused_report):
    report = changed(fused_report)
    assert [reports.label(report, arm) for arm in "AB"] == ["A (fused)", "B (fused)"]
    report["tables"][1]["B"]["asked"] = "fused_triton"  # by a rule
    report["arms"]["B"]["kernels"] = ["fused", "fused_triton"]
    assert reports.label(report, "B") == "B (fused+fused_triton)"
    for table in report["tables"]:
        table["B"]["asked"] = "auto"
    assert reports.label(report, "B") == "B (auto: fused+fused_triton)"
    assert ">B (auto: fused+fused_triton)</text>" in reports.page(report)
    for table in report["tables"]:
        table["A"]["asked"] = "fused_triton"
    source = reports.page(report)
    assert "A (fused_triton: fused) against B (auto" in source and ">B</text>" in source  # a plot's legend is short
    rows = {row[0]: row[1] for row in reports.figures(report)}
    assert re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", rows["backward, ms"])


class Page(HTMLParser):
    """Balanced tags, no reference to anything outside, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.counts: dict[str, int] = {}
        self.text = ""

    def handle_starttag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.outside += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_reports_are_complete_and_stand_alone(fused_report, tmp_path):
    report = changed(fused_report)
    report["config"]["model"]["tables"][0]["name"] = "<b>"  # text of the user's is text
    report["tables"][0]["name"] = "<b>"
    reports.write(report, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    loaded = json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)
    assert loaded["curves"] == fused_report["curves"] and loaded["config"]["ab"]["limits"]["loss_difference"] == "inf"
    text = (folder / "report.md").read_text()
    page = Page()
    source = (folder / "report.html").read_text()
    page.feed(source)
    assert page.open == [] and page.outside == [] and not re.search(r"url\(|@import|https?://", source)
    assert page.counts["svg"] == 6
    for part in (
        "P99",
        "forward",
        "backward",
        "collectives",
        "examples a second",
        "AUC",
        "<b>",
        "two",
        "three",
        "fused",
    ):
        assert part in text and part in page.text, part
    assert report["verdict"]["line"] in text and report["verdict"]["line"] in page.text
    assert "nan" not in source.replace("nanosecond", "").lower()


# --- command ----------------------------------------------------------------------------------------------------------


def command(tmp_path: Path, content: dict[str, Any], mode: str = "ab") -> subprocess.CompletedProcess[str]:
    """A process without a launcher."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in launched}
    return subprocess.run(
        [sys.executable, "-m", "torchrec_triton.cli", mode, "--config", str(path), "--output", str(tmp_path / "out")],
        env={
            **clean,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_INTERPRET": "0",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )


def test_training_needs_no_launcher(tmp_path):
    done = command(tmp_path, with_changes(), "train")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out" / "report.json").read_text())["world_size"] == 1


def test_the_command_passes_and_fails(tmp_path, capsys):
    done = command(tmp_path, with_changes(steps=30))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2].startswith("PASS: ") and "profiler_start" not in done.stdout + done.stderr
    assert "table one: fused (FBGEMM), not fused_triton: device_type=cpu" in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    assert "FBGEMM's CPU kernels" in (tmp_path / "out" / "report.html").read_text().replace("&#x27;", "'")
    strict = with_changes(compute_kernel="fused", ab__limits={"speed_ratio": 50})
    (tmp_path / "strict.yaml").write_text(yaml.safe_dump(strict))
    assert run("ab", str(tmp_path / "strict.yaml"), tmp_path / "strict") == 1
    assert "FAIL: speed_ratio" in capsys.readouterr().out and (tmp_path / "strict" / "report.html").exists()


@pytest.mark.parametrize(
    ("changes", "world_size", "environment", "parts"),
    [
        ({"stepz": 1}, 0, {}, ["stepz", "did you mean steps?"]),
        ({"compute_kernel": "fused_triton"}, 0, {"TRITON_INTERPRET": "0"}, ["table one", "device_type=cpu"]),
        ({}, 2, {}, ["2 processes were asked for", "started 1"]),
        ({}, 0, {"RANK": "0", "WORLD_SIZE": "2"}, ["RANK is set", "LOCAL_RANK, MASTER_ADDR", "torchrun"]),
    ],
)
def test_a_wrong_start_is_told(tmp_path, monkeypatch, capsys, changes, world_size, environment, parts):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(with_changes(**changes)))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run("ab", str(path), tmp_path / "out", world_size) == 2
    told = capsys.readouterr().err
    for part in parts:
        assert part in told, told
    assert not (tmp_path / "out" / "report.json").exists()


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, on_host: int, world_size: int, gpus: int) -> None:
    """As torchrun starts a process of the first host, which has so many GPUs."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": on_host}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    for name, value in {"is_available": bool(gpus), "device_count": gpus, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.parametrize(
    ("local_rank", "on_host", "share", "told"),
    [
        (2, 4, False, "LOCAL_RANK 2 has no GPU of its own: this host has 2; start fewer processes, or let them share"),
        (0, 3, True, "--share-gpus: 3 processes on 2 GPUs; start as many on each, a multiple of 2"),
    ],
)
def test_processes_without_a_gpu_are_told(monkeypatch, local_rank, on_host, share, told):
    launched(monkeypatch, local_rank, on_host, 4, gpus=2)
    with pytest.raises(LaunchError, match=re.escape(told)), place(4, share):
        pass


@pytest.mark.parametrize(
    ("gpus", "on_host", "local_rank", "share", "found"),
    [
        (2, 4, 3, True, ("gloo", 1, 2, 2)),
        (1, 2, 1, True, ("gloo", 0, 1, 2)),
        (2, 2, 1, True, ("nccl", 1, 2, 1)),  # there is nothing to share
        (2, 2, 1, False, ("nccl", 1, 2, 1)),
        (0, 2, 1, True, ("gloo", None, 2, 1)),
    ],
)
def test_ranks_that_share_gpus_count_as_hosts(monkeypatch, gpus, on_host, local_rank, share, found):
    """(backend, GPU, ranks to a host as TorchRec sees it too, ranks a GPU)."""
    launched(monkeypatch, local_rank, on_host, on_host, gpus)
    monkeypatch.setattr(arm_module, "_multiply_once", lambda device: None)
    group: dict[str, Any] = {"is_initialized": False, "get_rank": local_rank, "get_world_size": on_host}
    for name, value in {**group, "destroy_process_group": None}.items():
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    backends: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: backends.append(backend))
    with place(on_host, share) as here:
        counted = int(os.environ["LOCAL_WORLD_SIZE"])
        assert (backends[0], here.device.index, here.local_world_size, here.ranks_a_gpu) == found
        assert counted == here.local_world_size
    assert os.environ["LOCAL_WORLD_SIZE"] == str(on_host)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    if share:
        with pytest.raises(LaunchError, match="LOCAL_WORLD_SIZE not"), place(on_host, share):
            pass
    else:
        with place(on_host):
            pass
    assert "LOCAL_WORLD_SIZE" not in os.environ


def test_a_plan_for_other_gpus_is_told(tmp_path):
    """Ranks that share a GPU have other numbers of GPUs than the plan of a host with one for each."""
    path, config = tmp_path / "run.yaml", with_changes(compute_kernel="fused")
    path.write_text(yaml.safe_dump(config))
    for local_size in (2, 1):
        sizes = ["--world-size", "2", "--local-world-size", str(local_size)]
        assert main(["plan", "--config", str(path), *sizes, "--output", str(tmp_path / f"{local_size}")]) == 0
    here = Place(torch.device("cuda", 0), rank=1, world_size=2, local_world_size=1, ranks_a_gpu=2)
    assert _plan(tmp_path / "1", build(Config, config), here).plan["embeddings"]
    with pytest.raises(ConfigError, match=r"lies on rank 1 and GPU 1 in the plan, and rank 1 has GPU 0 here"):
        _plan(tmp_path / "2", build(Config, config), here)


WRONG_SOURCES = """
from torchrec_triton.ab.sources import Synthetic

class Nothing(Synthetic):
    def evaluation(self, rank, world_size):
        return iter(())

class Fails(Synthetic):
    def training(self, rank, world_size):
        raise OSError("the disk is full")
        yield
"""


@pytest.mark.parametrize("mode", ["train", "ab"])
def test_what_would_cost_a_run_is_told_before_it(tmp_path, monkeypatch, capsys, mode):
    monkeypatch.setattr(Arm, "advance", lambda *_: pytest.fail("it trains"))
    (tmp_path / "wrong.py").write_text(WRONG_SOURCES)
    path, file = tmp_path / "run.yaml", tmp_path / "file"
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused")))
    file.write_text("")
    for output in (file, file / "below"):
        assert run(mode, str(path), output) == 2
        assert f"--output {output}: cannot make this folder" in capsys.readouterr().err
    assert run(mode, str(path), tmp_path / "out", 0, None, file) == 2
    assert f"--checkpoint {file}: cannot make" in capsys.readouterr().err
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused", data__source="wrong.py:Nothing")))
    assert run(mode, str(path), tmp_path / "out") == 2
    assert "data.source: evaluation batch 0 has [0] samples on ranks 0 and up" in capsys.readouterr().err


def test_a_crash_is_no_verdict(tmp_path, capsys):
    (tmp_path / "wrong.py").write_text(WRONG_SOURCES)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused", data__source="wrong.py:Fails")))
    assert main(["ab", "--config", str(path), "--output", str(tmp_path / "out")]) == 3
    told = capsys.readouterr().err
    assert "Traceback" in told and "OSError: the disk is full" in told


def uneven(counts: list[int], sizes: list[int]) -> str:
    rank = dist.get_rank()
    batches = (Batch(torch.zeros(sizes[rank], 1), None, torch.zeros(sizes[rank])) for _ in range(counts[rank]))
    try:
        return str(len(list(in_step(batches))))
    except ConfigError as error:
        return str(error)


def test_ranks_with_other_batches_to_evaluate_are_told():
    assert ranks(2).run(uneven, [2, 2], [4, 4]) == ["2", "2"]
    for counts, sizes, words in (([2, 1], [4, 4], "batch 1 has [4, 0]"), ([1, 1], [4, 3], "batch 0 has [4, 3]")):
        for told in ranks(2).run(uneven, counts, sizes):
            assert words in told


def is_there_at_the_end(path: str, output: str) -> tuple[int, bool]:
    """Of a rank: the exit status, and whether the page had been written by then. Rank 0 takes long to write it."""
    write = reports.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "write", lambda *args: (time.sleep(2), write(*args)))
        return run("ab", path, Path(output)), (Path(output) / "report.html").exists()


def test_no_rank_ends_before_the_report_of_a_failure_is_there(tmp_path):
    """A launcher kills the other ranks when one ends with 1."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused", ab__limits={"speed_ratio": 1000})))
    assert ranks(2).run(is_there_at_the_end, str(path), str(tmp_path / "out")) == [(1, True)] * 2


def test_time_that_spans_cover_counts_once():
    assert _covered([]) == 0
    assert _covered([(5, 6), (0, 2), (1, 3), (1, 2), (3, 4)]) == 5


UNEVEN_SOURCE = """
from itertools import islice

from torchrec_triton.ab.sources import Synthetic

class Uneven(Synthetic):
    def evaluation(self, rank, world_size):
        return islice(super().evaluation(rank, world_size), 2 - rank)
"""


def told_before_training(mode: str, path: str, output: str) -> tuple[int, str]:
    """Of a rank: the exit status and what was told."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(told):
        patch.setattr(Arm, "advance", lambda *_: pytest.fail("it trains"))
        return run(mode, path, Path(output)), told.getvalue()


@pytest.mark.parametrize("mode", ["train", "ab"])
def test_a_rank_with_fewer_batches_to_evaluate_is_told_before_training(tmp_path, mode):
    (tmp_path / "uneven.py").write_text(UNEVEN_SOURCE)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused", data__source=f"{tmp_path}/uneven.py:Uneven")))
    for status, told in ranks(2).run(told_before_training, mode, str(path), str(tmp_path / "out")):
        assert status == 2 and "evaluation batch 1 has [8, 0] samples on ranks 0 and up" in told


def test_a_checkpoint_of_one_kernel_starts_the_other(tmp_path):
    config = build(Config, with_changes(compute_kernel="fused"))
    with place() as here:
        fused = Arm(config, here, 2, dict.fromkeys(config.kernels(), "fused"))
        batches = Feed(open_source(config).training(0, 1), 5, pin=False).reader()
        fused.advance(batches, 5)
        fused.save(tmp_path / "saved")
        triton = Arm(config, here, 2, dict.fromkeys(config.kernels(), "fused_triton"))
        assert max(d["share"] for d in _differences(fused.model.state_dict(), triton.model.state_dict(), here).values())
        triton.load(tmp_path / "saved")
        weights = _differences(fused.model.state_dict(), triton.model.state_dict(), here)
        state = _differences(fused.table_state(), triton.table_state(), here)
    assert {d["absolute"] for d in (*weights.values(), *state.values())} == {0.0}


def saved_or_loaded(content: dict[str, Any], folder: str, shardings: str, load: bool) -> dict[str, Any]:
    """A rank's shards of weights and state: after three steps that are then saved, or as loaded."""
    config = build(Config, content)
    with place() as here:
        arm = Arm(config, here, 2, config.kernels(), placed(config, shardings))
        if load:
            arm.load(Path(folder))
        else:
            source = open_source(config)
            arm.advance(source.training(here.rank, here.world_size), 3)
            arm.save(Path(folder))
        return {
            name: [(shard.clone(), at) for shard, at in shards]
            for name, shards in {**arm.weights(), **arm.row_state()}.items()
            if "momentum" in name or "embedding_bags" in name
        }


def test_a_checkpoint_of_two_ranks_starts_four(tmp_path):
    def whole(of_ranks: list[dict[str, Any]], name: str) -> dict[tuple[int, int], float]:
        shards = (shard for rank in of_ranks for shard in rank.get(name, []))
        return {
            (row + i, column + j): value
            for shard, (row, column) in shards
            for i, values in enumerate(shard.reshape(len(shard), -1).tolist())
            for j, value in enumerate(values)
        }

    folder = str(tmp_path / "saved")
    two = ranks(2).run(saved_or_loaded, with_changes(compute_kernel="fused"), folder, "rw tw1 rw", False)
    four = ranks(4).run(saved_or_loaded, with_changes(compute_kernel="fused_triton"), folder, "rw rw tw1", True)
    names = {name for rank in two for name in rank}
    assert len(names) == 6
    for name in names:
        saved = whole(two, name)
        assert saved == whole(four, name) and len(saved) >= 7 and any(saved.values()), name


def test_training_by_a_plan_on_file_and_from_a_checkpoint(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused")))
    plans = {ranks: tmp_path / f"plan{ranks}.json" for ranks in (1, 4)}
    for size, plan in plans.items():
        options = ["--topology", "cpu", "--world-size", str(size), "--output", str(plan)]
        assert main(["plan", "--config", str(path), *options]) == 0
    saved = tmp_path / "saved"
    assert run("train", str(path), tmp_path / "one", 0, plans[1], saved) == 0
    assert run("train", str(path), tmp_path / "two", 0, plans[1], None, saved) == 0
    losses = [json.loads((tmp_path / name / "report.json").read_text())["losses"] for name in ("one", "two")]
    assert len(losses[0]) == 12 and losses[1] != losses[0]
    capsys.readouterr()
    assert run("train", str(path), tmp_path / "three", 0, plans[4]) == 2
    assert "this run has 1 cpu rank(s)" in capsys.readouterr().err
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused", model__tables=TABLES[:2])))
    assert run("train", str(path), tmp_path / "three", 0, plans[1]) == 2
    assert "the configuration has no table three, and the plan has" in capsys.readouterr().err
    larger = [{**TABLES[0], "rows": 51}, *TABLES[1:]]
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused", model__tables=larger)))
    assert run("train", str(path), tmp_path / "three", 0, plans[1]) == 2
    assert "table one is [50, 8] in the plan, and [51, 8] (rows, dim)" in capsys.readouterr().err
    assert run("train", str(path), tmp_path / "three", 0, None, None, tmp_path) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused", ab__plan="replan")))
    assert run("ab", str(path), tmp_path / "three", 0, plans[1]) == 2
    assert "ab.plan: replan makes a plan for each arm" in capsys.readouterr().err
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="auto")))
    text = plans[1].read_text()
    for old, new, words in (
        ('"embeddings"', '"ebc"', "of the module(s) ebc"),
        ('"fused"', '"quant"', "table one has quant in the plan, which never trains"),
    ):
        plans[1].write_text(text.replace(old, new))
        assert run("train", str(path), tmp_path / "three", 0, plans[1]) == 2
        assert words in capsys.readouterr().err


def trained(content: dict[str, Any], folder: Path, *more: Any) -> list[float]:
    """The losses."""
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    assert run("train", str(folder / "run.yaml"), folder / "out", 0, *more) == 0
    return json.loads((folder / "out" / "report.json").read_text())["losses"]


def test_a_run_goes_on_where_it_ended(tmp_path):
    """Batches, dense optimizer and all: in two parts as in one."""
    whole = trained(with_changes(compute_kernel="fused", steps=12), tmp_path)
    saved = tmp_path / "saved"
    first = trained(with_changes(compute_kernel="fused", steps=5), tmp_path, None, saved)
    rest = trained(with_changes(compute_kernel="fused", steps=4), tmp_path, None, saved, saved)
    rest += trained(with_changes(compute_kernel="fused", steps=3), tmp_path, None, None, saved)
    assert first + rest == whole


def test_a_checkpoint_of_something_else_is_told(tmp_path, capsys):
    saved, path = tmp_path / "saved", tmp_path / "run.yaml"
    trained(with_changes(compute_kernel="fused", steps=2), tmp_path, None, saved)
    for changes, words in (
        ({"model__tables": [TABLES[0], {**TABLES[1], "rows": 9}, TABLES[2]]}, "two.weight is [7, 8] in it, and [9, 8]"),
        (
            {"model__tables": [TABLES[0], TABLES[1], {**TABLES[2], "name": "four"}]},
            "no model.embeddings.embedding_bags.f",
        ),
        ({"model__hidden": [4]}, "is [8] in it, and [4] here"),
        ({"optimizer__name": "EXACT_ADAGRAD"}, "one.momentum1 is [50] in it, and [50, 8] here"),
        ({"optimizer__name": "EXACT_SGD"}, "one.momentum1, and the configuration has not"),
    ):
        capsys.readouterr()
        path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused", **changes)))
        assert run("train", str(path), tmp_path / "out", 0, None, None, saved) == 2
        told = capsys.readouterr().err
        assert f"{saved}: " in told and words in told, told


def test_the_demos_comparison_is_of_the_demos_run():
    one, two = (load_config(ROOT / "configs" / name) for name in ("demo.yaml", "ab_demo.yaml"))
    assert (one.model, one.data, one.optimizer, one.steps, one.seed) == (
        two.model,
        two.data,
        two.optimizer,
        two.steps,
        two.seed,
    )


def test_an_unsupported_table_is_refused_before_training():
    config = build(Config, with_changes(compute_kernel="fused_triton", fused_params={"max_norm": 1.0}))
    with place() as here, pytest.raises(UnsupportedTableError, match="table one: max_norm"):
        compare(config, here, open_source(config), lambda *_: None)


# --- on GPUs ----------------------------------------------------------------------------------------------------------


def check_gpu_report(report: dict[str, Any]) -> None:
    assert {table["B"]["kernel"] for table in report["tables"]} == {"fused_triton"}
    assert report["initial_difference"] == 0 and 0 <= report["loss_difference"] < 1e-3
    for arm in report["arms"].values():
        assert min(arm["phase_ms"].values()) > 0 and min(arm["peak_memory_mb"]) > 0
        assert arm["profile"]["gpu_ms"] > 0
    # The tables are all but nothing here, and the rest of both arms is the same.
    peaks = [max(report["arms"][arm]["peak_memory_mb"]) for arm in "AB"]
    assert peaks[1] < 2 * peaks[0] and peaks[0] < 2 * peaks[1]


@pytest.mark.gpu
def test_one_gpu(monkeypatch):
    """No step waits for a kernel to be compiled."""
    counts, advance = [], Arm.advance

    def noted(*args: Any) -> None:
        counts.append(compiled_kernels())
        advance(*args)

    monkeypatch.setattr(Arm, "advance", noted)
    check_gpu_report(compared(with_changes(compute_kernel="fused_triton", steps=40)))
    assert counts[0] > 0 and set(counts) == {counts[0]} and compiled_kernels() == counts[0]


def with_this_package() -> dict[str, str]:
    """The environment for a process of its own, on a machine whose packages may be on the path only."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


ALLOCATED_ONCE = """
import torch
from torchrec_triton.ab.arm import place

with place() as here:
    before = here.allocated()
    torch.cuda.reset_peak_memory_stats()
    layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)).to(here.device)
    hidden = layers(torch.rand(128, 64, device=here.device)).reshape(8, 16, 16)
    (hidden @ hidden).sum().backward()
    here.finish()
    assert torch.cuda.max_memory_allocated() - before < 1e6, torch.cuda.memory_summary()
"""


@pytest.mark.gpu
def test_what_a_process_keeps_for_matrix_products_is_no_arms():
    """In a process of its own, where nothing was multiplied before."""
    command = [sys.executable, "-c", ALLOCATED_ONCE]
    done = subprocess.run(command, env=with_this_package(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_memory_of_an_arm_is_its_own():
    """Two arms alike need alike, and each no less than its table."""
    tables = [{"name": "large", "rows": 100_000, "dim": 64}]
    report = compared(with_changes(model__tables=tables, compute_kernel="fused", model__interaction="cat"))
    peaks = [report["arms"][arm]["peak_memory_mb"][0] for arm in "AB"]
    assert min(peaks) > 100_000 * 65 * 4 / 1e6 and max(peaks) < 1.1 * min(peaks)


@pytest.mark.gpu
def test_two_ranks_on_gpus():
    mine, other = ranks(2, "cuda").run(compared, with_changes(compute_kernel="fused_triton", steps=40))
    check_gpu_report(mine)
    assert mine["curves"]["loss"] == other["curves"]["loss"] and mine["arms"]["A"]["profile"]["collective_ms"] > 0


@pytest.mark.gpu
def test_more_processes_than_gpus_share_them_if_asked(tmp_path):
    """And not by accident, where each would need one of its own."""
    path, processes = tmp_path / "run.yaml", 2 * torch.cuda.device_count()
    path.write_text(yaml.safe_dump(with_changes(compute_kernel="fused_triton", steps=40)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["-m", "torchrec_triton.cli", "ab", "--config", str(path), "--output", str(tmp_path / "out")]
    environment = with_this_package()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "has no GPU of its own" in done.stderr and "--share-gpus" in done.stderr
    done = subprocess.run([*command, "--share-gpus"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    check_gpu_report(report)
    assert report["world_size"] == processes and report["arms"]["B"]["profile"]["collective_ms"] > 0
    assert any("2 ranks shared each GPU" in note for note in report["notes"])
