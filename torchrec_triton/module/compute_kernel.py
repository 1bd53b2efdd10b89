"""`fused_triton` as TorchRec's lookups see it: FBGEMM's compute kernel with our operator inside."""

from __future__ import annotations

import dataclasses

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import distributed as dist
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import DataType

from torchrec_triton.module.tbe import TritonTableBatchedEmbeddingBags
from torchrec_triton.plan.reasons import UnsupportedTableError


class BatchedFusedTritonEmbeddingBag(BatchedFusedEmbeddingBag):
    """One group of tables on the Triton operator. Storage, names, optimizer and state dict are FBGEMM's `fused`.

    Raises:
        UnsupportedTableError: the operator cannot run this group. The sharder refuses such tables on all ranks before
            it comes to this; what only this rank can know (no Triton here, say) shows here.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
        env: ShardingEnv | None = None,
    ) -> None:
        super().__init__(_as_fused(config), pg, device, sharding_type, env)
        if device is not None and device.type == "meta":  # a dry run: shapes and names, nothing to launch
            return
        # Strict now, but not in calls: weights that come with MEAN tables are seen only then, and an error on the ranks
        # that hold such tables would leave the others waiting. FBGEMM's path runs those calls, as under `fused`.
        self._emb_module = TritonTableBatchedEmbeddingBags.adopt(self._emb_module)
        if self._emb_module.triton_reasons:
            raise UnsupportedTableError({table: self._emb_module.triton_reasons for table in config.table_names()})


def _as_fused(config: GroupedEmbeddingConfig) -> GroupedEmbeddingConfig:
    """A shallow copy marked `fused`: TorchRec maps no other device-memory kernel to a location.

    The tables' metadata stay the same objects, which TorchRec uses as dict keys later.
    """
    fused_params = dict(config.fused_params or {})
    if config.data_type == DataType.BF16:
        # TorchRec would set the (unused) cache's precision to bf16, which FBGEMM's constructor refuses.
        fused_params["cache_precision"] = SparseType.FP32
    return dataclasses.replace(
        config,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        embedding_tables=[
            dataclasses.replace(table, compute_kernel=EmbeddingComputeKernel.FUSED) for table in config.embedding_tables
        ],
        fused_params=fused_params,
    )
