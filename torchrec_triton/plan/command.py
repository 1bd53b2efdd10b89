"""The plan of a configuration: what `torchrec-triton plan` and `explain` print and write."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from torchrec_triton.config import Config
from torchrec_triton.plan.configured import PlanningSharder, constraints_of, model_of
from torchrec_triton.plan.planner import make_planner
from torchrec_triton.plan.report import as_text


def plan_configuration(
    config: Config,
    kernels: dict[str, str],
    device_type: str,
    world_size: int = 1,
    local_world_size: int | None = None,
    memory: float | None = None,
    rates: str | None = None,
) -> tuple[ShardingPlan, str]:
    """The plan of a configuration's tables, and the text that explains it.

    kernels: table -> the kernel asked for. device_type, world_size, local_world_size: of the topology. memory: GiB of a
    device; None: of this machine's GPU, or what TorchRec supposes. rates: as of make_planner.

    Raises:
        ValueError: an argument that makes no topology, or rates that nobody knows.
        PlannerError, UnsupportedTableError: as make_planner's planner.
    """
    if device_type == "cuda" and memory is None and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    if memory is not None and not 0 < memory < math.inf:
        raise ValueError(f"memory of {memory:g} GiB: a device has more than 0, and not without end")
    if world_size < 1 or (local_world_size is not None and local_world_size < 1):
        raise ValueError(f"{world_size} rank(s), {local_world_size or world_size} a host: give 1 or more")
    if world_size % (local_world_size or world_size):
        raise ValueError(f"{world_size} rank(s) cannot be shared out to hosts of {local_world_size}")
    keywords: dict[str, Any] = {"local_world_size": local_world_size or world_size}
    if memory is not None:
        keywords["hbm_cap" if device_type == "cuda" else "ddr_cap"] = int(memory * 2**30)
    with _quiet():
        topology = Topology(world_size=world_size, compute_device=device_type, **keywords)
        planner = make_planner(
            kernels,
            topology,
            batch_size=config.data.batch_size,
            constraints=constraints_of(config),
            rates=rates,
            reproducible=True,
            debug=False,
            stats=[],
        )
        plan = planner.plan(model_of(config), [PlanningSharder(fused_params=config.torchrec_fused_params())])
    device = topology.devices[0].storage
    size = (device.hbm if device_type == "cuda" else device.ddr) / 2**30
    heading = f"plan for {world_size} {device_type} rank(s) with {size:.0f} GiB, {config.data.batch_size} samples each"
    return plan, as_text(planner.explain(), [heading, planner.note])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What planners warn of stands in the text, or doesn't concern one who only plans."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
