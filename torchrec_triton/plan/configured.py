"""What a configuration says to TorchRec's planner: its tables, their constraints, and a plan for them."""

from __future__ import annotations

from typing import get_args

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_triton.config import Config, ShardingTypeName
from torchrec_triton.plan.reasons import FUSED, FUSED_TRITON


class PlanningSharder(EmbeddingBagCollectionSharder):
    """Offers `fused_triton` to a planner, and needs no Triton to do so. To shard takes the sharder of module/."""

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        kernels = super().compute_kernels(sharding_type, compute_device_type)
        return [FUSED_TRITON if kernel == FUSED and compute_device_type == "cuda" else kernel for kernel in kernels]


def model_of(config: Config) -> nn.Module:
    """The tables as the collection `embeddings` of a model, without memory."""
    tables = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=list(table.features),
            pooling=PoolingType[table.pooling],
            data_type=DataType[table.data_type],
        )
        for table in config.model.tables
    ]
    collection = EmbeddingBagCollection(tables=tables, is_weighted=config.model.weighted, device=torch.device("meta"))
    return nn.ModuleDict({"embeddings": collection})


def constraints_of(config: Config) -> dict[str, ParameterConstraints]:
    return {
        table.name: ParameterConstraints(
            sharding_types=list(table.sharding or get_args(ShardingTypeName)),
            pooling_factors=[table.pooling_factor] * len(table.features),
        )
        for table in config.model.tables
    }
