"""Measures the rates by which the planner chooses kernels: `torchrec-triton bench --rates FILE` on the GPU in question.

One operator of equal tables for each point of a grid, beside FBGEMM's; each point passes the bench's gate first. The
file goes to configs/rates/, or is handed to `make_planner(rates=...)`. FBGEMM's times are those of its default forward,
which is what `fused` runs.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType

from torchrec_triton.bench.run import _origin, measure
from torchrec_triton.bench.workloads import Workload

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


def workload(point: dict[str, Any]) -> Workload:
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
    0: done, 2: there is no GPU."""
    if not torch.cuda.is_available():
        print("bench times CUDA kernels: there is no GPU", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    origin = {**_origin(commit), "command": f"torchrec-triton bench --rates {output.name}"}
    rows = []
    for values in itertools.product(*AXES.values()):
        point = dict(zip(AXES, values))
        row = measure(workload(point), SparseType[point["data_type"]], COUNTED, host_runs=1)
        ms = {
            kernel: [round(row[side][phase]["p50"], 5) for phase in ("forward", "backward")]
            for kernel, side in (("fused", "fbgemm"), ("fused_triton", "triton"))
        }
        rows.append({**point, **ms})
        print(f"{row['name']:<80} fused {sum(ms['fused']):8.3f} ms, {sum(ms['fused']) / sum(ms['fused_triton']):.2f}x")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps(origin, indent=1).removesuffix("\n}")
    output.write_text(f'{head},\n "axes": {json.dumps(AXES)},\n "rows": [\n{lines}\n ]\n}}\n')
    print(f"{len(rows)} points on {torch.cuda.get_device_name()} in {time.perf_counter() - begun:.0f} s: {output}")
    return 0
