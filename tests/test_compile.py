"""The kernels through the real compiler, for GPUs that need not be there. The interpreter knows nothing of this side.

compile_kernels.py compiles in a process of its own, as Triton decides between compiler and interpreter at import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compile_kernels import CASES

ROOT = Path(__file__).resolve().parent.parent
# Most shared memory of a block on sm_86, the least of the GPUs that are supported.
SHARED_BYTES = 99 * 1024
WARP_LOAD = 32 * 16  # bytes of one 128-bit load by all lanes of a warp
KERNELS = {
    "check_offsets_kernel", "tbe_fwd_kernel", "linearize_kernel", "count_runs_kernel", "write_runs_kernel",
    "partial_sums_kernel", "update_kernel",
}  # fmt: skip
RUNS = [(name, 90) for name in CASES] + [("fp16", 80), ("bf16_4096", 80), ("fp16", 86), ("fp16_2048", 86)]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory):
    """compiled(case name, capability) -> the kernels as dicts of compile_kernels.Compiled. Compiles each pair once."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    shared.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [p for p in (environment.get("PYTHONPATH"), str(ROOT)) if p]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(shared / "cache")}

    def compile_case(name: str, capability: int) -> list[dict[str, Any]]:
        answer = shared / f"{name}_{capability}.json"
        if not answer.exists():
            done = subprocess.run(
                [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), name, str(capability)],
                env=environment, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
            # Whole or not at all: another test process may look at any time.
            own = answer.with_suffix(f".{os.getpid()}")
            own.write_text(done.stdout)
            own.replace(answer)
        return json.loads(answer.read_text())

    return compile_case


@pytest.mark.parametrize(("name", "capability"), RUNS)
def test_every_kernel_compiles(compiled, name, capability):
    case, kernels = CASES[name], compiled(name, capability)
    expected = KERNELS | ({"sample_weight_grad_kernel"} if case.weighted else set())
    expected |= {"bag_output_kernel"} if case.vbe else set()
    assert {k["kernel"] for k in kernels} == expected
    few = "few" in name
    assert {k["flags"]["SUPER"] for k in _named(kernels, "partial_sums_kernel")} == ({1, 256} if few else {1, 64})
    assert {_classes(k) for k in _named(kernels, "update_kernel")} == ({(0, 3)} if few else {(0, 0), (1, 2), (3, 3)})
    early = {k["flags"]["EARLY"] for k in kernels if k["kernel"] not in ("tbe_fwd_kernel", "bag_output_kernel")}
    assert early == {few and capability >= 90}  # the lookup's depends on how many programs it has
    too_large = {k["kernel"]: k["shared"] for k in kernels if k["shared"] > SHARED_BYTES}
    assert not too_large


@pytest.mark.parametrize(("name", "capability"), RUNS)
def test_loops_keep_what_they_carry(compiled, name, capability):
    """Triton 3.6 takes the first value of what a loop carries where that only bounds an inner loop. So the length of
    the first tile's longest run held for all tiles, and lookups were dropped, on the GPU only."""
    kernels = compiled(name, capability)
    assert [kernel for kernel in kernels if kernel["lost"]] == []
    for kernel in _named(kernels, "update_kernel"):
        # In the loop over runs, or over tiles, which short and middle runs have within one over both.
        assert min(kernel["reduces"], default=9) >= (2 if _classes(kernel) == (1, 2) else 1), kernel
        if _classes(kernel) in ((1, 2), (0, 3)) and kernel["flags"]["RUNS"] > 1:
            assert 2 in kernel["reduces"], kernel
    for kernel in _named(kernels, "tbe_fwd_kernel"):
        # Each step of the check, of few ids or many, counts its wrong ones. The longest bag and the sum of lengths
        # choose the way; the loop over bags finds each bag's own length.
        checked = [1, 1] if kernel["flags"]["CHECK"] else []
        if kernel["flags"]["BAGS"] > 1:
            reduces = kernel["reduces"][len(checked) :]
            assert kernel["reduces"][: len(checked)] == checked and reduces[:2] == [0, 0] and 1 in reduces, kernel


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_common_case_has_no_spills_and_wide_loads(compiled, capability):
    """fp16 rows and fp32 gradients of D = 128 move 16 bytes a lane, and no register spills."""
    kernels = compiled("fp16", capability)
    assert {k["kernel"]: k["stack"] for k in kernels if k["stack"]} == {}
    for kernel in _named(kernels, "tbe_fwd_kernel"):
        # A tile before the loop and one in it, on both ways through the bags.
        _check_wide(kernel, 4 * kernel["flags"]["BAGS"] * 128 * 2)
    row = 128 * 4
    for kernel in _named(kernels, "update_kernel"):
        if _classes(kernel) == (3, 3):
            # Lookups, blocks, blocks of blocks.
            _check_wide(kernel, 3 * kernel["flags"]["LOOK"] * row)
        else:
            # A row of gradients and a row of weights for each run.
            _check_wide(kernel, kernel["flags"]["RUNS"] * (row + 128 * 2))
    for kernel in _named(kernels, "partial_sums_kernel"):
        _check_wide(kernel, kernel["flags"]["LOOK"] * row)


def _classes(kernel: dict[str, Any]) -> tuple[int, int]:
    return kernel["flags"]["LOWEST"], kernel["flags"]["HIGHEST"]


def _named(kernels: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    found = [k for k in kernels if k["kernel"] == name]
    assert found, name
    return found


def _check_wide(kernel: dict[str, Any], tile_bytes: int) -> None:
    assert kernel["wide_loads"] * kernel["warps"] * WARP_LOAD >= tile_bytes, (kernel, tile_bytes)
