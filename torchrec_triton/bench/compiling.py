"""Triton's compilation: done ahead of the measurements in many processes, and measured as a user meets it."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchrec_triton.bench.gate import module
from torchrec_triton.bench.workloads import DLRM26, Workload, make_batch
from torchrec_triton.module.tbe import TritonTableBatchedEmbeddingBags

# Tables are cut to this many rows, so that many processes fit one GPU. Kernels depend on it no more than on a batch.
_MOST_ROWS = 1_000_000


def groups(workloads: Iterable[Workload]) -> list[list[Workload]]:
    """Shapes whose kernels are the same or nearly so, with small tables and uniform ids, the longest work first."""
    found: dict[Any, dict[Workload, None]] = {}
    for w in workloads:
        rows = tuple(min(rows, _MOST_ROWS) for rows in w.rows)
        key = (tuple(sorted(set(w.dims))), w.data_type, w.weighted, w.vbe)
        found.setdefault(key, {})[replace(w, name="", group="", alpha=0.0, rows=rows)] = None
    return [list(found[key]) for key in sorted(found, key=lambda key: (-len(key[0]), -len(found[key])))]


def first_steps(workloads: list[Workload]) -> None:
    """A step of our side for each shape, and for few bags of its tables, in either rounding; what it compiles stays in
    Triton's cache."""
    device = torch.device("cuda", torch.cuda.current_device())
    tables: Any = None
    tbe: Any = None
    for workload in workloads:
        if workload.tables != tables:
            tables, tbe = workload.tables, None
            torch.cuda.empty_cache()
            tbe = module(TritonTableBatchedEmbeddingBags, workload, device, strict=True)
        batches = [make_batch(shape, 0, device) for shape in (workload, workload.small())]
        for stochastic, batch in itertools.product((False, True), batches):
            tbe.optimizer_args = tbe.optimizer_args._replace(stochastic_rounding=stochastic)
            out = tbe(batch.indices, batch.offsets, batch.weights, batch_size_per_feature_per_rank=batch.batch_sizes)
            out.backward(torch.zeros_like(out))
    torch.cuda.synchronize()


def warm_up(workloads: Iterable[Workload]) -> float:
    """Fills Triton's cache for these shapes in parallel, where that pays. Returns the seconds it took."""
    start = time.perf_counter()
    work = groups(workloads)
    if len(work) > 2:  # for fewer the processes take longer to start than they save, and the gate compiles too
        processes = min(len(work), len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            for _ in pool.map(first_steps, work):
                pass
    return time.perf_counter() - start


def first_step_times() -> dict[str, float]:
    """Seconds of the first training step of a model of 26 tables, D=128, one id a bag, in two processes one after
    another: `cold` begins with an empty Triton cache, `warm` finds what `cold` left. `..._process` is from the start of
    the process to its end, imports and CUDA's start among it."""
    times = {}
    with tempfile.TemporaryDirectory() as cache:
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": paths}
        for state in ("cold", "warm"):
            start = time.perf_counter()
            command = [sys.executable, "-m", "torchrec_triton.bench.compiling"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            times[f"{state}_process"] = round(time.perf_counter() - start, 2)
            times[state] = json.loads(done.stdout.splitlines()[-1])
    return times


def _first_step() -> float:
    """Seconds from the call of the module to the end of its backward on the GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = replace(DLRM26, rows=tuple(min(rows, _MOST_ROWS) for rows in DLRM26.rows))
    tbe = module(TritonTableBatchedEmbeddingBags, model, device, strict=True)
    batch = make_batch(model, 0, device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = tbe(batch.indices, batch.offsets)
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(round(_first_step(), 2)))
