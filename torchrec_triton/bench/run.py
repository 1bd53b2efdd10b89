"""Measures the Triton operator beside FBGEMM's CUDA kernels, both in one process and interleaved.

Each workload passes a gate first: from equal weights, two steps on both sides must give equal outputs, weights and
state, within rounding. Then times come from CUDA events with work queued ahead of the region, so that launch time is
hidden; the host's time a call is a column of its own. Both sides have the same output dtype, rounding, bounds checks
and eps. FBGEMM's side is the faster of its two forwards and of the backwards behind them, without deterministic mode
and without the gradient of weights that want none. Batches rotate.
"""
from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from torchrec_triton import _compat
from torchrec_triton.bench.workloads import Batch, Workload, make_batch, real
from torchrec_triton.module.tbe import TritonTableBatchedEmbeddingBags

COUNTED = 11
BATCHES = 3


class GateError(AssertionError):
    """The two sides disagree: their times mean nothing."""


def _module(cls: Any, workload: Workload, precision: SparseType, stochastic: bool) -> Any:
    specs = [(r, d, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for r, d in zip(workload.rows, workload.dims)]
    return cls(
        specs,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        eps=1e-8,
        weights_precision=precision,
        output_dtype=SparseType.FP32,
        stochastic_rounding=stochastic,
        device=torch.device("cuda", torch.cuda.current_device()),
    )


def _call(tbe: Any, batch: Batch) -> torch.Tensor:
    wanted = None
    if batch.weights is not None and not isinstance(tbe, TritonTableBatchedEmbeddingBags):
        wanted = torch.zeros(len(tbe.feature_table_map), dtype=torch.int32, device=batch.indices.device)
    return tbe(batch.indices, batch.offsets, batch.weights, feature_requires_grad=wanted)


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest |a - b| of two flat tensors, in pieces: tables take most of the memory."""
    a, b = a.reshape(-1), b.reshape(-1)
    piece = 2**28
    return max(
        (float((a[i : i + piece].float() - b[i : i + piece].float()).abs().max()) for i in range(0, a.numel(), piece)),
        default=0.0,
    )


def gate(ours: Any, theirs: Any, batches: list[Batch], grad: torch.Tensor) -> dict[str, float]:
    """Two steps on both sides; largest differences of output, weights and state.

    Raises:
        GateError: a difference is above what fp32 sums in another order and one fp16 rounding explain.
    """
    result = {"weights": 0.0, "state": 0.0}
    for step, batch in enumerate(batches[:2]):
        out, expected = _call(ours, batch), _call(theirs, batch)
        scale = float(expected.detach().abs().max()) + 1e-30
        result[f"output{step + 1}"] = _largest_difference(out.detach(), expected.detach()) / scale
        out.backward(grad)
        expected.backward(grad)
        del out, expected
    result["weights"] = _largest_difference(ours.weights_dev.detach(), theirs.weights_dev.detach())
    state = theirs.momentum1_dev.detach()
    result["state"] = _largest_difference(ours.momentum1_dev.detach(), state) / (float(state.max()) + 1e-30)
    # Weights are at most 1 at first, where fp16 is spaced by 2^-11: the sides may round a row apart, and then differ by
    # that in the second output. The first output and the state are fp32 sums.
    limits = {"output1": 1e-6, "output2": 1e-3, "weights": 2e-3, "state": 1e-5}
    if not all(result[key] < limit for key, limit in limits.items()):
        raise GateError(f"differences {result}, allowed {limits}")
    return result


def _timed(tbe: Any, batch: Batch, grad: torch.Tensor, backlog: int) -> tuple[float, float]:
    """Forward and backward (ms) with `backlog` cycles of work queued ahead."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda._sleep(backlog)
    marks[0].record()
    out = _call(tbe, batch)
    marks[1].record()
    out.backward(grad)
    marks[2].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])


def _host(tbe: Any, batch: Batch, grad: torch.Tensor) -> tuple[float, float]:
    """Host time (us) to enqueue a forward and a backward."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = _call(tbe, batch)
    middle = time.perf_counter()
    out.backward(grad)
    end = time.perf_counter()
    torch.cuda.synchronize()
    return (middle - start) * 1e6, (end - middle) * 1e6


def _memory(tbe: Any, batch: Batch, grad: torch.Tensor) -> int:
    """Most bytes a backward takes beyond what was there before it."""
    out = _call(tbe, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(grad)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return {"p50": statistics.median(ordered), "p10": ordered[tenth], "p90": ordered[-1 - tenth]}


def measure(workload: Workload, precision: SparseType = SparseType.FP16, counted: int = COUNTED) -> dict[str, Any]:
    """One row of the report: times in ms, host times in us, memory in bytes."""
    device = torch.device("cuda", torch.cuda.current_device())
    batches = [make_batch(workload, seed, device) for seed in range(BATCHES)]
    ours = _module(TritonTableBatchedEmbeddingBags, workload, precision, False)
    theirs = _module(SplitTableBatchedEmbeddingBagsCodegen, workload, precision, False)
    ours.weights_dev.detach().uniform_(-1.0, 1.0)
    theirs.weights_dev.detach().copy_(ours.weights_dev.detach())
    grad = torch.randn(workload.batch, sum(workload.dims), device=device)
    row: dict[str, Any] = {"name": workload.name, "ids": batches[0].indices.numel()}
    row["gate"] = gate(ours, theirs, batches, grad)
    del ours, theirs
    gc.collect()
    torch.cuda.empty_cache()
    ours = _module(TritonTableBatchedEmbeddingBags, workload, precision, True)
    theirs = _module(SplitTableBatchedEmbeddingBagsCodegen, workload, precision, True)
    for tbe in (ours, theirs):
        tbe.weights_dev.detach().uniform_(-1.0, 1.0)
    times: dict[str, list[tuple[float, float]]] = {"triton": [], "fbgemm": [], "fbgemm2": []}
    for i in range(counted + 2):
        for side in times:
            theirs.is_experimental = side == "fbgemm2"
            tbe = ours if side == "triton" else theirs
            forward, backward = _timed(tbe, batches[i % BATCHES], grad, 20_000_000)
            if i >= 2:
                times[side].append((forward, backward))
    for side, pairs in times.items():
        row[side] = {
            "forward": _quantiles([f for f, _ in pairs]),
            "backward": _quantiles([b for _, b in pairs]),
            "sum": _quantiles([f + b for f, b in pairs]),
        }
    theirs.is_experimental = False
    for side, tbe in (("triton", ours), ("fbgemm", theirs)):
        host = [_host(tbe, batches[i % BATCHES], grad) for i in range(11)]
        row[side]["host_forward_us"] = statistics.median(f for f, _ in host)
        row[side]["host_backward_us"] = statistics.median(b for _, b in host)
        row[side]["backward_bytes"] = _memory(tbe, batches[0], grad)
    del ours, theirs, batches, grad
    gc.collect()
    torch.cuda.empty_cache()
    return row


def line(row: dict[str, Any]) -> str:
    """The row as a line of a table."""
    ours, theirs, theirs2 = row["triton"], row["fbgemm"], row["fbgemm2"]
    forward = min(theirs["forward"]["p50"], theirs2["forward"]["p50"])
    backward = min(theirs["backward"]["p50"], theirs2["backward"]["p50"])
    f, b = ours["forward"]["p50"], ours["backward"]["p50"]
    return (
        f"| {row['name']:30s} | {f:8.3f} | {forward:8.3f} | {forward / f:5.2f} "
        f"| {b:8.3f} | {backward:8.3f} | {backward / b:5.2f} "
        f"| {(forward + backward) / (f + b):5.2f} | {ours['host_forward_us']:5.0f}/{theirs['host_forward_us']:5.0f} "
        f"| {ours['host_backward_us']:5.0f}/{theirs['host_backward_us']:5.0f} "
        f"| {ours['backward_bytes'] / 2**20:6.0f}/{theirs['backward_bytes'] / 2**20:6.0f} |"
    )


HEADER = (
    "| workload | forward ms | FBGEMM | ratio | backward ms | FBGEMM | ratio "
    "| sum ratio | host fwd us | host bwd us | MiB bwd |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def _origin(commit: str) -> dict[str, Any]:
    """Where and how the figures were made."""
    if not commit:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or "unknown"
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {package: _compat.installed_version(package) for package in _compat.PACKAGES},
        "commit": commit,
        "command": "python -m torchrec_triton.bench.run " + " ".join(sys.argv[1:]),
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown: how it was made, then the table."""
    versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items())
    lines = [
        f"# {report['gpu']}, {report['date']}",
        "",
        f"{versions}. Commit {report['commit']}. `{report['command']}`",
        "",
        f"Medians of {report['counted']} runs a side; fp16 weights, fp32 output, exact row-wise Adagrad, stochastic "
        "rounding, bounds checks on. FBGEMM's forward is the faster of its two. A ratio above 1 says that Triton is "
        "faster. Host times and memory are Triton's / FBGEMM's.",
        "",
        HEADER,
        *(line(row) for row in report["rows"]),
    ]
    return "\n".join(lines + [f"\nNot timed, because the sides disagreed: {name}" for name in report["failed"]]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="comma-separated substrings of workload names")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; Markdown is put beside it")
    parser.add_argument("--counted", type=int, default=COUNTED, help="counted runs a side")
    parser.add_argument("--commit", default="", help="what is measured, where this is no git checkout")
    args = parser.parse_args()
    wanted = [w for w in args.only.split(",") if w]
    report: dict[str, Any] = {**_origin(args.commit), "counted": args.counted, "rows": [], "failed": []}
    print({key: report[key] for key in ("date", "gpu", "versions", "commit")})
    print(HEADER)
    for workload in real():
        if wanted and not any(w in workload.name for w in wanted):
            continue
        try:
            report["rows"].append(measure(workload, counted=args.counted))
            print(line(report["rows"][-1]), flush=True)
        except GateError as error:
            report["failed"].append(workload.name)
            print(f"| {workload.name:30s} | not timed: {error} |", flush=True)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1))
            args.output.with_suffix(".md").write_text(markdown(report))
    if report["failed"]:
        raise SystemExit(f"gate failed: {', '.join(report['failed'])}")


if __name__ == "__main__":
    main()
