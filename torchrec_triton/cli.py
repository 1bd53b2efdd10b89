"""The command `torchrec-triton`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchrec_triton import __version__

if TYPE_CHECKING:
    from torchrec_triton.config import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. The exit status: 0 if all is well, 1 if a check failed, 2 for a wrong command line or file, 3
    for an error that nobody foresaw, with its traceback (Python alone would end with 1)."""
    parser = argparse.ArgumentParser(prog="torchrec-triton", description="Triton embedding tables for TorchRec.")
    parser.add_argument("--version", action="version", version=f"torchrec_triton {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="check the installed packages, the GPU and the compiler")
    doctor.set_defaults(run=_doctor)

    explain = commands.add_parser("explain", help="say which kernel each table of a configuration gets, and why")
    explain.add_argument("config", help="a YAML file such as configs/demo.yaml")
    explain.add_argument("--device", choices=("cuda", "cpu"), help="default: what this machine has")
    explain.set_defaults(run=_explain)

    plan = commands.add_parser("plan", help="plan a configuration's tables and write the plan")
    plan.add_argument("--config", required=True, help="a YAML file such as configs/demo.yaml")
    plan.add_argument("--topology", choices=("cuda", "cpu"), default="cuda", help="devices of the ranks")
    plan.add_argument("--output", metavar="FILE", help="JSON file that torchrec_triton.load_plan reads")
    plan.set_defaults(run=_plan)
    for command in (explain, plan):
        command.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks; default: %(default)s")
        command.add_argument("--local-world-size", type=int, metavar="N", help="ranks of a host; default: all")
        command.add_argument(
            "--memory", type=float, metavar="GIB", help="of a device; default: this GPU's, or TorchRec's"
        )
        command.add_argument(
            "--rates", help="a GPU of configs/rates/ or a file of `bench --rates`; default: this GPU's"
        )

    bench = commands.add_parser("bench", help="measure the kernels beside FBGEMM's on this machine's GPU")
    bench.add_argument("--config", default="configs/bench_h200.yaml", help="default: %(default)s")
    task = bench.add_mutually_exclusive_group()
    task.add_argument("--quick", action="store_true", help="fewer shapes and runs")
    bench.add_argument("--only", default="", metavar="PARTS", help="shapes with one of these, by comma, in their name")
    bench.add_argument("--counted", type=int, help="timed runs a side, instead of the configuration's")
    bench.add_argument("--output", default=".", metavar="PATH", help="folder or JSON file; its report is put beside it")
    task.add_argument("--render", metavar="FILE", help="only make the report of a JSON file anew; needs no GPU")
    task.add_argument("--rates", metavar="FILE", help="measure and write the rates by which the planner chooses")
    bench.add_argument("--commit", default="", help="what is measured, where this is no git checkout")
    bench.set_defaults(run=_bench)

    for name, what in (("train", "train a configuration"), ("ab", "train with two kernels side by side and compare")):
        command = commands.add_parser(name, help=what)
        command.add_argument("--config", required=True, help="a YAML file such as configs/ab_demo.yaml")
        command.add_argument("--output", required=True, type=Path, help="folder that rank 0 writes the report to")
        command.add_argument("--world-size", type=int, default=0, help="refuse to run with another number of processes")
        command.add_argument("--plan", type=Path, metavar="FILE", help="of `torchrec-triton plan`: places and kernels")
        command.add_argument(
            "--share-gpus", action="store_true", help="try more processes than GPUs, over gloo; times say nothing"
        )
        command.set_defaults(run=_train, checkpoint=None, resume=None)
        if name == "train":
            command.add_argument(
                "--checkpoint", type=Path, metavar="DIR", help="write weights and optimizer state here"
            )
            command.add_argument(
                "--resume", type=Path, metavar="DIR", help="go on from a checkpoint of either kernel, for `steps` more"
            )

    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except Exception:
        traceback.print_exc()
        return 3


def _doctor(options: argparse.Namespace) -> int:
    logging.disable(logging.ERROR)  # the report says it better than the log lines of a library that cannot be loaded
    from torchrec_triton import doctor

    report = doctor.examine()
    print(report)
    return 1 if report.problems else 0


def _explain(options: argparse.Namespace) -> int:
    """The plan of a configuration for a device like this machine's, with every reason."""
    from torchrec_triton import _compat
    from torchrec_triton.config import ConfigError, load_config

    try:
        config = load_config(options.config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    device_type, gpu = _device(options.device)
    print(
        f"{options.config} on {device_type}, Triton's interpreter {'on' if _compat.interpreter_enabled() else 'off'}\n"
    )
    kernels = config.kernels()
    problem = _compat.launch_problem("cuda" if gpu else "cpu")  # of this machine, whatever was asked about
    if problem:
        print(f"Triton cannot run here, so that auto means fused: {problem}\n")
        if named := [table for table, kernel in kernels.items() if kernel == "fused_triton"]:
            print(f"fused_triton is asked for by name, for {', '.join(named)}", file=sys.stderr)
            return 1
        kernels = dict.fromkeys(kernels, "fused")
    return _print_plan(options, config, kernels, device_type)


def _plan(options: argparse.Namespace) -> int:
    from torchrec_triton.config import ConfigError, load_config

    try:
        config = load_config(options.config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return _print_plan(options, config, config.kernels(), options.topology)


def _print_plan(options: argparse.Namespace, config: Config, kernels: dict[str, str], device_type: str) -> int:
    """What each table gets in the plan, which is written if `options` have an output."""
    from torchrec.distributed.planner.types import PlannerError

    from torchrec_triton.plan.command import plan_configuration
    from torchrec_triton.plan.files import save_plan
    from torchrec_triton.plan.reasons import UnsupportedTableError

    sizes = (options.world_size, options.local_world_size, options.memory)
    try:
        plan, text = plan_configuration(config, kernels, device_type, *sizes, options.rates)
    except (PlannerError, UnsupportedTableError, RuntimeError) as error:  # the last: no sharding type is allowed
        print(error, file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    if options.command == "plan" and options.output:
        try:
            save_plan(plan, options.output)
        except OSError as error:
            print(f"--output {options.output}: {error.strerror}", file=sys.stderr)
            return 2
    return 0


def _bench(options: argparse.Namespace) -> int:
    if options.render:
        from torchrec_triton.bench import report

        return report.render(options.render)
    if options.rates:
        from torchrec_triton.bench.rates import measure_rates

        return measure_rates(Path(options.rates), options.commit)
    from torchrec_triton.bench import run

    return run.main(options)


def _train(options: argparse.Namespace) -> int:
    from torchrec_triton.ab.run import quiet, run

    quiet(int(os.environ.get("RANK", 0)))
    more = (options.plan, options.checkpoint, options.resume, options.share_gpus)
    status: int = run(options.command, options.config, options.output, options.world_size, *more)
    return status


def _device(asked: str | None) -> tuple[str, bool]:
    """(device type, whether it is a GPU of this machine); the type is this machine's unless asked for by name."""
    import torch

    device_type = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    return device_type, device_type == "cuda" and torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
