"""The one place that probes the packages beneath this one.

Features are probed, versions are only reported: a newer release works as long as it has what is used. Nothing here
imports a package before it is asked to, so importing `torchrec_triton` needs no GPU, no driver and no compiler.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "torchrec", "fbgemm_gpu")
# The CPU wheel of FBGEMM and torch's nightlies carry other distribution names than the module they install.
_DISTRIBUTIONS = {
    "fbgemm_gpu": ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-genai", "fbgemm-gpu-nightly"),
    "triton": ("triton", "pytorch-triton", "triton-windows"),
}


def installed_version(package: str) -> str | None:
    """Version of an installed package by its module name, or None. Reads metadata only, imports nothing."""
    for distribution in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def interpreter_enabled() -> bool:
    """Whether Triton kernels run in the interpreter (TRITON_INTERPRET), which takes CPU tensors.

    Triton reads the variable when a kernel is decorated: set it before the first import of triton.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def triton_problem() -> str | None:
    """Why Triton can't be used here, as a sentence, or None if it can be imported."""
    try:
        importlib.import_module("triton.language")
    except Exception as error:  # an ABI mismatch raises more than ImportError
        problem = f"triton cannot be imported ({type(error).__name__}: {error})"
        return f"{problem}; install the release that this torch asks for"
    return None


def launcher_problem() -> str | None:
    """Why Triton could not build its launcher, which it compiles at the first launch on a GPU; None if it can.

    A launcher that an earlier run left in Triton's cache would need no compiler. Whether it is there is not known
    before the launch, where an error comes too late, so the compiler is asked for all the same.
    """
    if os.environ.get("CC"):
        if shutil.which(os.environ["CC"].split()[0]) is None:
            return f"CC is {os.environ['CC']!r}, which is not found; set it to a C compiler or unset it"
    elif not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler for Triton's launcher; install gcc or clang, or name one in CC"
    header = python_header()
    if not header.exists():
        return f"{header} is missing for Triton's launcher; install the headers of this Python (python3-dev on Debian)"
    return None


def python_header() -> Path:
    return Path(sysconfig.get_path("include"), "Python.h")


def launch_problem(device_type: str) -> str | None:
    """Why no kernel can be launched on a device of this machine, or None. The interpreter needs no launcher."""
    compiles = device_type == "cuda" and not interpreter_enabled()
    return triton_problem() or (launcher_problem() if compiles else None)


def cub_problem() -> str | None:
    """Why CUB's sort can't be called here, as a sentence, or None if `cuda_compute` will do."""
    try:
        compute = cuda_compute()
    except Exception as error:  # missing, or a part of CUDA that it needs is
        return (
            f"cuda-cccl cannot be imported ({type(error).__name__}: {error}); pip install 'cuda-cccl[minimal-cu13]', "
            "or minimal-cu12 for a torch that is built for CUDA 12"
        )
    used = ("make_radix_sort", "serialize", "deserialize", "DoubleBuffer", "SortOrder")
    if missing := [name for name in used if not hasattr(compute, name)]:
        return f"cuda-cccl {installed_version('cuda-cccl')} has no {', '.join(missing)}; install 1.2 or newer"
    return None


def cuda_compute() -> Any:
    """NVIDIA's `cuda.compute`, CUB and Thrust for Python. ImportError where the package cuda-cccl is missing."""
    return importlib.import_module("cuda.compute")


def fbgemm_tbe() -> Any:
    """FBGEMM's TBE module `split_table_batched_embeddings_ops_training`.

    Raises:
        ImportError: fbgemm_gpu is missing or doesn't fit the installed torch; the message names both versions.
    """
    try:
        return importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    except Exception as error:
        raise ImportError(
            f"fbgemm_gpu ({installed_version('fbgemm_gpu') or 'not installed'}) cannot be imported with torch "
            f"{installed_version('torch')}: {type(error).__name__}: {error}. Install the fbgemm-gpu release built for "
            "this torch (`torchrec-triton doctor` names it)."
        ) from error
