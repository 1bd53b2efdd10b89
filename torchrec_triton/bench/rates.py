"""Measures the rates by which the planner chooses kernels: `torchrec-triton bench --rates FILE` on the GPU in question.

One operator of equal tables for each point of a grid, beside FBGEMM's; each point passes the bench's gate first. The
file goes to configs/rates/, or is handed to `make_planner(rates=...)`. FBGEMM's times are those of its default forward,
which is what `fused` runs.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType

from torchrec_triton.bench.gate import GateError, module
from torchrec_triton.bench.run import _origin, measure
from torchrec_triton.bench.workloads import Workload, make_batch
from torchrec_triton.module.tbe import TritonTableBatchedEmbeddingBags

# Every combination is measured. Between the values of an axis the planner interpolates, beyond them it extrapolates.
AXES: dict[str, tuple[Any, ...]] = {
    "data_type": ("FP32", "FP16"),
    "weighted": (False, True),
    "dim": (32, 128, 256),
    "pooling": (1, 16),  # lookups a bag
    "reuse": (0.25, 16, 1024),  # lookups a row of the table: what the mean run length follows from
    "lookups": (2**16, 2**21),  # of the operator: where a launch costs as much as its work, and where it doesn't
}
TABLES = 8
COUNTED = 5
Point = dict[str, Any]


def workload(point: Point) -> Workload:
    """Equal tables with uniform ids that make up one point of the grid."""
    lookups = point["lookups"] // TABLES
    return Workload(
        " ".join(f"{axis}={value}" for axis, value in point.items()),
        rows=(int(lookups / point["reuse"]),) * TABLES,
        dims=(point["dim"],) * TABLES,
        pooling=(point["pooling"],) * TABLES,
        batch=lookups // point["pooling"],
        weighted=point["weighted"],
    )


def measure_rates(output: Path, commit: str = "") -> int:
    """Measure every point and write the file: where it comes from, the axes, and ms of (forward, backward) a kernel.

    0: done, 1: a point failed the gate, so the file lacks it and no planner takes it, 2: there is no GPU.
    """
    if not torch.cuda.is_available():
        print("bench times CUDA kernels: there is no GPU", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    points = [dict(zip(AXES, values)) for values in itertools.product(*AXES.values())]
    compile_kernels(points)
    print(f"kernels compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    rows, failed = [], 0
    for point in points:
        try:
            row = measure(workload(point), SparseType[point["data_type"]], COUNTED, host_runs=1)
        except GateError as error:
            failed += 1
            print(f"{point}: not timed: {error}", file=sys.stderr)
            continue
        ms = {
            kernel: [round(row[side][phase]["p50"], 5) for phase in ("forward", "backward")]
            for kernel, side in (("fused", "fbgemm"), ("fused_triton", "triton"))
        }
        rows.append({**point, **ms})
        ratio = sum(ms["fused"]) / sum(ms["fused_triton"])
        print(f"{row['name']:<80} fused {sum(ms['fused']):8.3f} ms, {ratio:.2f}x", flush=True)
    origin = {**_origin(commit), "command": f"torchrec-triton bench --rates {output.name}"}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps(origin, indent=1).removesuffix("\n}")
    output.write_text(f'{head},\n "axes": {json.dumps(AXES)},\n "rows": [\n{lines}\n ]\n}}\n')
    print(f"{len(rows)} points on {torch.cuda.get_device_name()} in {time.perf_counter() - begun:.0f} s: {output}")
    return 1 if failed else 0


def compile_kernels(points: list[Point]) -> None:
    """Fill Triton's cache in parallel, a process for each data type, dim and kind of weights. Tables are small here:
    kernels do not depend on rows."""
    small = [point for point in points if point["reuse"] == max(AXES["reuse"])]
    groups: dict[Any, list[Point]] = {}
    for point in small:
        groups.setdefault((point["data_type"], point["weighted"], point["dim"]), []).append(point)
    processes = min(len(groups), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(first_steps, groups.values()):
            pass


def first_steps(points: list[Point]) -> None:
    """A step of our side for each point, in either rounding."""
    device = torch.device("cuda", torch.cuda.current_device())
    for point in points:
        shape = workload(point)
        batch = make_batch(shape, 0, device)
        for stochastic in (False, True):
            tbe = module(TritonTableBatchedEmbeddingBags, shape, SparseType[point["data_type"]], device, strict=True)
            tbe.optimizer_args = tbe.optimizer_args._replace(stochastic_rounding=stochastic)
            out = tbe(batch.indices, batch.offsets, batch.weights)
            out.backward(torch.zeros_like(out))
    torch.cuda.synchronize()
