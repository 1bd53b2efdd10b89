"""Compiles the kernels for NVIDIA GPUs on a machine that has none, and says what came out. Run by test_compile.py.

    python tests/compile_kernels.py CASE CAPABILITY    # as in `fp16 90`; a JSON list on standard output

Launches of `kernels.ops` on meta tensors are compiled as on a GPU, with Triton's own specialisation, and stop there. So
this is what the interpreter can't see: the compiler's errors, its shared memory, registers and width of accesses.
TRITON_INTERPRET must be off.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from torchrec_triton.kernels import launch, ops
from torchrec_triton.kernels.common import Batch, TableLayout

META = torch.device("meta")


@dataclass(frozen=True)
class Case:
    """One call of the operator: a table and a feature for each of `dims`, bags of `length` lookups."""

    dims: tuple[int, ...]
    weights: torch.dtype
    output: torch.dtype = torch.float32
    ids: torch.dtype = torch.int64
    rows: int = 1000
    batch: int = 32768
    length: int = 20
    weighted: bool = False
    mean: bool = False
    vbe: bool = False
    trusted: bool = True
    adagrad: bool = True
    stochastic: bool = True
    decay: int = 0
    clip: float | None = None


# Every dtype, every flag of a kernel and every tile width, each in one case at least.
CASES = {
    "fp16": Case(dims=(128,), weights=torch.float16),
    # Just enough lookups for blocks of blocks.
    "fp16_few_ids": Case(dims=(128,), weights=torch.float16, weighted=True, decay=2, batch=448),
    "few_ids_mixed_dims": Case(dims=(4, 20, 100), weights=torch.float16, mean=True, batch=440),
    "short_bags": Case(dims=(96, 96), weights=torch.float16, length=8, vbe=True),
    "short_weighted_bags": Case(dims=(64,), weights=torch.float16, length=8, batch=65536, weighted=True),
    "fp32_mixed_dims": Case(
        dims=(4, 20, 100), weights=torch.float32, ids=torch.int32, weighted=True, trusted=False, decay=1, clip=1.0
    ),
    "bf16_mean": Case(dims=(60, 256), weights=torch.bfloat16, output=torch.bfloat16, mean=True, decay=2),
    "vbe_sgd": Case(
        dims=(12, 96),
        weights=torch.float16,
        output=torch.float16,
        vbe=True,
        weighted=True,
        adagrad=False,
        stochastic=False,
    ),
    "fp16_2048": Case(dims=(2048,), weights=torch.float16, vbe=True, mean=True, clip=0.5),
    "bf16_4096": Case(dims=(4092,), weights=torch.bfloat16, weighted=True, decay=1),
    "fp32_8192": Case(dims=(8192,), weights=torch.float32, weighted=True),
    # Keys, positions, gradient rows and offsets in 64 bits.
    "wide": Case(dims=(128,), weights=torch.float16, rows=2**31, batch=2**27, weighted=True),
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one variant of a kernel."""

    kernel: str
    flags: dict[str, Any]  # its constexpr arguments
    warps: int
    shared: int  # bytes
    stack: int  # bytes a thread, where spilled registers go
    wide_loads: int  # 128-bit loads in the code of a thread
    reduces: list[int]  # loops around each
    lost: int  # values that loops carry in the code before the compiler's passes and no longer behind them


class _Offline:
    """Stands in for Triton's driver: a GPU of one compute capability that is not there."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(case: Case, capability: int) -> list[Compiled]:
    """Every variant that a forward and a backward launch, compiled. From then on this process can't launch anything."""
    found: dict[str, Compiled] = {}
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        result = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        if result.hash not in found:
            found[result.hash] = _inspect(kernel, result, kwargs)

    triton.runtime.driver.set_active(_Offline(capability))
    JITFunction.run = compile_only
    launch._programmatic = lambda device: capability >= 90
    _step(case)
    return list(found.values())


def _step(case: Case) -> None:
    """The launches of a forward and a backward."""
    features = len(case.dims)
    starts = [0, *itertools.accumulate(case.rows * dim for dim in case.dims)]
    layout = TableLayout.build(
        rows=[case.rows] * features,
        dims=list(case.dims),
        weight_offsets=starts[:-1],
        state_offsets=[case.rows * t for t in range(features)],
        feature_table=list(range(features)),
        device=META,
    )
    bags = case.batch * features
    num_ids = bags * case.length
    offsets = torch.empty(bags + 1, dtype=case.ids, device=META)
    bag_output = batch_offsets = None
    if case.vbe:
        batch_offsets = torch.empty(features + 1, dtype=torch.int32, device=META)
        rank_offsets = torch.empty(features, 3, dtype=torch.int32, device=META)
        block_output = torch.empty(2 * features, dtype=torch.int64, device=META)
        bag_output = ops.bag_output_offsets(layout, block_output, batch_offsets, rank_offsets, bags)
    batch = Batch(
        indices=torch.empty(num_ids, dtype=case.ids, device=META),
        offsets=offsets,
        sample_weights=torch.empty(num_ids, device=META) if case.weighted else None,
        batch_size=case.batch,
        bag_output=bag_output,
        batch_offsets=batch_offsets,
        output_size=case.batch * layout.total_dim,
        mean=case.mean,
        trusted=case.trusted,
    )
    rule = ops.Rule(
        adagrad=case.adagrad,
        eps=1e-8,
        weight_decay=0.01 if case.decay else 0.0,
        weight_decay_mode=case.decay,
        max_gradient=case.clip,
        stochastic_rounding=case.stochastic,
    )
    optimizer = ops.Optimizer(rule, learning_rate=0.1, seed=2**62 + 5)
    weights = torch.empty(starts[-1], dtype=case.weights, device=META)
    state = torch.empty(layout.num_keys, device=META)
    output = torch.empty(batch.output_size, dtype=case.output, device=META)
    repairs = torch.empty(1, dtype=torch.int64, device=META)
    ops.check_offsets(layout, batch, repairs)
    ops.lookup(layout, weights, batch, output, repairs if case.trusted else None)
    if case.weighted:
        wanted = torch.empty(features, dtype=torch.int32, device=META) if case.vbe else None
        ops.sample_weight_grad(layout, weights, output, batch, wanted, case.clip)
    ops.update(layout, weights, state, output, batch, optimizer)


def _inspect(kernel: JITFunction, result: Any, kwargs: dict[str, Any]) -> Compiled:
    code = result.asm["ttgir"]
    names = {p.name for p in kernel.params if p.is_constexpr}
    return Compiled(
        kernel=kernel.__name__,
        flags={k: v if isinstance(v, int) else str(v) for k, v in kwargs.items() if k in names},
        warps=result.metadata.num_warps,
        shared=result.metadata.shared,
        stack=_stack(result.asm["cubin"]),
        wide_loads=len(re.findall(r"\bld\.global\S*\.(?:v4\.\w32|v2\.\w64)\b", result.asm["ptx"])),
        reduces=_depths(code, '"tt.reduce"'),
        lost=max(0, _carried(result.asm["ttir"]) - _carried(code)),
    )


def _depths(code: str, operation: str) -> list[int]:
    """Loops around each occurrence of an operation."""
    depths, regions = [], []  # of open braces: whether each is a loop's
    for line in code.splitlines():
        if operation in line:
            depths.append(sum(regions))
        for brace in re.findall(r"[{}]", re.sub(r"#\w+<.*?>|\{[^{}]*\}", "", line)):
            if brace == "}":
                regions.pop()
            else:
                regions.append("scf.for" in line or "scf.while" in line or " do {" in line)
    return depths


def _carried(code: str) -> int:
    return sum(values.count("=") for values in re.findall(r"iter_args\(([^)]*)\)", code))


def _stack(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)[1])


if __name__ == "__main__":
    print(json.dumps([asdict(c) for c in compiled(CASES[sys.argv[1]], int(sys.argv[2]))]))
