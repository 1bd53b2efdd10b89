"""The command line: what `doctor` and `explain` say on machines that are complete and on ones that are not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torchrec_triton
from torchrec_triton import _compat, cli, doctor

ROOT = Path(__file__).parents[1]
TABLES = """
model:
  interaction: cat
  tables: [{name: user, rows: 10, dim: 8}, {name: item, rows: 20, dim: 4, data_type: FP16}]
"""


def run(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, after the statements `before`."""
    code = f"import sys\n{textwrap.dedent(before)}\nfrom torchrec_triton.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "_gpus", lambda: [])


# --- doctor --------------------------------------------------------------------------------------------------------


def test_doctor_on_this_machine_names_every_version_and_finds_nothing_broken():
    done = run("doctor", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    for package in _compat.PACKAGES:
        assert _compat.installed_version(package) in done.stdout
    assert "correct" in done.stdout
    assert "Everything that is needed works." in done.stdout


@pytest.mark.parametrize(
    ("package", "advice"),
    [("fbgemm_gpu", "pip install 'fbgemm-gpu"), ("torchrec", "pip install"), ("triton", "triton cannot be imported")],
)
def test_doctor_works_without_a_package_and_says_what_to_do(package, advice):
    done = run("doctor", before=f"sys.modules[{package!r}] = None")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "problem: " in done.stdout and package in done.stdout and advice in done.stdout
    assert _compat.installed_version("torch") in done.stdout
    assert "not tried" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_doctor_says_which_pair_is_wrong_when_fbgemm_cannot_be_loaded(monkeypatch, no_gpu):
    versions = {"fbgemm_gpu": "1.7.0", "torch": "2.13.0", "torchrec": "1.8.0"}
    monkeypatch.setattr(_compat, "installed_version", lambda package: versions.get(package, "3.9.0"))
    monkeypatch.setattr(torch, "__version__", "2.13.0")

    def cannot_load():
        raise ImportError("outer") from OSError("libfbgemm.so: undefined symbol: _ZN3c10\nand three pages more")

    monkeypatch.setattr(_compat, "fbgemm_tbe", cannot_load)
    report = doctor.examine()
    (problem,) = report.problems
    assert problem.startswith("fbgemm_gpu 1.7.0 was released for torch 2.12, installed is torch 2.13.0: OSError")
    assert "undefined symbol: _ZN3c10" in problem and "three pages" not in problem
    assert "pip install 'fbgemm-gpu-cpu==1.8.*'" in problem


def test_doctor_names_a_missing_operator(monkeypatch, no_gpu):
    present = {name: object() for name in doctor.REQUIRED_OPERATORS if name != "jagged_2d_to_dense"}
    monkeypatch.setattr(torch.ops, "fbgemm", SimpleNamespace(**present))
    report = doctor.Report()
    doctor._fbgemm(report, torch, gpu=False)
    assert "torch.ops.fbgemm.jagged_2d_to_dense" in report.problems[0]
    assert _compat.installed_version("fbgemm_gpu") in report.problems[0]


def test_a_pair_of_releases_that_works_all_the_same_is_a_note(monkeypatch, no_gpu):
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    report = doctor.Report()
    doctor._fbgemm(report, torch, gpu=False)
    assert not report.problems
    assert "torch 2.99.1" in report.notes[0] and "are there" in report.notes[0]


def test_two_builds_of_fbgemm_overwrite_each_other(monkeypatch, no_gpu):
    monkeypatch.setattr(doctor, "_has_distribution", lambda name: True)
    report = doctor.Report()
    doctor._fbgemm(report, torch, gpu=False)
    assert "fbgemm-gpu and fbgemm-gpu-cpu are both installed" in report.problems[0]


def test_a_gpu_beside_a_cpu_build_of_torch_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    report = doctor.Report()
    doctor._torch(report, [("NVIDIA Test", "1.0", "9.0")])
    assert "is a CPU build" in report.problems[0]
    assert ("GPU", "NVIDIA Test (driver 1.0, 9.0)") in report.facts


def test_a_driver_that_torch_cannot_use_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    report = doctor.Report()
    doctor._torch(report, [("NVIDIA Test", "535.1", "9.0")])
    assert "CUDA 13.0" in report.problems[0] and "535.1" in report.problems[0] and "now 7" in report.problems[0]


def test_nvidia_smi_is_read(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA Test, 580.1, 9.0'\necho 'NVIDIA Test, 580.1, 9.0'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert doctor._gpus() == [("NVIDIA Test", "580.1", "9.0")] * 2
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert doctor._gpus() == []


def test_a_missing_compiler_or_header_is_named(monkeypatch, tmp_path):
    compiler = tmp_path / "gcc"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setattr(_compat, "python_header", lambda: tmp_path / "Python.h")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "no C compiler" in _compat.launcher_problem()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert _compat.launch_problem("cuda") is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "no C compiler" in _compat.launch_problem("cuda") and _compat.launch_problem("cpu") is None
    monkeypatch.setenv("CC", "nocc -O2")
    assert "'nocc -O2'" in _compat.launcher_problem()
    monkeypatch.setenv("CC", f"{compiler} -O2")
    assert "Python.h is missing" in _compat.launcher_problem()
    (tmp_path / "Python.h").touch()
    assert _compat.launcher_problem() is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _compat.launcher_problem() is None


@pytest.mark.parametrize(("gpu", "entries"), [(True, "problems"), (False, "notes")])
def test_only_a_gpu_needs_the_compiler(monkeypatch, gpu, entries):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_compat, "launcher_problem", lambda: "there is no C compiler")
    report = doctor.Report()
    doctor._triton(report, gpu=gpu)
    assert any("there is no C compiler" in entry for entry in getattr(report, entries))
    assert bool(report.problems) == gpu


def test_a_wrong_result_is_a_problem(monkeypatch):
    from torchrec_triton.module.tbe import TritonTableBatchedEmbeddingBags as operator

    forward = operator.forward
    monkeypatch.setattr(operator, "forward", lambda self, *arguments: forward(self, *arguments) * 1.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = doctor.Report()
    doctor._operator(report, torch)
    assert "wrong result" in report.problems[0] and ("operator", "WRONG RESULT") in [
        (what, value.split(": ")[-1]) for what, value in report.facts
    ]


# --- explain -------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(TABLES + text)
        return str(path)

    return write


def table_line(output: str, table: str) -> list[str]:
    return next(line.split() for line in output.splitlines() if line.startswith(table))


def test_explain_for_a_gpu_needs_no_gpu(config, capsys):
    assert cli.main(["explain", config("compute_kernel: fused_triton"), "--device", "cuda"]) == 0
    output = capsys.readouterr().out
    assert table_line(output, "user")[3] == table_line(output, "item")[3] == "fused_triton"


def test_explain_gives_every_reason_of_every_table(config, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    text = "optimizer: {name: ADAM}\nrules: [{tables: item, compute_kernel: fused}]\n"
    assert cli.main(["explain", config(text), "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert table_line(output, "user")[3] == table_line(output, "item")[3] == "fused"
    assert output.count("device_type=cpu") == 1 and output.count("optimizer=ADAM") == 1
    assert "fused was asked for" in output


def test_explain_fails_where_an_explicit_request_cannot_be_met(config, capsys):
    text = "fused_params: {max_norm: 1.0}\nrules: [{tables: item, compute_kernel: fused_triton}]\n"
    assert cli.main(["explain", config(text), "--device", "cuda"]) == 1
    error = capsys.readouterr().err
    assert "table item: max_norm=1.0" in error and "user" not in error


def test_explain_says_what_the_plan_does(tmp_path, capsys):
    """Rows wider than the kernels take run on FBGEMM whole, and on Triton once the plan cuts them."""
    path = tmp_path / "run.yaml"
    for kind, kernel in (("table_wise", "fused"), ("column_wise", "fused_triton")):
        path.write_text(f"model: {{tables: [{{name: wide, rows: 1000, dim: 16384, sharding: [{kind}]}}]}}")
        assert cli.main(["explain", str(path), "--device", "cuda", "--world-size", "2"]) == 0
        output = capsys.readouterr().out
        assert table_line(output, "wide")[3] == kernel
        assert ("embedding dim 16384" in output) == (kernel == "fused")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("compute_kernel: trition", "compute_kernel: 'trition' is not allowed"),
        ("fused_params: {max_gradiant: 1.0}", "did you mean max_gradient?"),
        ("fused_params: {pooling_mode: MEAN}", "fused_params.pooling_mode: set it under model.tables (pooling)"),
        ("fused_params: {bounds_check_mode: WARN}", "fused_params.bounds_check_mode: 'WARN' is not allowed"),
        ("fused_params: {max_norm: big}", "fused_params.max_norm: expected a number, got 'big'"),
        ("fused_params: {extra_optimizer_config: {x: true}}", "fused_params.extra_optimizer_config: a configuration"),
    ],
)
def test_explain_refuses_a_wrong_file_in_one_line(config, capsys, text, answer):
    assert cli.main(["explain", config(text)]) == 2
    output = capsys.readouterr()
    assert answer in output.err and output.err.count("\n") == 1 and not output.out


def test_without_triton_auto_falls_back_and_says_so(config):
    done = run("explain", config(""), "--device", "cuda", before="sys.modules['triton'] = None")
    assert done.returncode == 0, done.stderr
    assert table_line(done.stdout, "user")[3] == "fused"
    assert "triton cannot be imported" in done.stdout
    done = run(
        "explain", config("compute_kernel: fused_triton"), "--device", "cuda", before="sys.modules['triton'] = None"
    )
    assert done.returncode == 1 and "asked for by name, for user, item" in done.stderr


# --- the package -----------------------------------------------------------------------------------------------------


def test_the_package_can_be_imported_without_what_it_stands_on():
    code = """
        import sys
        for package in ("torch", "triton", "torchrec", "fbgemm_gpu"):
            sys.modules[package] = None
        import torchrec_triton
        from torchrec_triton import unsupported_reasons
        from torchrec_triton.config import load_config
        assert unsupported_reasons(device_type="cuda", interpreter=False) == []
    """
    done = run("--version", before=code)
    assert done.returncode == 0, done.stderr


def test_the_operator_without_fbgemm_names_the_package_and_the_versions():
    done = run(before="sys.modules['fbgemm_gpu'] = None\nfrom torchrec_triton import TritonTableBatchedEmbeddingBags")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    for part in ("fbgemm_gpu", _compat.installed_version("fbgemm_gpu"), _compat.installed_version("torch"), "doctor"):
        assert part in error


def test_kernels_run_without_torchs_newer_helpers_for_triton():
    helpers = "import torch\nfor name in ('wrap_triton', 'triton_op'):\n    delattr(torch.library, name)"
    done = run("doctor", before=helpers, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the Triton kernels on cpu: correct" in done.stdout


def test_no_folder_of_ours_hides_a_package_that_we_need():
    """Running a file puts its folder first on the path: a module there named `triton` would be imported instead."""
    ours = [path for top in ("torchrec_triton", "examples", "tests") for path in (ROOT / top).rglob("*")]
    names = {path.stem for path in ours if path.is_dir() or path.suffix == ".py"} | {
        path.name for path in ROOT.iterdir()
    }
    assert not names & {"triton", "torch", "fbgemm_gpu", "torchrec", "numpy", "yaml"}


README_SETTING = """
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device = torch.device("cpu")
names = ["user_id", "item"]
tables = [EmbeddingBagConfig(name=n, num_embeddings=1000, embedding_dim=8, feature_names=[n]) for n in names]
model = torch.nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
"""
README_CHECK = """
features = KeyedJaggedTensor.from_lengths_sync(names, torch.tensor([1, 2, 3]), torch.tensor([2, 1]))
model(features).values().sum().backward()
print({table: sharding.compute_kernel for table, sharding in plan.plan["0"].items()})
dist.destroy_process_group()
"""


def test_the_usage_in_the_readme_runs():
    usage = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", README_SETTING + usage + README_CHECK],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "{'user_id': 'fused', 'item': 'fused_triton'}"


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert torchrec_triton.__version__ in capsys.readouterr().out
