"""TorchX components: training and A/B comparison on one or many hosts, each rank a process of torchrun's.

    torchx run -s local_cwd -cfg log_dir=logs torchrec_triton/components.py:ab -j 1x2 \\
        -- --config configs/ab_demo.yaml --output out

What follows `--` goes to `torchrec-triton ab` (or `train`); rank 0 writes the results to the folder after --output. A
rank that fails ends the job with a status other than 0 and its traceback, and so does a comparison beyond its limits.
Without log_dir, TorchX deletes the logs at the end. torchrun must be on PATH.

TorchX finds a component by `file:function`. The package registers no entry point, which would hide TorchX's own. TorchX
0.7 reads the annotations: they must not be postponed, and optional ones must have the old form.
"""

import re
from typing import Any, Dict, List, Optional  # noqa: UP035

from torchx import specs
from torchx.components import dist


def train(
    *arguments: str,
    j: str = "1x1",
    image: str = "",
    name: str = "torchrec-triton-train",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 8,
    gpu: int = -1,
    memMB: int = 65536,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """Train a configuration.

    Args:
        arguments: of `torchrec-triton train`, as --config FILE --output DIR
        j: hosts x processes on each, as 1x8; on a host with GPUs each process has its own, but for --share-gpus
        image: container image or folder, by default TorchX's
        name: of the job
        h: one of TorchX's named resources, in place of cpu, gpu and memMB
        cpu: cores a host
        gpu: GPUs a host, by default one a process; with --share-gpus say how many
        memMB: host memory in MB
        env: environment variables, as TRITON_INTERPRET=1
        mounts: as type=bind,src=/host,dst=/job
    """
    return _job("train", arguments, j, gpu, image, name=name, h=h, cpu=cpu, memMB=memMB, env=env, mounts=mounts)


def ab(
    *arguments: str,
    j: str = "1x1",
    image: str = "",
    name: str = "torchrec-triton-ab",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 8,
    gpu: int = -1,
    memMB: int = 65536,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """Train with two kernels in turns and compare.

    Args:
        arguments: of `torchrec-triton ab`, as --config FILE --output DIR
        j: hosts x processes on each, as 1x8; on a host with GPUs each process has its own, but for --share-gpus
        image: container image or folder, by default TorchX's
        name: of the job
        h: one of TorchX's named resources, in place of cpu, gpu and memMB
        cpu: cores a host
        gpu: GPUs a host, by default one a process; with --share-gpus say how many
        memMB: host memory in MB
        env: environment variables, as TRITON_INTERPRET=1
        mounts: as type=bind,src=/host,dst=/job
    """
    return _job("ab", arguments, j, gpu, image, name=name, h=h, cpu=cpu, memMB=memMB, env=env, mounts=mounts)


def _job(
    command: str, arguments: tuple[str, ...], j: str, gpu: int, image: str, env: dict[str, str] | None, **keywords: Any
) -> specs.AppDef:
    shape = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", j)
    if shape is None:  # a bare number means hosts in some releases of TorchX and processes in others
        raise ValueError(f"-j {j}: give hosts x processes on each, for example 1x2")
    hosts, processes = (int(number) for number in shape.groups())
    # A .torchxconfig may set j, in some releases over the command line's: who wants to be sure says --world-size after
    # `--`.
    given = any(argument.partition("=")[0] == "--world-size" for argument in arguments)
    expected = () if given else ("--world-size", str(hosts * processes))
    start = dist.torchrun if hasattr(dist, "torchrun") else dist.ddp  # its name until TorchX 0.7
    return start(
        command,
        *arguments,
        *expected,
        m="torchrec_triton.cli",
        j=j,
        gpu=processes if gpu < 0 else gpu,
        env=dict(env or {}),
        **keywords,
        **({"image": image} if image else {}),
    )
