"""Times the Triton operator beside FBGEMM's CUDA kernels, both in one process and interleaved.

A shape passes the gate first (gate.py). Then its three sides take turns: ours, FBGEMM, and FBGEMM with its opt-in
forward. No two neighbouring runs see the same batch, so neither finds the other's ids in the cache. Times come from
CUDA events with idle work queued ahead: a run counts only if the GPU had not reached its first event when the host was
done, so launches are never part of it. The host's own time is measured apart, on an idle GPU.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from torchrec_triton import _compat
from torchrec_triton.bench import compiling, floor, report
from torchrec_triton.bench.config import Card, Suite, load
from torchrec_triton.bench.gate import Call, GateError, Pair, gate
from torchrec_triton.bench.workloads import Batch, Workload, make_batch, workloads
from torchrec_triton.config import ConfigError

SIDES = ("triton", "fbgemm", "fbgemm2")
UNCOUNTED = 2  # rounds ahead of the counted ones
Sample = Callable[[Call, Batch, torch.Tensor], tuple[float, float]]  # forward and backward


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def gpu_problem() -> str | None:
    """Why nothing can be timed here, or None."""
    problem = _compat.launch_problem("cuda") if torch.cuda.is_available() else "there is no GPU"
    return problem and f"bench times CUDA kernels: {problem} (--render needs no GPU)"


class GpuTimer:
    """Forward and backward of one call in ms, with idle cycles ahead that cover the host's launches.

    waits: whether some call waited for the device itself, so that no backlog could hide its launches.
    """

    MOST = 32_000_000  # cycles, some 17 ms

    def __init__(self) -> None:
        self._cycles = 2_000_000
        self.waits = False

    def __call__(self, call: Call, batch: Batch, grad: torch.Tensor) -> tuple[float, float]:
        while True:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda._sleep(self._cycles)
            marks[0].record()
            out = call(batch)
            marks[1].record()
            out.backward(grad)
            marks[2].record()
            late = marks[0].query()
            torch.cuda.synchronize()
            if not late or self._cycles >= self.MOST:
                self.waits |= late
                return marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])
            self._cycles *= 2


def host_time(call: Call, batch: Batch, grad: torch.Tensor) -> tuple[float, float]:
    """Microseconds to enqueue a forward and a backward on an idle GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = call(batch)
    middle = time.perf_counter()
    out.backward(grad)
    end = time.perf_counter()
    torch.cuda.synchronize()
    return (middle - start) * 1e6, (end - middle) * 1e6


def peak_bytes(call: Call, batch: Batch, grad: torch.Tensor, small: Batch, small_grad: torch.Tensor) -> tuple[int, int]:
    """Most bytes that a forward (its output among them) and a backward take beyond what was there before each.

    A step of the batch `small` goes before: what a side keeps from call to call is little then, and so counts as taken.
    """
    call(small).backward(small_grad)
    peaks = []
    out = None
    for step in ("forward", "backward"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if step == "forward":
            out = call(batch)
        else:
            out.backward(grad)  # type: ignore[union-attr]
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return peaks[0], peaks[1]


def interleave(
    calls: dict[str, Call], batches: list[Batch], grad: torch.Tensor, counted: int, sample: Sample, uncounted: int = 0
) -> dict[str, list[tuple[float, float]]]:
    """`counted` samples of each side. The order of the sides turns with each round, and so do the batches: a run and
    the one before it never share a batch."""
    names = list(calls)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for i in range(uncounted + counted):
        for position in range(len(names)):
            side = (position - i) % len(names)
            pair = sample(calls[names[side]], batches[(i + position) % len(batches)], grad)
            if i >= uncounted:
                found[names[side]].append(pair)
    return found


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return {"p50": statistics.median(ordered), "p10": ordered[tenth], "p90": ordered[-1 - tenth]}


def measure(
    workload: Workload,
    counted: int = 11,
    *,
    batches: int = 3,
    host_runs: int = 11,
    card: Card | None = None,
    pair: Pair | None = None,
) -> dict[str, Any]:
    """One shape: row[side][part]["p50" | "p10" | "p90"] in ms, side of SIDES, part forward, backward or sum; beside
    them host times in us, peak memory in bytes, runs of the shape, bytes that it must move, and its floor if `card` is
    given.

    pair: modules of these tables, where there are some already.

    Raises:
        GateError: the sides disagree or are wrong; nothing was timed.
        NotImplementedError: Triton can't run the shape; the message has the reasons.
    """
    device = _device()
    pair = pair or Pair.build(workload, device)
    inputs = [make_batch(workload, seed, device) for seed in range(batches)]
    grad = torch.randn(workload.output_shape, device=device)
    row = describe(workload, inputs[0], pair.ours.flat_weights().element_size(), card)
    row["gate"] = gate(pair, workload, inputs, grad)
    calls, timer = pair.calls(), GpuTimer()
    times = interleave(calls, inputs, grad, counted, timer, UNCOUNTED)
    hosts = interleave(calls, inputs, grad, host_runs, host_time, UNCOUNTED)
    row["waits_for_device"] = timer.waits
    small = make_batch(workload.small(), 0, device)
    small_grad = torch.randn(workload.small().output_shape, device=device)
    for side in SIDES:
        memory = peak_bytes(calls[side], inputs[0], grad, small, small_grad)
        row[side] = {
            "forward": quantiles([f for f, _ in times[side]]),
            "backward": quantiles([b for _, b in times[side]]),
            "sum": quantiles([f + b for f, b in times[side]]),
            "samples": [[round(f, 5), round(b, 5)] for f, b in times[side]],
            "host_forward_us": statistics.median(f for f, _ in hosts[side]),
            "host_backward_us": statistics.median(b for _, b in hosts[side]),
            "forward_bytes": memory[0],
            "backward_bytes": memory[1],
        }
    return row


def describe(workload: Workload, batch: Batch, weight_bytes: int, card: Card | None) -> dict[str, Any]:
    """What is measured: the shape, the runs of its first batch, the bytes that must move."""
    found = floor.runs(workload, batch)
    moved = floor.traffic(workload, batch, found.pop("unique"), weight_bytes)
    for passed in moved.values():
        passed["ms"] = floor.floor_ms(passed, card) if card else None
    axes = ("rows", "dims", "pooling", "batch", "alpha", "weighted", "jagged", "vbe", "data_type")
    shape = {axis: getattr(workload, axis) for axis in axes}
    return {"name": workload.name, "group": workload.group, "shape": shape, **found, "floor": moved}


def _origin(commit: str) -> dict[str, Any]:
    """Where and how the figures are made."""
    if not commit:
        changed = _answer("git", "status", "--porcelain", "--untracked-files=no")
        commit = _answer("git", "rev-parse", "--short", "HEAD") or "unknown"
        commit += " with uncommitted changes" if changed else ""
    gpu = torch.cuda.get_device_properties(_device())
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": gpu.name,
        "hardware": {
            "multiprocessors": gpu.multi_processor_count,
            "memory_gib": round(gpu.total_memory / 2**30),
            "driver": _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
            "copy_terabytes_per_second": _copy_rate(),
        },
        "versions": {
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{package: _compat.installed_version(package) for package in _compat.PACKAGES},
            "torch": torch.__version__,
            "cuda-cccl": "not used, torch.sort" if _compat.cub_problem() else _compat.installed_version("cuda-cccl"),
        },
        "commit": commit,
        "command": "torchrec-triton " + " ".join(sys.argv[1:]),
    }


def _answer(*command: str) -> str:
    """What a program prints, or nothing where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _copy_rate() -> float:
    """TB/s read and written by a copy within the device: the floor's own limit, as this card has it today."""
    source = torch.zeros(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        target.copy_(source)
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
    return round(2 * source.numel() / min(times) * 1e-9, 2)


def run(
    card: Card, suite: Suite, shapes: list[Workload], commit: str, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The report of these shapes. `save` gets it after each, so that a run that is cut short leaves what it has."""
    start = time.perf_counter()
    torch.use_deterministic_algorithms(False)
    first_step = compiling.first_step_times() if suite.first_step else None
    compile_seconds = compiling.warm_up(shapes)
    result: dict[str, Any] = {
        **_origin(commit),
        "card": asdict(card),
        "counted": suite.counted,
        "batches": suite.batches,
        "host_runs": suite.host_runs,
        "first_step": first_step,
        "compile_seconds": compile_seconds,
        "seconds": 0.0,
        "failed": [],
        "skipped": [],
        "rows": [],
    }
    save(result)
    print(f"{result['gpu']}, commit {result['commit']}; kernels compiled in {compile_seconds:.0f} s")
    print(report.HEADER)
    tables: Any = None
    pair: Pair | None = None
    for workload in shapes:
        if time.perf_counter() - start > suite.seconds:
            result["skipped"].append(workload.name)
            continue
        try:
            if pair is None or workload.tables != tables:
                tables, pair = workload.tables, None
                pair = Pair.build(workload, _device())
            row = measure(
                workload,
                counted=suite.counted,
                batches=suite.batches,
                host_runs=suite.host_runs,
                card=card,
                pair=pair,
            )
            result["rows"].append(row)
            print(report.line(row), flush=True)
        except (GateError, torch.OutOfMemoryError) as error:
            reason = str(error) if isinstance(error, GateError) else "does not fit into the GPU's memory"
            tables = pair = None
            result["failed"].append({"name": workload.name, "reason": reason})
            print(f"| {workload.name} | not timed: {reason} |", flush=True)
        result["seconds"] = round(time.perf_counter() - start, 1)
        save(result)
    return result


def main(options: argparse.Namespace) -> int:
    """The command `bench`. 0: all shapes were measured, 1: some were not, 2: wrong arguments or no GPU."""
    try:
        suite, card, shapes = _chosen(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if problem := gpu_problem():
        print(problem, file=sys.stderr)
        return 2
    output = Path(options.output)
    if output.suffix != ".json":
        gpu = torch.cuda.get_device_name().lower().replace(" ", "-").removeprefix("nvidia-")
        output /= f"{datetime.date.today().isoformat()}-{gpu}{'-quick' if options.quick else ''}.json"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--output {options.output}: {error.strerror}", file=sys.stderr)
        return 2
    result = run(card, suite, shapes, options.commit, lambda result: report.save(result, output))
    report.write(result, output)
    print(f"\n{output} and its Markdown and plots, {result['seconds']} s")
    for failure in result["failed"]:
        print(f"not timed: {failure['name']}: {failure['reason']}", file=sys.stderr)
    if result["skipped"]:
        print(f"not run within {suite.seconds:g} s: {len(result['skipped'])} shapes", file=sys.stderr)
    return 1 if result["failed"] or result["skipped"] else 0


def _chosen(options: argparse.Namespace) -> tuple[Suite, Card, list[Workload]]:
    """What the command line asks for.

    Raises:
        ConfigError: the file or an argument is wrong.
    """
    settings = load(options.config)
    suite = settings.quick if options.quick else settings.full
    try:
        shapes = workloads(suite, settings.grid_tables)
    except ConfigError as error:
        raise ConfigError(f"{options.config}: {'quick' if options.quick else 'full'}.{error}") from error
    if options.only:
        parts = [part for part in options.only.split(",") if part]
        names = ", ".join(shape.name for shape in shapes if shape.group != "grid")
        shapes = [shape for shape in shapes if any(part in shape.name for part in parts)]
        if not shapes:
            raise ConfigError(
                f"--only {options.only}: no shape has that in its name; besides the grid there are {names}"
            )
        suite = replace(suite, first_step=False)
    if options.counted is not None:
        if options.counted < 1:
            raise ConfigError(f"--counted {options.counted}: is not allowed; allowed: 1 and above")
        suite = replace(suite, counted=options.counted)
    return suite, settings.card, shapes
