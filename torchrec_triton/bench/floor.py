"""Bytes that a step has to move, whatever the kernel, and the time that the card's limits allow for them.

A pass takes at least max(bytes of HBM / copy rate, bytes of L2 / L2 gather rate).
    forward   HBM: every distinct row once, ids, offsets and per-sample weights, the output once
              L2:  every looked-up row
    backward  HBM: the output's gradient once, every distinct row in and out, 64 B of state a distinct row (a 32-byte
                   sector in and out; 8 B a row where all rows are hit), ids, offsets, per-sample weights, the sort
              L2:  a gradient row for each lookup
The sort is counted as a radix sort of 8-bit digits that moves a key and a 4-byte payload of every id in and out each
pass, over the bits that the row keys need. It is the least that is done in practice, not a bound of theory.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from torchrec_triton.bench.config import Card
from torchrec_triton.bench.workloads import Batch, Workload

RUN_CLASSES = ("1", "2-4", "5-32", "33-255", "256+")
_UPPER = (1, 4, 32, 255)


def runs(workload: Workload, batch: Batch) -> dict[str, Any]:
    """Distinct rows of each table (`unique`), and runs and their lookups by length. A run is one row and all its
    lookups in the batch."""
    device = batch.indices.device
    bounds = batch.offsets[torch.tensor([0, *workload.bags], device=device).cumsum(0)].tolist()
    unique, counts = [], []
    for begin, end in itertools.pairwise(bounds):
        counts.append(torch.unique(batch.indices[begin:end], return_counts=True)[1])
        unique.append(counts[-1].numel())
    lengths = torch.cat(counts)
    kind = torch.bucketize(lengths, torch.tensor(_UPPER, device=device))
    number = torch.bincount(kind, minlength=len(RUN_CLASSES)).tolist()
    lookups = torch.bincount(kind, weights=lengths.double(), minlength=len(RUN_CLASSES)).long().tolist()
    return {
        "ids": batch.indices.numel(),
        "unique_rows": sum(unique),
        "unique": unique,
        "runs": dict(zip(RUN_CLASSES, number)),
        "run_lookups": dict(zip(RUN_CLASSES, lookups)),
        "longest_run": int(lengths.max()) if lengths.numel() else 0,
    }


def traffic(
    workload: Workload, batch: Batch, unique: list[int], weight_bytes: int, output_bytes: int = 4
) -> dict[str, dict[str, Any]]:
    """Bytes of each pass: {"forward" | "backward": {"hbm": {term: bytes}, "l2": bytes}}."""
    ids = batch.indices.numel()
    bags = workload.bags
    spans = batch.offsets[torch.tensor([0, *bags], device=batch.offsets.device).cumsum(0)].diff().tolist()
    rows = sum(u * d for u, d in zip(unique, workload.dims)) * weight_bytes
    looked_up = sum(n * d for n, d in zip(spans, workload.dims))
    inputs = sum(t.numel() * t.element_size() for t in (batch.indices, batch.offsets, batch.weights) if t is not None)
    output = math.prod(workload.output_shape) * output_bytes
    keys = sum(workload.rows)
    passes = -(-keys.bit_length() // 8)
    # A 32-byte sector in and out a row, or all states where the rows are dense.
    state = sum(min(64 * u, 8 * r) for u, r in zip(unique, workload.rows))
    sort = passes * 2 * ids * ((4 if keys < 2**31 else 8) + 4)
    return {
        "forward": {"hbm": {"rows": rows, "inputs": inputs, "output": output}, "l2": looked_up * weight_bytes},
        "backward": {
            "hbm": {"rows": 2 * rows, "state": state, "inputs": inputs, "output": output, "sort": sort},
            "l2": looked_up * output_bytes,
        },
    }


def floor_ms(bytes_moved: dict[str, Any], card: Card) -> float:
    """Least milliseconds of a pass."""
    hbm = sum(bytes_moved["hbm"].values()) / card.copy.terabytes_per_second
    return max(hbm, bytes_moved["l2"] / card.l2_gather.terabytes_per_second) * 1e-9
