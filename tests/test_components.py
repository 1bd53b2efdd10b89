"""TorchX components: what they launch, and jobs of two processes on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_ab import with_changes

pytest.importorskip("torchx", reason="a GPU host may carry the GPU tests only")

from torchx.components import dist
from torchx.runner import get_runner
from torchx.specs.finder import get_component

ROOT = Path(__file__).parents[1]
FILE = ROOT / "torchrec_triton" / "components.py"


def launched(name: str, *arguments: str, **keywords: object) -> str:
    """The command line of the job's one role."""
    (role,) = get_component(f"{FILE}:{name}").fn(*arguments, **keywords).roles
    return role.args[-1]


@pytest.mark.parametrize("name", ["train", "ab"])
def test_a_component_starts_its_command_with_torchrun(name):
    line = launched(name, "--config", "c.yaml", "--output", "out", j="2x4")
    assert line.startswith("torchrun ") and "--nnodes 2 " in line and "--nproc_per_node 4 " in line
    assert line.endswith(f"-m torchrec_triton.cli {name} --config c.yaml --output out --world-size 8")
    # Who gives the number has the last word: then a .torchxconfig that overrides -j is noticed.
    assert launched(name, "--world-size", "2", j="1x4").endswith(f"{name} --world-size 2")
    assert launched(name, "--world-size=2", j="1x4").endswith(f"{name} --world-size=2")


@pytest.mark.parametrize("name", ["torchrun", "ddp"])
def test_the_job_is_the_same_under_either_name_of_torchxs_component(monkeypatch, name):
    """TorchX 0.7 has `ddp`; later ones call it `torchrun`, where a bare number after -j may mean hosts."""
    stock = getattr(dist, "torchrun", None) or dist.ddp
    for other in ("torchrun", "ddp"):
        monkeypatch.delattr(dist, other, raising=False)
    monkeypatch.setattr(dist, name, stock, raising=False)
    line = shlex.split(launched("ab", "--config", "c.yaml", j="1x2"))
    options = {option: line[line.index(option) + 1] for option in ("--nnodes", "--nproc_per_node", "--rdzv_endpoint")}
    # Port 0 is any free one, so that two jobs on a host don't meet.
    assert options == {"--nnodes": "1", "--nproc_per_node": "2", "--rdzv_endpoint": "localhost:0"}
    assert line[line.index("-m") :] == ["-m", "torchrec_triton.cli", "ab", "--config", "c.yaml", "--world-size", "2"]


def test_every_recipe_says_how_many_hosts():
    recipes = [FILE, ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    commands = [line for path in recipes for line in re.findall(r"torchx run .*", path.read_text())]
    assert len(commands) >= 3 and all(re.search(r" -j [1-9]\d*x[1-9]\d* ", line + " ") for line in commands)


def test_resources_and_environment():
    component = get_component(f"{FILE}:ab")
    (role,) = component.fn(j="1x4", env={"TRITON_INTERPRET": "1"}, image="registry/image:1").roles
    assert (role.resource.gpu, role.num_replicas, role.image) == (4, 1, "registry/image:1")
    assert role.env["TRITON_INTERPRET"] == "1"
    (role,) = component.fn(j="2x4", gpu=0).roles
    assert (role.resource.gpu, role.num_replicas) == (0, 2)


@pytest.mark.parametrize("j", ["2", "0x2", "x2", "1:2x4", "2x"])
def test_a_shape_that_could_be_read_in_two_ways_is_refused(j):
    with pytest.raises(ValueError, match=f"-j {j}: .* 1x2"):
        launched("ab", j=j)


@pytest.mark.parametrize("scheduler", ["local_cwd", "slurm", "lsf"])
def test_schedulers_take_the_job(scheduler):
    with get_runner("test") as runner:
        job = runner.dryrun_component(f"{FILE}:ab", ["-j", "1x2", "--", "--config", "c.yaml"], scheduler, {})
    assert "torchrec_triton.cli" in str(job) and "--nproc_per_node 2" in str(job)


def started(
    tmp_path: Path,
    name: str,
    content: dict,
    output: Path,
    *more: str,
    keep_logs: bool = True,
    j: tuple[str, ...] = ("-j", "1x2"),
) -> subprocess.Popen[str]:
    """A job of two processes; torchrun has to be on PATH."""
    config = tmp_path / f"{output.name}.yaml"
    config.write_text(yaml.safe_dump(content))
    bin_folder = str(Path(sys.executable).parent)
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    logs = ["-cfg", f"log_dir={tmp_path / 'logs'}"] if keep_logs else []
    command = ["torchx", "run", "-s", "local_cwd", *logs, f"{FILE}:{name}", *j, "--gpu", "0"]
    command += ["--", "--config", str(config), "--output", str(output), *more]
    environment["CUDA_VISIBLE_DEVICES"] = ""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)


def finished(job: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    stdout, stderr = job.communicate(timeout=200)
    return subprocess.CompletedProcess(job.args, job.returncode, stdout, stderr)


def torchx(*args: Any, **keywords: Any) -> subprocess.CompletedProcess[str]:
    return finished(started(*args, **keywords))


def test_two_processes_compare_and_rank_0_reports(tmp_path):
    done = torchx(tmp_path, "ab", with_changes(compute_kernel="fused", steps=30), tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["world_size"] == 2 and report["verdict"]["passed"]
    assert (done.stdout + done.stderr).count("PASS: ") == 1


def test_two_jobs_at_the_same_time_do_not_meet(tmp_path):
    """Each takes ports of its own."""
    content = with_changes(compute_kernel="fused")
    jobs = [started(tmp_path, name, content, tmp_path / name, keep_logs=False) for name in ("train", "ab")]
    for job in jobs:
        done = finished(job)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("train", "ab"):
        assert json.loads((tmp_path / name / "report.json").read_text())["world_size"] == 2


def test_results_do_not_depend_on_logs_or_another_components_settings(tmp_path):
    (tmp_path / ".torchxconfig").write_text("[component:dist.ddp]\nj = 1x8\n")
    done = torchx(tmp_path, "train", with_changes(compute_kernel="fused"), tmp_path / "out", keep_logs=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out" / "report.json").read_text())["world_size"] == 2
    assert not (tmp_path / "logs").exists()


def test_a_number_of_processes_that_a_torchxconfig_changed_is_told(tmp_path):
    (tmp_path / ".torchxconfig").write_text(f"[component:{FILE}:train]\nj = 1x1\n")
    content = with_changes(compute_kernel="fused")
    done = torchx(tmp_path, "train", content, tmp_path / "out", "--world-size", "2", j=())
    assert done.returncode != 0
    assert "2 processes were asked for, the launcher started 1" in done.stdout + done.stderr
    assert not (tmp_path / "out").exists()


FAILING = """
    import os

    from torchrec_triton.ab.sources import Synthetic


    class Failing(Synthetic):
        def training(self, rank, world_size):
            for number, batch in enumerate(super().training(rank, world_size)):
                if rank == 1 and number == 5:
                    END
                yield batch
"""


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ('raise OSError("the disk of rank 1 is full")', ["OSError: the disk of rank 1 is full", "in training"]),
        ("os.kill(os.getpid(), 9)", ["rank      : 1", "Signal 9 (SIGKILL)"]),
    ],
    ids=["raises", "is killed"],
)
def test_a_failing_rank_fails_the_job_and_is_told(tmp_path, end, words):
    (tmp_path / "failing.py").write_text(textwrap.dedent(FAILING.replace("END", end)))
    content = with_changes(compute_kernel="fused", data__source="failing.py:Failing")
    done = torchx(tmp_path, "train", content, tmp_path / "out")
    shown = done.stdout + done.stderr
    assert done.returncode != 0
    for word in words:
        assert word in shown, shown
    assert not (tmp_path / "out" / "report.json").exists()
