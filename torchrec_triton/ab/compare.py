"""Train two arms in turns in one job and measure them: a report as plain data, which JSON can hold.

Both start from the same weights, see the same batches in the same order, and take turns (who goes first alternates), so
that a drift of the machine meets both alike. Times are those of the slowest rank at each step.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.profiler import ProfilerActivity, profile
from torchmetrics.functional.classification import binary_auroc
from torchrec.distributed.types import ShardingPlan

from torchrec_triton import __version__, _compat
from torchrec_triton.ab.arm import PHASES, Arm, Feed, Place, in_step, kernels_in
from torchrec_triton.ab.sources import Source
from torchrec_triton.config import Config, ConfigError

PERCENTILES = (50, 90, 99)
RESAMPLES = 2000
FEW_TURNS = 10  # a bootstrap of fewer misses the truth clearly more often than it says
_AHEAD = 2  # batches that a pipeline reads beyond the one it trains on
_CHUNK = 1 << 20  # rows that are compared at a time
Report = dict[str, Any]
Progress = Callable[[int, int, float], None]


def train(
    config: Config,
    here: Place,
    source: Source,
    progress: Progress,
    plan: ShardingPlan | None = None,
    resume: Path | None = None,
) -> tuple[Arm, Report]:
    """Train the configuration as it stands. The report has what `compare` says of an arm, the losses and the tables.

    plan: places and kernels of the tables; by default the planner chooses. resume: a checkpoint to go on
    from (see Arm.save), with the batches after those that it has seen, for `steps` more.

    Raises:
        ConfigError: the ranks' held-out batches differ in number or size.
    """
    _read_through(source, here)
    arm = Arm(config, here, source.dense, kernels_in(plan) if plan else config.kernels(), plan)
    if resume is not None:
        arm.load(resume)
    batches = islice(source.training(here.rank, here.world_size), arm.trained, None)
    feed = Feed(batches, config.steps, pin=here.device.type == "cuda")
    reader = feed.reader()
    for step in range(config.steps):
        feed.prepare(step + 1 + _AHEAD)
        arm.advance(reader, 1)
        _tell(progress, step + 1, config.steps, arm)
    timed = slice(min(config.ab.warmup, config.steps - 1), None)
    measured = _measured(arm, config, source, timed, _step_times(arm), None)
    return arm, {**_origin(config, here), **measured, "losses": _mean_over_ranks(arm).tolist(), "tables": arm.tables}


def compare(
    config: Config, here: Place, source: Source, progress: Progress, plan: ShardingPlan | None = None
) -> Report:
    """Arm A (`ab.baseline`) against arm B (the configuration as it stands), on every rank alike. In the report
    speed_ratio is of the times of A / those of B, memory_ratio of the memory of B / that of A.

    plan: where both arms' tables lie, and the kernels of B; by default the planner chooses, for A or for each arm (see
    `ab.plan`).

    Raises:
        ConfigError: too few steps are left to time, or the ranks' held-out batches differ in number or size.
        UnsupportedTableError: an arm's tables cannot have the `fused_triton` that was asked for by name.
    """
    ab = config.ab
    last = config.steps - ab.profile_steps
    if last - ab.warmup < 2:
        raise ConfigError(
            f"steps: {config.steps} steps less ab.warmup ({ab.warmup}) and ab.profile_steps ({ab.profile_steps}) leave "
            f"{max(0, last - ab.warmup)} to time; at least 2 are needed"
        )
    _read_through(source, here)
    a = Arm(config, here, source.dense, dict.fromkeys(config.kernels(), ab.baseline), plan, arms=2)
    frozen = plan or (a.plan if ab.plan == "frozen" else None)
    b = Arm(config, here, source.dense, kernels_in(plan) if plan else config.kernels(), frozen, arms=2)
    at_first = _differences(a.model.state_dict(), b.model.state_dict(), here)
    arms = {"A": a, "B": b}
    # A pipeline that reads to the end runs empty, and its last steps are shorter.
    batches = source.training(here.rank, here.world_size)
    feed = Feed(batches, config.steps + _AHEAD, pin=here.device.type == "cuda")
    readers = {name: feed.reader() for name in arms}
    for turn, step in enumerate(range(0, last, ab.steps_a_turn)):
        steps = min(ab.steps_a_turn, last - step)
        feed.prepare(step + steps + _AHEAD)
        for name in ("AB", "BA")[turn % 2]:
            here.settle()
            arms[name].advance(readers[name], steps)
        _tell(progress, step + steps, config.steps, b)
    feed.prepare(config.steps + _AHEAD)
    profiles = _profiles(arms, readers, here, ab.profile_steps)
    progress(config.steps, config.steps, float(b.losses[-1]))

    timed = slice(ab.warmup, last)
    times = {name: _step_times(arm) for name, arm in arms.items()}
    losses = {name: _mean_over_ranks(arm) for name, arm in arms.items()}
    weights = _differences(a.model.state_dict(), b.model.state_dict(), here)
    state = _differences(a.table_state(), b.table_state(), here)
    tables = []
    for table in config.model.tables:
        mine = {"A": a.tables[table.name], "B": b.tables[table.name]}
        tables.append(
            {
                "name": table.name,
                "rows": table.rows,
                "dim": table.dim,
                "data_type": table.data_type,
                **mine,
                "moved": any(mine["A"][key] != mine["B"][key] for key in ("sharding", "ranks")),
                "weight_difference": weights.pop(f"embeddings.embedding_bags.{table.name}.weight"),
                "state_difference": _worst(d for name, d in state.items() if name.rpartition(".")[0] == table.name),
            }
        )
    turns = np.arange(ab.warmup, last) // ab.steps_a_turn
    measured = {name: _measured(arm, config, source, timed, times[name], profiles[name]) for name, arm in arms.items()}
    peaks = [measured[name]["peak_memory_mb"] for name in "BA"]
    return {
        **_origin(config, here),
        "plan": "given" if plan else ab.plan,
        "notes": _notes(config, arms, here, len(set(turns))),
        "arms": measured,
        "speed_ratio": {f"p{p}": _ratio(times["A"][timed], times["B"][timed], p, turns) for p in PERCENTILES},
        "memory_ratio": max(peaks[0]) / max(peaks[1]) if all(peaks) else None,
        "initial_difference": max(d["absolute"] for d in at_first.values() if d),
        "loss_difference": _largest(losses["A"] - losses["B"]),
        "dense_difference": _worst(weights.values()),  # those of the tables are taken out
        "tables": tables,
        "timed": [ab.warmup, last],
        "curves": {
            "loss": {name: loss.tolist() for name, loss in losses.items()},
            "step_ms": {name: one.tolist() for name, one in times.items()},
        },
    }


def _read_through(source: Source, here: Place) -> None:
    """Every held-out batch once, so that a rank with fewer of them is told before hours of training, not after."""
    for _ in in_step(source.evaluation(here.rank, here.world_size)):
        pass


def _tell(progress: Progress, step: int, steps: int, arm: Arm) -> None:
    if step % 20 == 0 or step == steps:
        progress(step, steps, float(arm.losses[-20:].mean()))


def _measured(
    arm: Arm, config: Config, source: Source, timed: slice, times: np.ndarray, profiled: Report | None
) -> Report:
    """times: ms of each step, of which `timed` count."""
    here, phases, times = arm.here, _slowest(arm.phases)[timed], times[timed]
    peaks: list[Any] = [None] * here.world_size
    dist.all_gather_object(peaks, arm.peak)
    kernels = sorted({table["kernel"] for table in arm.tables.values()})
    return {
        "kernels": kernels,
        "step_ms": {
            **{f"p{p}": float(np.percentile(times, p)) for p in PERCENTILES},
            "mean": float(times.mean()),
        },
        "phase_ms": dict(zip(PHASES, phases.median(0).values.tolist())),
        "phase_spread_ms": dict(zip(PHASES, np.percentile(phases.numpy(), (10, 90), axis=0).T.tolist())),
        "profile": profiled,
        "examples_per_second": config.data.batch_size * here.world_size / float(times.mean()) * 1e3,
        "peak_memory_mb": [peak / 1e6 for peak in peaks] if here.device.type == "cuda" else None,
        "metrics": _scores(arm, source),
        "final_loss": float(_mean_over_ranks(arm)[-max(1, config.steps // 10) :].mean()),
    }


def _scores(arm: Arm, source: Source) -> dict[str, float]:
    """Of all ranks' held-out samples. normalized_entropy: log loss over that of always predicting the mean label."""
    here = arm.here
    mine = torch.stack(arm.predict(source.evaluation(here.rank, here.world_size)))
    gathered = [torch.empty_like(mine) for _ in range(here.world_size)]
    dist.all_gather(gathered, mine)
    logits, labels = torch.cat(gathered, dim=1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    mean = labels.double().mean()
    entropy = -(mean * mean.log() + (1 - mean) * (1 - mean).log())
    return {
        "log_loss": loss.item(),
        "auc": binary_auroc(torch.sigmoid(logits), labels.long()).item(),
        "normalized_entropy": (loss / entropy).item(),
        "samples": len(labels),
    }


def _profiles(arms: dict[str, Arm], readers: dict[str, Any], here: Place, steps: int) -> dict[str, Report | None]:
    """Of each arm: ms a step, on average, of the slowest rank, in which collectives ran (NCCL's kernels, or gloo's
    operations), and in which any GPU kernel or copy did."""
    cuda, collective = here.device.type == "cuda", "gloo:" if dist.get_backend() == "gloo" else "ncclDevKernel"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    spent = {name: {"collective": 0.0, "gpu": 0.0} for name in arms}
    if not steps:
        return dict.fromkeys(arms)
    if not cuda:  # there are no errors of CUPTI to lose, and Kineto's marks would fill the screen
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=activities):  # the first start takes long, and is no arm's
        torch.zeros(1, device=here.device).add_(1)
    for names, part in (("AB", steps - steps // 2), ("BA", steps // 2)):
        for name in names if part else "":
            here.settle()
            with profile(activities=activities) as profiler:
                arms[name].advance(readers[name], part)
                here.finish()
            spans: dict[str, list[tuple[float, float]]] = {"collective": [], "gpu": []}
            for event in profiler.events():
                span = (event.time_range.start, event.time_range.end)
                if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                    spans["gpu"].append(span)
                if event.name.startswith(collective):
                    spans["collective"].append(span)
            for key, found in spans.items():
                spent[name][key] += _covered(found) / 1e3 / steps
    everywhere: list[Any] = [None] * here.world_size
    dist.all_gather_object(everywhere, spent)
    largest = {name: {key: max(one[name][key] for one in everywhere) for key in spent[name]} for name in arms}
    return {
        name: {"steps": steps, "collective_ms": one["collective"], "gpu_ms": one["gpu"] if cuda else None}
        for name, one in largest.items()
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of what spans (begin, end) cover together."""
    covered, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def _step_times(arm: Arm) -> np.ndarray:
    """Milliseconds of each step on the slowest rank."""
    return _slowest(arm.phases.sum(1)).numpy()


def _slowest(times: Tensor) -> Tensor:
    """Largest over the ranks, element by element."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, times)
    return torch.stack(everywhere).amax(0)


def _mean_over_ranks(arm: Arm) -> Tensor:
    everywhere: list[Any] = [None] * arm.here.world_size
    dist.all_gather_object(everywhere, arm.losses.double())
    return torch.stack(everywhere).mean(0)


def _ratio(a: np.ndarray, b: np.ndarray, percentile: int, turns: np.ndarray) -> Report:
    """(percentile of A's times) / (that of B's) and its 95 % interval by bootstrap. turns: that of each step.

    Whole turns are drawn, of both arms together: steps of a turn follow each other and are slow or fast alike, and both
    arms' turns of one number had the same batches at nearly the same moment. Of few turns the interval is too narrow.
    """
    groups = np.split(np.arange(len(a)), np.flatnonzero(np.diff(turns)) + 1)
    ratios = []
    for drawn in np.random.default_rng(0).integers(0, len(groups), (RESAMPLES, len(groups))):
        steps = np.concatenate([groups[turn] for turn in drawn])
        ratios.append(np.percentile(a[steps], percentile) / np.percentile(b[steps], percentile))
    value = np.percentile(a, percentile) / np.percentile(b, percentile)
    return {"value": float(value), "interval": np.percentile(ratios, (2.5, 97.5)).tolist()}


def _differences(ours: dict[str, Any], theirs: dict[str, Any], here: Place) -> dict[str, Report | None]:
    """Name -> the largest difference over all ranks: absolute, and as a share of the largest value in either. None for
    optimizer state of a table that lies in other places in the other arm: cut otherwise, it has another meaning."""
    mine: dict[str, tuple[float, float] | None] = dict.fromkeys(ours.keys() ^ theirs.keys())
    for name in sorted(ours.keys() & theirs.keys()):
        pairs = _pairs(ours[name], theirs[name], here)
        worst = torch.zeros(2, dtype=torch.float64, device=here.device)
        for x, y in pairs or ():
            for first in range(0, len(x), _CHUNK):
                one, two = x[first : first + _CHUNK].float(), y[first : first + _CHUNK].float()
                if one.numel():
                    found = torch.stack([(one - two).abs().max(), torch.maximum(one.abs().max(), two.abs().max())])
                    worst = torch.maximum(worst, found.double())  # unlike Python's max, keeps a NaN
        mine[name] = None if pairs is None else tuple(worst.nan_to_num(math.inf, math.inf).tolist())
    everywhere: list[Any] = [None] * here.world_size
    dist.all_gather_object(everywhere, mine)  # a rank has no optimizer state for tables that it has no shard of
    result: dict[str, Report | None] = {}
    for name in dict.fromkeys(name for one in everywhere for name in one):
        found = [one[name] for one in everywhere if name in one]
        if None in found:
            result[name] = None
            continue
        absolute, largest = (max(values) for values in zip(*found))
        share = absolute / largest if 0 < largest < math.inf else absolute
        result[name] = {"absolute": absolute, "share": share}
    return result


def _pairs(x: Any, y: Any, here: Place) -> list[tuple[Tensor, Tensor]] | None:
    """Pieces that belong together. A table whose shards lie in other places is brought together on rank 0; None for
    such a table's state, which not every rank knows of."""
    if not isinstance(x, ShardedTensor) or not isinstance(y, ShardedTensor):
        return [(x, y)]
    where = [[(s.shard_offsets, str(s.placement)) for s in t.metadata().shards_metadata] for t in (x, y)]
    if where[0] == where[1]:
        return [(one.tensor, two.tensor) for one, two in zip(x.local_shards(), y.local_shards())]
    if len(x.size()) == 1:
        return None
    whole = [torch.empty(t.size(), dtype=t.dtype, device=here.device) if here.rank == 0 else None for t in (x, y)]
    x.gather(0, whole[0])
    y.gather(0, whole[1])
    return [(whole[0], whole[1])] if whole[0] is not None and whole[1] is not None else []


def _largest(difference: Tensor) -> float:
    return difference.abs().nan_to_num(math.inf, math.inf).max().item()


def _worst(differences: Iterable[Report | None]) -> Report | None:
    return max((d for d in differences if d is not None), key=lambda d: d["share"], default=None)


def _notes(config: Config, arms: dict[str, Arm], here: Place, turns: int) -> list[str]:
    kernels = [[table["kernel"] for table in arm.tables.values()] for arm in arms.values()]
    notes, tables = [], config.model.tables
    if kernels[0] == kernels[1]:
        on = "'s CPU kernels" if here.device.type == "cpu" and not _compat.interpreter_enabled() else ""
        what = f"FBGEMM{on}" if set(kernels[0]) == {"fused"} else "the same kernels"
        notes.append(
            f"Both arms ran {what}: this says nothing of Triton's speed. It shows that the comparison is fair."
        )
    elif here.device.type == "cpu":
        notes.append("Triton's kernels ran in its interpreter: times say nothing of a GPU's.")
    rounded = config.fused_params.get("stochastic_rounding", True) and any(t.data_type != "FP32" for t in tables)
    if rounded and (kernels[0] != kernels[1] or here.device.type == "cuda"):
        notes.append(
            "FP16 and BF16 weights are rounded stochastically: the arms draw other random numbers and drift apart."
        )
    if here.ranks_a_gpu > 1:
        notes.append(
            f"{here.ranks_a_gpu} ranks shared each GPU and talked over gloo, through the host's memory: times say "
            "nothing of ranks with GPUs of their own."
        )
    if turns < FEW_TURNS:
        notes.append(f"Only {turns} turns were timed: intervals of so few are too narrow. Take more steps.")
    return notes


def _origin(config: Config, here: Place) -> Report:
    device = torch.cuda.get_device_name(here.device) if here.device.type == "cuda" else f"CPU ({platform.machine()})"
    return {
        "torchrec_triton": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "world_size": here.world_size,
        "versions": {
            "python": platform.python_version(),
            **{package: _compat.installed_version(package) for package in _compat.PACKAGES},
        },
        "interpreter": _compat.interpreter_enabled(),
        "command": shlex.join(["torchrec-triton", *sys.argv[1:]]),
        "config": dataclasses.asdict(config),
    }
