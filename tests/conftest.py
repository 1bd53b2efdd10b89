"""Set-up of all tests: the interpreter where there is no GPU, skips, one deterministic hypothesis profile."""

from __future__ import annotations

import os

import pytest
import torch

# Triton reads the variable when a kernel is decorated, so it has to be set before any test module imports the package.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Fewer threads than cores: the tests run in several processes, and the interpreter does not gain from more.
torch.set_num_threads(1)

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU host may carry the GPU tests only, which do without
    pass
else:
    settings.register_profile(
        "deterministic",
        derandomize=True,
        deadline=None,  # the interpreter's time is no property of the code
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("deterministic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        need = 2 if "multigpu" in item.keywords else 1 if "gpu" in item.keywords else 0
        if devices < need:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA device(s), {devices} found"))


@pytest.fixture
def device() -> torch.device:
    """Where the operator runs here: the GPU, or CPU tensors in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no test depends on what some GPU was measured to do: plans are made without rates, or with a test's."""
    monkeypatch.setattr("torchrec_triton.plan.rates.known_rates", dict)
