"""The model that is trained, and initial weights that don't depend on where a plan puts them."""

from __future__ import annotations

from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.mlp import MLP

from torchrec_triton.config import Config, ConfigError
from torchrec_triton.plan.configured import model_of

_CHUNK = 1 << 24  # elements that are filled at a time


class Recommender(nn.Module):
    """DLRM-like: pooled embeddings and a bottom MLP over the dense features -> interaction -> MLP -> one logit.

    forward: Batch -> (mean log loss, (loss, logits [B], pooled [B, sum of the features' dims])), in the form that
    TorchRec's pipelines take. What is in the inner tuple carries no gradient.
    """

    def __init__(self, config: Config, dense: int, device: torch.device) -> None:
        super().__init__()
        model = config.model
        if bool(dense) != bool(model.bottom) and (model.bottom or model.interaction == "dot"):
            need = "has none: leave it out" if model.bottom else f"has {dense}: give the widths of layers over them"
            raise ConfigError(f"model.bottom: concerns dense features, of which {config.data.source} {need}")
        widths = {f"{table.name} {table.dim}": table.dim for table in model.tables}
        widths |= {f"bottom {model.bottom[-1]}": model.bottom[-1]} if model.bottom else {}
        if model.interaction == "dot" and len(set(widths.values())) > 1:
            raise ConfigError(
                f"model.interaction: dot multiplies vectors of one width, and here are {', '.join(widths)}; "
                "make them equal or set it to cat"
            )
        self.embeddings = model_of(config)["embeddings"]
        dims = {feature: table.dim for table in model.tables for feature in table.features}
        self.features, self.dot, self.dim = tuple(dims), model.interaction == "dot", model.tables[0].dim
        self.bottom = MLP(dense, list(model.bottom), device=device) if model.bottom else None
        vectors = len(dims) + bool(model.bottom)
        pairs = vectors * (vectors - 1) // 2 if self.dot else 0
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1, device=device), persistent=False)
        plain = model.bottom[-1] if model.bottom else dense  # as DLRM, products beside the dense vector only
        plain += 0 if self.dot and model.bottom else sum(dims.values())
        self.hidden = MLP(plain + pairs, list(model.hidden), device=device)
        self.output = nn.Linear(model.hidden[-1], 1, device=device)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        embeddings = self.embeddings(batch.sparse_features)  # in an order that depends on the plan
        pooled = torch.cat([embeddings[feature] for feature in self.features], dim=1)
        dense = batch.dense_features if self.bottom is None else self.bottom(batch.dense_features)
        parts = [dense] if self.dot and self.bottom is not None else [dense, pooled]
        if self.dot:
            vectors = torch.cat([dense, pooled], dim=1) if self.bottom is not None else pooled
            vectors = vectors.unflatten(1, (-1, self.dim))
            parts.append((vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]])
        logits = self.output(self.hidden(torch.cat(parts, dim=1))).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), pooled.detach())


@torch.no_grad()
def fill(weights: Tensor, table: str, seed: int, limit: float, row: int, column: int, dim: int) -> None:
    """Uniform numbers of [-limit, limit) for a shard [rows, columns] that begins at (row, column) of its table.

    Each is a hash of the table's name, the seed and its place, so that every plan starts from the same weights.
    dim: of the whole table.
    """
    rows, columns = weights.shape
    chunk = max(1, _CHUNK // max(1, columns))
    key = crc32(f"{table} {seed}".encode()) << 20
    for first in range(0, rows, chunk):
        count = min(chunk, rows - first)
        at = torch.arange(row + first, row + first + count, device=weights.device).unsqueeze(1) * dim + key
        mixed = at + torch.arange(column, column + columns, device=weights.device)
        for factor, shift in ((-0x61C8864680B583EB, 29), (-0x40A7B892E31B1A47, 32)):  # splitmix64's, as signed numbers
            mixed = mixed * factor
            mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)
        uniform = ((mixed >> 40) & 0xFFFFFF).float() / 2**23 - 1
        weights[first : first + count] = uniform * limit
