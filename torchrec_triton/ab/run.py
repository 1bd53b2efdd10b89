"""`torchrec-triton train` and `torchrec-triton ab`, on every rank; started alone or by torchrun or TorchX."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from torchrec_triton.config import Config, ConfigError, load_config


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
def run(mode: str, config_path: str, output: Path, world_size: int = 0) -> int:
    """mode: "train" or "ab". The exit status: 0 pass, 1 fail, 2 a wrong command line or file.

    Rank 0 writes report.json to `output` (and report.md and report.html for "ab"), and prints. An error that is none of
    the user's is raised; torchrun then shows the traceback of the rank that failed first, and ends the others.
    """
    from torchrec.distributed.planner.types import PlannerError

    from torchrec_triton.ab import compare, report
    from torchrec_triton.ab.arm import LaunchError, place
    from torchrec_triton.ab.sources import open_source
    from torchrec_triton.plan.reasons import UnsupportedTableError

    try:
        config: Config = load_config(config_path)
        with place(world_size) as here:

            def say(line: str, end: str = "\n") -> None:
                if here.rank == 0:
                    print(line, end=end, flush=True)

            def progress(step: int, steps: int, loss: float) -> None:
                say(f"step {step} of {steps}, loss {loss:.4f}")

            source = open_source(config)
            if mode == "train":
                _, result = compare.train(config, here, source, progress)
                result["passed"] = True
            else:
                result = compare.compare(config, here, source, progress)
                result["verdict"] = report.judge(result, config.ab.limits)
                say("\n" + report.text(result))
            if here.rank == 0:
                report.write(result, output)
            say(f"reports: {output}")
    except (ConfigError, LaunchError, UnsupportedTableError, PlannerError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if mode == "train" or result["verdict"]["passed"] else 1
