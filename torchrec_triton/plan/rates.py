"""Measured times of both kernels on known GPUs, and what they say of the shapes in between.

A file is what `torchrec-triton bench --rates FILE` writes: where it comes from, the axes of a grid, and the
milliseconds of forward and backward of either kernel, for each point of it and for each further width of rows. Those of
known GPUs are in configs/rates/, which is installed with the package.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# Of an installed package, and of a checkout.
_FOLDERS = (Path(__file__).parents[1] / "rates", Path(__file__).parents[2] / "configs" / "rates")
_PROVENANCE = ("gpu", "date", "versions", "command", "commit")
_KERNELS = ("fused", "fused_triton")
_AXES = ("data_type", "weighted", "dim", "pooling", "reuse", "lookups")


class Shape(NamedTuple):
    """What the time of a lookup depends on.

    data_type: of the weights, FP32 or FP16 (which stands for BF16 too: its rows are as wide); weighted: by per-sample
    weights; dim: of the shard; pooling: lookups a bag; reuse: lookups a row, from which the run length follows.
    """

    data_type: str
    weighted: bool
    dim: float
    pooling: float
    reuse: float


class Line(NamedTuple):
    """Time (ms) of an operator: what a launch costs, and what each lookup adds."""

    launch: float
    lookup: float


@dataclass(frozen=True, eq=False)
class Rates:
    """gpu: as CUDA names it; date, versions, command, commit: of the measurement; axes: name -> values, ascending;
    width: kernel -> what an operator takes longer for each width of its rows beyond the first; times: (a value of each
    axis) -> kernel -> what it takes. Both are (forward, backward) in ms."""

    gpu: str
    date: str
    versions: Mapping[str, str]
    command: str
    commit: str
    axes: Mapping[str, list[Any]]
    width: Mapping[str, tuple[float, float]]
    times: Mapping[tuple[Any, ...], Mapping[str, tuple[float, float]]]

    def line(self, kernel: str, phase: int, shape: Shape) -> Line:
        """Of tables of one shape; phase: 0 forward, 1 backward."""
        return _line(self, kernel, phase, shape)


@functools.lru_cache(maxsize=2**16)
def _line(rates: Rates, kernel: str, phase: int, shape: Shape) -> Line:
    few, many = rates.axes["lookups"][0], rates.axes["lookups"][-1]
    least, most = (_interpolated(rates, kernel, phase, shape, lookups) for lookups in (few, many))
    lookup = max(most - least, 0.0) / (many - few)
    return Line(max(least - few * lookup, 0.0), lookup)


def _interpolated(rates: Rates, kernel: str, phase: int, shape: Shape, lookups: int) -> float:
    """Linear in the logarithms between the neighbours on each axis. Beyond an axis its last value holds, but wider rows
    take longer in proportion."""
    axes = [_neighbours(rates.axes[axis], getattr(shape, axis)) for axis in ("dim", "pooling", "reuse")]
    logarithm = 0.0
    for corner in itertools.product(*axes):
        point = (shape.data_type, shape.weighted, *(value for value, _ in corner), lookups)
        logarithm += math.prod(share for _, share in corner) * math.log(rates.times[point][kernel][phase])
    return math.exp(logarithm) * max(shape.dim / rates.axes["dim"][-1], 1.0)


def _neighbours(values: list[float], at: float) -> list[tuple[float, float]]:
    """The values around `at`, each with its share."""
    if at <= values[0] or at >= values[-1]:
        return [(values[0] if at <= values[0] else values[-1], 1.0)]
    above = next(i for i, value in enumerate(values) if value > at)
    low, high = values[above - 1], values[above]
    share = math.log(at / low) / math.log(high / low)
    return [(low, 1.0 - share), (high, share)]


def read_rates(path: Path) -> Rates:
    """
    Raises:
        ValueError: the file cannot be read, or lacks what `bench --rates` writes.
    """
    try:
        content = json.loads(path.read_text())
        axes = {axis: content["axes"][axis] for axis in _AXES}
        times = {tuple(row[axis] for axis in _AXES): row for row in content["rows"]}
        width = {kernel: content["width"][kernel] for kernel in _KERNELS}
        rates = Rates(**{key: content[key] for key in _PROVENANCE}, axes=axes, width=width, times=times)
        for point in itertools.product(*axes.values()):
            for kernel in _KERNELS:
                if min(times[point][kernel]) <= 0:
                    raise ValueError(f"{point}: {kernel} took no time")
        return rates
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} has no rates ({problem}); `torchrec-triton bench --rates FILE` writes them"
        ) from error


@functools.cache
def known_rates() -> Mapping[str, Rates]:
    """GPU -> its rates, of all that the package brings."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    files = sorted(folder.glob("*.json")) if folder else []
    return {rates.gpu: rates for rates in map(read_rates, files)}


def find_rates(source: str | Path | None, gpu: str | None) -> tuple[Rates | None, str]:
    """Rates to choose by; and the rule that is followed instead, "" if they are those of the GPU to train on.

    source: name of a known GPU, or a file. gpu: that of this machine, or None. On a GPU that nobody measured the
    kernels are taken to compare as on the first known one; if none is known, Triton runs wherever it can.

    Raises:
        ValueError: `source` is neither a known GPU nor a file of rates.
    """
    known = known_rates()
    if source is not None and Path(source).is_file():
        return read_rates(Path(source)), ""
    if str(source or gpu) in known:
        return known[str(source or gpu)], ""
    if source is not None:
        names = ", ".join(known) or "none"
        raise ValueError(f"rates {str(source)!r} is neither a file nor a known GPU; known: {names}")
    stand_in = next(iter(known.values()), None)
    rule = f"kernels are chosen as on {stand_in.gpu}" if stand_in else "fused_triton runs wherever it can"
    whose = gpu or "the GPU to train on (this machine has none)"
    return stand_in, (
        f"no measured rates of {whose}: {rule}. `torchrec-triton bench --rates FILE` measures them; name FILE, or a "
        "known GPU, as the planner's rates"
    )
