"""The examples run, and the pages that show them show what they are."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchrec_triton.ab.arm import place
from torchrec_triton.ab.compare import compare
from torchrec_triton.ab.sources import open_source
from torchrec_triton.bench.workloads import CLI32, CMF_EBC
from torchrec_triton.config import Config, ConfigError, build, load_config

ROOT = Path(__file__).parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()


def example(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{Path(path).stem}", ROOT / "examples" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script as a reader would run it: with the commands of this Python first on PATH."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TRITON_INTERPRET")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    (folder / "bin").mkdir(exist_ok=True)
    command = folder / "bin" / "torchrec-triton"  # may not be installed
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m torchrec_triton.cli "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    clean |= {"PATH": path, "PYTHONPATH": str(ROOT), "REPOSITORY": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    clean["OMP_NUM_THREADS"] = "1"  # other tests run beside it
    return subprocess.run(["bash", "-euc", script], env=clean, cwd=folder, capture_output=True, text=True, timeout=300)


def test_the_tutorial_runs(tmp_path):
    done = shell("\n".join(re.findall(r"^```bash\n(.*?)^```", TUTORIAL, re.M | re.S)), tmp_path)
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert len(re.findall("^PASS: ", shown, re.M)) == 2 and "FAIL: speed_ratio" in shown  # one has a rank's prefix
    assert "exit status 1" in shown and "report.html" in shown and "--nproc_per_node 2" in shown
    assert (tmp_path / "two" / "report.html").exists()


def test_the_tutorial_shows_the_difference():
    stock, ours = (
        (ROOT / "examples" / "quickstart" / name).read_text().splitlines()[1:]
        for name in ("stock.py", "triton_kernel.py")
    )
    lines = list(difflib.unified_diff(stock, ours, "stock.py", "triton_kernel.py", n=1, lineterm=""))
    assert "\n".join(line.rstrip() for line in lines) in TUTORIAL
    changed = [line for line in lines[2:] if line[:1] in "+-" and line[1:].strip()]
    assert len(changed) <= 10


def test_the_quickstart_trains_alike(capsys):
    """In the interpreter the second script's tables run on Triton."""
    losses = {}
    for name in ("stock", "triton_kernel"):
        example(f"quickstart/{name}.py").main()
        shown = capsys.readouterr().out.splitlines()
        losses[name] = [float(line.rpartition(" ")[2]) for line in shown if "loss" in line]
    assert len(losses["stock"]) == 20 and losses["stock"][-1] < 0.5 * losses["stock"][0]
    assert losses["triton_kernel"] == pytest.approx(losses["stock"], abs=2e-4)  # four digits are printed


@pytest.fixture
def criteo_config(tmp_path):
    """The shipped configuration, small: 100 rows a table at most, two days of 600 samples."""
    example("criteo.py").generate(tmp_path, days=2, samples=600)
    content = yaml.safe_load((ROOT / "configs" / "ab_criteo.yaml").read_text())
    for table in content["model"]["tables"]:
        table |= {"rows": min(100, table["rows"]), "dim": 8}
    content["model"] |= {"bottom": [8], "hidden": [16]}
    content["data"]["source"] = f"{ROOT}/examples/criteo.py:Criteo"
    content["data"]["batch_size"] = 50
    content["data"]["options"] = {"folder": str(tmp_path)}
    content["model"]["dense_learning_rate"] = content["optimizer"]["learning_rate"] = 0.05
    content |= {"compute_kernel": "fused", "steps": 60}
    content["ab"]["warmup"] = 5
    return build(Config, content)


def test_dlrm_trains_on_criteos_format(criteo_config):
    with place() as here:
        report = compare(criteo_config, here, open_source(criteo_config), lambda *_: None)
    losses = report["curves"]["loss"]["B"]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5]) and report["loss_difference"] == 0
    assert report["arms"]["B"]["metrics"]["samples"] == 300  # the first half of the held-out day


def test_criteo_batches_are_shared_among_ranks(criteo_config):
    source = open_source(criteo_config)
    first, second = (next(source.training(rank, 2)) for rank in range(2))
    again = next(source.training(0, 2))
    assert first.labels.shape == (50,) and first.dense_features.shape == (50, 13)
    assert not first.dense_features.equal(second.dense_features) and first.dense_features.equal(again.dense_features)
    values = first.sparse_features.values().reshape(26, 50)
    rows = [table.rows for table in criteo_config.model.tables]
    assert all(values[i].max() < rows[i] for i in range(26))


def test_a_missing_day_and_too_few_samples_are_told(criteo_config):
    def with_data(**changes):
        return dataclasses.replace(criteo_config, data=dataclasses.replace(criteo_config.data, **changes))

    options = criteo_config.data.options
    with pytest.raises(ConfigError, match=r"no .*day_7_dense"):
        open_source(with_data(options={**options, "training_days": [7]}))
    with pytest.raises(ConfigError, match="train has no 500 samples for each of 2 ranks"):
        next(open_source(with_data(batch_size=500)).training(0, 2))


def test_the_shipped_configurations_of_comparisons_have_the_tables_they_name():
    for name in ("dlrm26", "criteo"):
        assert len(load_config(ROOT / "configs" / f"ab_{name}.yaml").model.tables) == 26
    prod66 = load_config(ROOT / "configs" / "ab_prod66.yaml").model.tables
    assert len(prod66) == 66 and sum(table.pooling_factor for table in prod66) == 1015
    for name, workload in (("cmf_ebc", CMF_EBC), ("cli32", CLI32)):
        tables = load_config(ROOT / "configs" / f"ab_{name}.yaml").model.tables
        assert [(t.rows, t.dim, t.pooling_factor) for t in tables] == list(
            zip(workload.rows, workload.dims, workload.pooling, strict=True)
        )
