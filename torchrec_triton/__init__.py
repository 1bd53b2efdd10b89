"""torchrec_triton: Triton table-batched embeddings as TorchRec's `fused_triton` compute kernel.

Importing this package imports nothing else: names are resolved when they are first used.
"""
from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "TritonTableBatchedEmbeddingBags": "module.tbe",
    "TritonEmbeddingBagCollectionSharder": "module.sharding",
    "TritonFeatureProcessedEmbeddingBagCollectionSharder": "module.sharding",
    "warm_up": "module.warm_up",
    "make_planner": "plan.planner",
    "with_compute_kernel": "plan.planner",
    "save_plan": "plan.files",
    "load_plan": "plan.files",
    "unsupported_reasons": "support",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
