"""Compiles a model's kernels before its first step: on a cold cache that takes tens of seconds, which ranks that wait
in a collective take for a hang."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import torch
from torch import nn

from torchrec_triton.module.tbe import TritonTableBatchedEmbeddingBags

logger = logging.getLogger("torchrec_triton")


def warm_up(
    model: nn.Module, *, weighted: bool | None = None, vbe: bool = False, ids: torch.dtype = torch.int64
) -> tuple[int, float]:
    """Compiles what the Triton operators inside `model` launch in a training step. No table changes.

    Call it on every rank, after the model is sharded and before the first step.

    weighted: calls come with per-sample weights; by default as TorchRec's configuration of the tables says, and not for
    operators outside of TorchRec. vbe: with variable batch size. ids: type of indices and offsets.

    Returns:
        (kernels that were compiled or loaded, seconds). One line is logged.
    """
    start, kernels = time.perf_counter(), 0
    for operator, has_weights in _operators(model):
        kernels += len(operator.warm_up(weighted=has_weights if weighted is None else weighted, vbe=vbe, ids=ids))
    seconds = time.perf_counter() - start
    logger.info("%d Triton kernels are ready after %.1f s", kernels, seconds)
    return kernels, seconds


def _operators(model: nn.Module) -> Iterator[tuple[TritonTableBatchedEmbeddingBags, bool]]:
    """Each Triton operator of a model and whether TorchRec's configuration gives it per-sample weights."""
    # Sharded collections keep their lookups in a list, where nn.Module does not look for them.
    roots = [model, *(lookup for module in model.modules() for lookup in getattr(module, "_lookups", []))]
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    weighted = {m._emb_module for m in modules if hasattr(m, "_emb_module") and m._config.is_weighted}
    for module in modules:
        if isinstance(module, TritonTableBatchedEmbeddingBags):
            yield module, module in weighted
