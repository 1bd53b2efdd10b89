"""What is installed here, whether it fits together, and what to do where it doesn't.

Features are probed: a pair of releases that were not made for each other is a note while everything works, and the
explanation of a failure when something doesn't. Works when any of the packages cannot be imported.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from torchrec_triton import __version__, _compat
from torchrec_triton.support import MIN_CAPABILITY

# FBGEMM's and TorchRec's release 1.N are built for torch 2.(N + 5), as their release notes say.
_MINOR_AHEAD = 5
# One operator of each kind that TorchRec's lookups and FBGEMM's own training path call.
REQUIRED_OPERATORS = (
    "asynchronous_complete_cumsum",
    "block_bucketize_sparse_features",
    "bounds_check_indices",
    "jagged_2d_to_dense",
    "permute_2D_sparse_data",
    "split_embedding_codegen_lookup_rowwise_adagrad_function_pt2",
    "split_embedding_codegen_lookup_sgd_function_pt2",
)


@dataclass
class Report:
    """facts: (what, value); notes: worth knowing; problems: something needed is broken, with what to do about it."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"torchrec_triton {__version__}", ""]
        lines += [f"  {what:<12}{value}" for what, value in self.facts]
        for title, entries in (("note", self.notes), ("problem", self.problems)):
            lines += [line for entry in entries for line in ("", f"{title}: {entry}")]
        count = len(self.problems)
        verdict = f"{count} problem{'s' * (count > 1)} to solve." if count else "Everything that is needed works."
        return "\n".join([*lines, "", verdict])


def examine() -> Report:
    """Look at the packages from torch upwards, then do one lookup and one update."""
    report = Report()
    report.facts.append(("python", f"{platform.python_version()} ({sys.executable})"))
    gpus = _gpus()
    torch = _torch(report, gpus)
    _fbgemm(report, torch, bool(gpus))
    _torchrec(report)
    _triton(report, gpu=bool(gpus))
    if report.problems:
        report.facts.append(("operator", "not tried, see below"))
    else:
        _operator(report, torch)
    return report


def _gpus() -> list[tuple[str, str, str]]:
    """(name, driver, compute capability) of each NVIDIA GPU that the driver sees."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in shown.splitlines()]
    return [(name, driver, capability) for name, driver, capability in (row for row in rows if len(row) == 3)]


def _torch(report: Report, gpus: list[tuple[str, str, str]]) -> Any:
    version = _compat.installed_version("torch")
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        report.facts.append(("torch", f"{version or 'not installed'}, cannot be imported"))
        report.problems.append(f"torch cannot be imported: {_short(error)}. Install it again: pip install torch")
        return None
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    report.facts.append(("torch", f"{torch.__version__}, {build}"))
    report.facts.append(
        ("GPU", "; ".join(f"{name} (driver {driver}, {capability})" for name, driver, capability in gpus) or "none")
    )
    if not gpus:
        if _compat.interpreter_enabled():
            runs = "TRITON_INTERPRET is set: the Triton kernels run on CPU tensors, for tests and not for speed."
        else:
            runs = "tables run on FBGEMM's CPU kernel. TRITON_INTERPRET=1 runs the Triton kernels here, for tests only."
        report.notes.append(f"no NVIDIA GPU: {runs}")
    elif torch.version.cuda is None:
        report.problems.append(
            f"there is a GPU, but torch {torch.__version__} is a CPU build. Install CUDA builds of torch and FBGEMM."
        )
    elif not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        report.problems.append(
            f"torch, built for CUDA {torch.version.cuda}, cannot use the GPU. Check that driver {gpus[0][1]} is new "
            f"enough for it, and that CUDA_VISIBLE_DEVICES (now {visible}) does not hide it."
        )
    elif torch.cuda.get_device_capability() < MIN_CAPABILITY:
        need = ".".join(map(str, MIN_CAPABILITY))
        report.notes.append(f"the GPU is older than compute capability {need}: its tables run on FBGEMM's kernel.")
    return torch


def _fbgemm(report: Report, torch: Any, gpu: bool) -> None:
    version = _compat.installed_version("fbgemm_gpu")
    builds = [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if _has_distribution(name)]
    report.facts.append(
        ("fbgemm_gpu", f"{version or 'not installed'}{' (CPU)' if builds == ['fbgemm-gpu-cpu'] else ''}")
    )
    package = "fbgemm-gpu" if gpu else "fbgemm-gpu-cpu"
    if torch is None:
        return
    if len(builds) > 1:
        report.problems.append(
            f"{' and '.join(builds)} are both installed and overwrite each other's files. "
            f"Uninstall both, then: pip install {_fitting(package, torch.__version__)}"
        )
        return
    cure = f"Install the one for this torch: pip install {_fitting(package, torch.__version__)}"
    mismatch = _mismatch("fbgemm_gpu", version, torch.__version__)
    try:
        _compat.fbgemm_tbe()
    except ImportError as error:
        cause = _short(error.__cause__ or error)
        why = (
            f"{mismatch}: {cause}"
            if mismatch
            else f"fbgemm_gpu {version or 'is not installed and'} cannot be imported: {cause}"
        )
        report.problems.append(f"{why}. {cure}")
        return
    missing = [name for name in REQUIRED_OPERATORS if not hasattr(torch.ops.fbgemm, name)]
    if missing:
        why = f"{mismatch}; " if mismatch else ""
        report.problems.append(f"{why}fbgemm_gpu {version} lacks torch.ops.fbgemm.{', '.join(missing)}. {cure}")
    elif gpu and builds == ["fbgemm-gpu-cpu"]:
        report.problems.append(f"there is a GPU, but fbgemm-gpu-cpu {version} has no GPU kernels. {cure}")
    elif mismatch:
        report.notes.append(f"{mismatch}. All operators that are needed are there.")


def _torchrec(report: Report) -> None:
    version = _compat.installed_version("torchrec")
    report.facts.append(("torchrec", version or "not installed"))
    fbgemm = _compat.installed_version("fbgemm_gpu")
    torch = _compat.installed_version("torch")
    mismatch = _mismatch("torchrec", version, torch) if torch else None
    try:
        importlib.import_module("torchrec.distributed.embeddingbag")
    except Exception as error:
        if version is None:
            wanted = _fitting("torchrec", torch or "")
            report.problems.append(
                f"torchrec is not installed. On a machine without CUDA: pip install --no-deps {wanted}"
            )
        elif not report.problems:  # else it fails because of what lies beneath it
            cause = f"{mismatch}: " if mismatch else f"torchrec {version} cannot be imported with fbgemm_gpu {fbgemm}: "
            report.problems.append(
                f"{cause}{_short(error)}. Try: pip install --no-deps {_fitting('torchrec', torch or '')}"
            )
        return
    if mismatch:
        report.notes.append(f"{mismatch}. It can be imported.")


def _triton(report: Report, gpu: bool) -> None:
    version = _compat.installed_version("triton")
    interpreter = _compat.interpreter_enabled()
    report.facts.append(("triton", f"{version or 'not installed'}, interpreter {'on' if interpreter else 'off'}"))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    report.facts.append(("C compiler", compiler or "none"))
    header = _compat.python_header()
    report.facts.append(("Python.h", str(header) if header.exists() else f"missing ({header})"))
    if problem := _compat.triton_problem():
        report.problems.append(f"{problem}.")
    elif (problem := _compat.launcher_problem()) and not interpreter:
        (report.problems if gpu else report.notes).append(f"{problem}.{'' if gpu else ' Only a GPU needs it.'}")
    if gpu:
        problem = _compat.cub_problem()
        report.facts.append(("sort", "torch.sort" if problem else f"CUB, {_compat.installed_version('cuda-cccl')}"))
        if problem:
            report.notes.append(f"torch.sort runs in place of CUB's faster sort: {problem}.")
    if interpreter and gpu:
        report.notes.append("TRITON_INTERPRET is set: Triton kernels run on the host, very slowly. Unset it to train.")


def _operator(report: Report, torch: Any) -> None:
    """Rows 0 and 1 of ones are summed, then moved by SGD with a gradient of ones: every value is exact."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        embeddings = importlib.import_module("torchrec_triton.module.tbe")
        kinds = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        table = embeddings.TritonTableBatchedEmbeddingBags(
            [(4, 4)], optimizer=kinds.EmbOptimType.EXACT_SGD, learning_rate=0.5, device=torch.device(device)
        )
        weights = table.split_embedding_weights()[0]
        weights.data.fill_(1.0)
        output = table(torch.tensor([0, 1], device=device), torch.tensor([0, 2], device=device))
        output.sum().backward()
        correct = output.eq(2.0).all().item() and weights[:2].eq(0.5).all().item() and weights[2:].eq(1.0).all().item()
    except Exception as error:
        report.facts.append(("operator", "failed"))
        report.problems.append(f"one lookup and one update on {device} failed: {_short(error)}.")
        return
    path = "the Triton kernels" if table.uses_triton else "FBGEMM's kernel"
    report.facts.append(("operator", f"{path} on {device}: {'correct' if correct else 'WRONG RESULT'}"))
    if not correct:
        report.problems.append(
            f"{path} on {device} gave a wrong result: output {output.tolist()}, weights {weights.tolist()}."
        )


def _has_distribution(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _minor(version: str | None, major: str) -> int | None:
    """13 of "2.13.0+cpu" for major "2"; None for another major version or a date."""
    parts = (version or "").split(".")
    return int(parts[1]) if len(parts) > 1 and parts[0] == major and parts[1].isdigit() else None


def _mismatch(package: str, version: str | None, torch_version: str) -> str | None:
    """Which pair does not belong together, by the release numbers; None where they fit or nothing is known."""
    ours, torch_minor = _minor(version, "1"), _minor(torch_version, "2")
    if ours is None or torch_minor is None or ours + _MINOR_AHEAD == torch_minor:
        return None
    return f"{package} {version} was released for torch 2.{ours + _MINOR_AHEAD}, installed is torch {torch_version}"


def _fitting(package: str, torch_version: str) -> str:
    """The requirement that goes with a torch version: 2.13.0 -> fbgemm-gpu==1.8.*"""
    minor = _minor(torch_version, "2")
    return package if minor is None else f"'{package}==1.{minor - _MINOR_AHEAD}.*'"


def _short(error: BaseException) -> str:
    """Type and first line of an error: the libraries' own can be pages long."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": .")
