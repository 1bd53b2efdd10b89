"""`torchrec-triton train` and `torchrec-triton ab`, on every rank; started alone or by torchrun or TorchX."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan

from torchrec_triton.ab import compare, report
from torchrec_triton.ab.arm import LaunchError, Place, place
from torchrec_triton.ab.sources import open_source
from torchrec_triton.config import Config, ConfigError, load_config
from torchrec_triton.plan.estimator import KERNELS
from torchrec_triton.plan.files import extent, load_plan
from torchrec_triton.plan.reasons import FUSED_TRITON, UnsupportedTableError, planned_device_type


def quiet(rank: int) -> None:
    """Show this package's warnings on rank 0; drop those of the libraries, which concern nobody who trains."""
    warnings.simplefilter("ignore")
    for library in ("", "torch", "torchrec"):
        logging.getLogger(library).setLevel(logging.ERROR)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("  %(message)s"))
    ours = logging.getLogger("torchrec_triton")
    ours.setLevel(logging.ERROR if rank else logging.WARNING)
    ours.handlers, ours.propagate = [handler], False


@record
def run(
    mode: str,
    config_path: str,
    output: Path,
    world_size: int = 0,
    plan_path: Path | None = None,
    checkpoint: Path | None = None,
    resume: Path | None = None,
    share_gpus: bool = False,
) -> int:
    """mode: "train" or "ab". The exit status: 0 pass, 1 a limit was broken, 2 a wrong command line or file.

    Rank 0 writes report.json to `output` (and report.md and report.html for "ab"), and prints. plan_path: a plan that
    `torchrec-triton plan` wrote. checkpoint, resume: folders that training ends with and starts from. world_size,
    share_gpus: see `place`.

    What can be wrong is looked for before training. An error that is none of the user's is raised; torchrun then shows
    the traceback of the rank that failed first, and ends the others.
    """
    try:
        config: Config = load_config(config_path)
        with place(world_size, share_gpus) as here:

            def say(line: str) -> None:
                if here.rank == 0:
                    print(line, flush=True)

            def progress(step: int, steps: int, loss: float) -> None:
                say(f"step {step} of {steps}, loss {loss:.4f}")

            plan = _plan(plan_path, config, here) if plan_path else None
            if plan and mode == "ab" and config.ab.plan == "replan":
                raise ConfigError("ab.plan: replan makes a plan for each arm, and --plan gives one: leave one out")
            if resume is not None and not (resume / ".metadata").exists():
                raise ConfigError(f"--resume {resume}: there is no checkpoint")
            source = open_source(config)
            _make_folders(here, {"--output": output, "--checkpoint": checkpoint})
            if mode == "train":
                arm, result = compare.train(config, here, source, progress, plan, resume)
                if checkpoint is not None:
                    arm.save(checkpoint)
            else:
                result = compare.compare(config, here, source, progress, plan)
                result["verdict"] = report.judge(result, config.ab.limits)
                say("\n" + report.text(result))
            if here.rank == 0:
                report.write(result, output)
            say(f"reports: {output}")
            here.settle()  # a launcher ends all ranks when one ends with a verdict of 1: not before the report is there
    except (ConfigError, LaunchError, UnsupportedTableError, PlannerError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if mode == "train" or result["verdict"]["passed"] else 1


def _make_folders(here: Place, folders: dict[str, Path | None]) -> None:
    """On rank 0; told on every rank, so that none waits for it."""
    problem = [""]
    for option, folder in folders.items() if here.rank == 0 else ():
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = [f"{option} {folder}: cannot make this folder: {error.strerror}"]
    dist.broadcast_object_list(problem)
    if problem[0]:
        raise ConfigError(problem[0])


def _plan(path: Path, config: Config, here: Place) -> ShardingPlan:
    try:
        plan = load_plan(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if list(plan.plan) != ["embeddings"]:
        raise ConfigError(
            f"{path}: this plan is of the module(s) {', '.join(plan.plan)}, and a configuration's tables are in one, "
            "embeddings"
        )
    tables = plan.plan["embeddings"]
    missing = [table.name for table in config.model.tables if table.name not in tables]
    if foreign := [table for table in tables if table not in config.kernels()]:
        raise ConfigError(f"{path}: the configuration has no table {', '.join(foreign)}, and the plan has")
    ranks = 1 + max((rank for table in tables.values() for rank in table.ranks or []), default=0)
    if missing or ranks > here.world_size or planned_device_type(tables) != here.device.type:
        device = f"{ranks} {planned_device_type(tables)} rank(s)"
        raise ConfigError(
            f"{path}: this plan is for {device} and the tables {', '.join(tables)}; this run has {here.world_size} "
            f"{here.device.type} rank(s){' and also ' + ', '.join(missing) if missing else ''}"
        )
    for table, sharding in tables.items():
        for shard in getattr(sharding.sharding_spec, "shards", []):
            rank, device = shard.placement.rank(), shard.placement.device()
            if device.type == "cuda" and device.index != rank % here.local_world_size:
                raise ConfigError(
                    f"{path}: table {table} lies on rank {rank} and GPU {device.index} in the plan, and rank {rank} "
                    f"has GPU {rank % here.local_world_size} here: make a plan with --local-world-size "
                    f"{here.local_world_size}"
                )
    for table in config.model.tables:
        if (held := extent(tables[table.name])) not in ([], [table.rows, table.dim]):
            raise ConfigError(
                f"{path}: table {table.name} is [{', '.join(map(str, held))}] in the plan, and [{table.rows}, "
                f"{table.dim}] (rows, dim) in the configuration: make a plan for this configuration"
            )
        asked, planned = config.kernel_of(table.name), tables[table.name].compute_kernel
        if planned.startswith("quant"):
            raise ConfigError(f"{path}: table {table.name} has {planned} in the plan, which never trains")
        if asked not in ("auto", planned) and (planned in KERNELS or asked == FUSED_TRITON):
            raise ConfigError(
                f"{path}: table {table.name} has {planned} in the plan, and the configuration asks for {asked}: "
                "ask for auto to have what the plan says, or make a plan for this configuration"
            )
    return plan
