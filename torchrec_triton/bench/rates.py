"""Measures the rates by which the planner chooses kernels: `torchrec-triton bench --rates FILE` on the GPU in question.

One operator of equal tables for each point of a grid, beside FBGEMM's; each point passes the bench's gate first. Two
more operators say what rows of several widths cost. The file goes to configs/rates/, or is handed to
`make_planner(rates=...)`. FBGEMM's times are those of its default forward, which is what `fused` runs.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

from torchrec_triton.bench import compiling, report, run
from torchrec_triton.bench.gate import GateError, Pair
from torchrec_triton.bench.workloads import Workload, launch_bound

# Every combination is measured. Between the values of an axis the planner interpolates, beyond them it extrapolates.
AXES: dict[str, tuple[Any, ...]] = {
    "data_type": ("FP32", "FP16"),
    "weighted": (False, True),
    "dim": (32, 128, 256),
    "pooling": (1, 16),  # lookups a bag
    "reuse": (0.25, 16, 1024),  # lookups a row of the table: what the mean run length follows from
    "lookups": (2**11, 2**21),  # of the operator: where it costs its launches, and where they are nothing
}
TABLES = 8
COUNTED = 11
Point = dict[str, Any]
Milliseconds = dict[str, list[float]]  # kernel -> of forward and backward


def workload(point: Point) -> Workload:
    """Equal tables with uniform ids that make up one point of the grid."""
    lookups = point["lookups"] // TABLES
    return Workload(
        " ".join(f"{axis}={value}" for axis, value in point.items()),
        rows=(max(1, int(lookups / point["reuse"])),) * TABLES,
        dims=(point["dim"],) * TABLES,
        pooling=(point["pooling"],) * TABLES,
        batch=lookups // point["pooling"],
        weighted=point["weighted"],
        data_type=point["data_type"],
    )


def shapes() -> list[tuple[Point, Workload]]:
    """What is measured: two operators of little work that are no point, then the grid, equal tables side by side."""
    points = [dict(zip(AXES, values)) for values in itertools.product(*AXES.values())]
    points.sort(key=lambda point: [point[axis] for axis in ("data_type", "dim", "reuse", "lookups")])
    return [*(({}, shape) for shape in launch_bound()), *((point, workload(point)) for point in points)]


def measure_rates(output: Path, commit: str = "") -> int:
    """Measure every point and write the file: where it comes from, the axes, ms of (forward, backward) of each kernel
    that a further width of rows adds, and those of each point.

    The file is there once all is measured. Until then, and if a point fails, what there is lies in FILE.part.

    0: done, 1: a point failed the gate, 2: there is no GPU, or nowhere to write.
    """
    problem = run.gpu_problem() or (f"--rates {output}: is a folder; name a file in it" if output.is_dir() else "")
    if problem:
        print(problem, file=sys.stderr)
        return 2
    begun = time.perf_counter()
    rows: list[dict[str, Any]] = []
    command = {"command": f"torchrec-triton bench --rates {output.name}"}
    result: dict[str, Any] = {**run._origin(commit), **command, "axes": AXES, "width": None, "rows": rows}
    part = output.with_name(f"{output.name}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        report.save(result, part)
    except OSError as error:
        print(f"--rates {output}: {error.strerror}", file=sys.stderr)
        return 2

    todo, least_rows = shapes(), AXES["reuse"][-1]
    # Small tables will do: kernels do not depend on rows.
    small = [shape for point, shape in todo if point.get("reuse", least_rows) == least_rows]
    compiling.warm_up(small)
    print(f"kernels compiled in {time.perf_counter() - begun:.0f} s", flush=True)

    launches, failed = [], 0
    tables: Any = None
    pair: Pair | None = None
    for at, (point, shape) in enumerate(todo, start=1):
        if tables != shape.tables:
            tables, pair = shape.tables, None
            pair = Pair.build(shape, run._device())
        try:
            row = run.measure(shape, COUNTED, host_runs=1, pair=pair)
        except GateError as error:
            failed += 1
            print(f"{shape.name}: not timed: {error}", file=sys.stderr, flush=True)
            continue
        ms = {
            kernel: [round(row[side][phase]["p50"], 5) for phase in ("forward", "backward")]
            for kernel, side in (("fused", "fbgemm"), ("fused_triton", "triton"))
        }
        if point:
            rows.append({**point, **ms})
            report.save(result, part)
        else:
            launches.append((len(set(shape.dims)), ms))
        fused, triton = (sum(ms[kernel]) for kernel in ("fused", "fused_triton"))
        done = f"{at}/{len(todo)}, {time.perf_counter() - begun:.0f} s"
        print(f"{done:<14} {shape.name:<80} fused {fused:8.3f} ms, {fused / triton:.2f}x", flush=True)
    if failed:
        print(f"no rates: {failed} of {len(todo)} shapes failed the gate; the others are in {part}", file=sys.stderr)
        return 1
    result["width"] = further_width(*launches)
    report.save(result, part)
    part.replace(output)
    print(f"{len(rows)} points on {result['gpu']} in {time.perf_counter() - begun:.0f} s: {output}")
    return 0


def further_width(one: tuple[int, Milliseconds], several: tuple[int, Milliseconds]) -> Milliseconds:
    """Of operators with so little to do that a launch is what they cost: (widths of rows, their times)."""
    more = several[0] - one[0]
    return {
        kernel: [round(max(b - a, 0.0) / more, 5) for a, b in zip(times, several[1][kernel])]
        for kernel, times in one[1].items()
    }
