"""How `fused_triton` enters TorchRec: sharder -> sharded collection -> sharding -> lookup -> compute kernel.

Each class is TorchRec's with one method changed; nothing of TorchRec is patched. Tables with any other compute kernel
take TorchRec's own way through the same classes, so one collection may mix `fused`, `fused_triton` and data-parallel
tables. The plan decides table by table (ParameterSharding.compute_kernel, see plan/planner.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    replace_placement_with_meta_device,
)
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
    ShardingStrategy,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface

from torchrec_triton.module.compute_kernel import BatchedFusedTritonEmbeddingBag
from torchrec_triton.plan.reasons import (
    FUSED,
    FUSED_TRITON,
    UnsupportedTableError,
    collection_reasons,
    planned_device_type,
)


class TritonPooledEmbeddingsLookup(GroupedPooledEmbeddingsLookup):
    """Builds our compute kernel for the groups marked `fused_triton`."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> nn.Module:
        if config.compute_kernel == EmbeddingComputeKernel.FUSED_TRITON:
            return BatchedFusedTritonEmbeddingBag(config, pg, device, sharding_type, env)
        return super()._create_embedding_kernel(config, device, pg, sharding_type, env)


class _TritonLookup:
    """Mixin of a sharding: its lookup is ours."""

    # As TorchRec tells its lookup, which pools MEAN by it. GRID goes by the name of TABLE_ROW_WISE there.
    _lookup_sharding_type: ShardingType | None = None
    # Of the TorchRec class beside this one.
    _grouped_embedding_configs_per_rank: list[list[GroupedEmbeddingConfig]]
    _rank: int
    _pg: dist.ProcessGroup | None
    _device: torch.device | None
    _env: ShardingEnv

    def create_lookup(
        self, device: torch.device | None = None, fused_params: Any = None, feature_processor: Any = None
    ) -> TritonPooledEmbeddingsLookup:
        return TritonPooledEmbeddingsLookup(
            grouped_configs=self._grouped_embedding_configs_per_rank[self._rank],
            pg=self._pg,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            sharding_type=self._lookup_sharding_type,
            env=self._env,
        )


class TritonTwPooledEmbeddingSharding(_TritonLookup, TwPooledEmbeddingSharding):
    pass


class TritonCwPooledEmbeddingSharding(_TritonLookup, CwPooledEmbeddingSharding):
    pass


class TritonTwCwPooledEmbeddingSharding(_TritonLookup, TwCwPooledEmbeddingSharding):
    pass


class TritonRwPooledEmbeddingSharding(_TritonLookup, RwPooledEmbeddingSharding):
    _lookup_sharding_type = ShardingType.ROW_WISE


class TritonTwRwPooledEmbeddingSharding(_TritonLookup, TwRwPooledEmbeddingSharding):
    _lookup_sharding_type = ShardingType.TABLE_ROW_WISE


class TritonGridPooledEmbeddingSharding(_TritonLookup, GridPooledEmbeddingSharding):
    _lookup_sharding_type = ShardingType.TABLE_ROW_WISE


_TRITON_SHARDINGS: dict[str, type[EmbeddingSharding]] = {
    ShardingType.TABLE_WISE.value: TritonTwPooledEmbeddingSharding,
    ShardingType.COLUMN_WISE.value: TritonCwPooledEmbeddingSharding,
    ShardingType.TABLE_COLUMN_WISE.value: TritonTwCwPooledEmbeddingSharding,
    ShardingType.ROW_WISE.value: TritonRwPooledEmbeddingSharding,
    ShardingType.TABLE_ROW_WISE.value: TritonTwRwPooledEmbeddingSharding,
    ShardingType.GRID_SHARD.value: TritonGridPooledEmbeddingSharding,
}


class TritonShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection in which tables may have the compute kernel `fused_triton`.

    Raises:
        UnsupportedTableError: a table marked `fused_triton` cannot run on Triton. Every rank judges all tables of the
            plan, not only its own, so all raise alike and none is left waiting in a collective.
    """

    def __init__(
        self,
        module: EmbeddingBagCollectionInterface,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_unsupported(module, table_name_to_parameter_sharding, env, fused_params, device)
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device, **kwargs)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding:
        sharding = _TRITON_SHARDINGS.get(sharding_infos[0].param_sharding.sharding_type)
        if sharding is None:  # DATA_PARALLEL
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        if device is not None and device.type == "meta":
            replace_placement_with_meta_device(sharding_infos)
        by_column = (
            {"permute_embeddings": permute_embeddings} if issubclass(sharding, CwPooledEmbeddingSharding) else {}
        )
        return sharding(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry, **by_column)


def _refuse_unsupported(
    module: EmbeddingBagCollectionInterface,
    params: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    fused_params: dict[str, Any] | None,
    device: torch.device | None,
) -> None:
    asked = [table for table, sharding in params.items() if sharding.compute_kernel == FUSED_TRITON]
    if not asked:
        return
    if device is None or device.type == "meta":  # a dry run on meta is judged by its plan
        device_type = planned_device_type(params) or "cuda"
    else:
        device_type = device.type
    reasons = collection_reasons(module, params, fused_params, device_type)
    if isinstance(env, ShardingEnv2D) and env.sharding_strategy == ShardingStrategy.FULLY_SHARDED:
        for table in asked:
            reasons[table].append("sharding_strategy=FULLY_SHARDED: TorchRec moves the weights away between steps")
    refused = {table: reasons[table] for table in asked if reasons[table]}
    if refused:
        raise UnsupportedTableError(refused)


class TritonEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """EmbeddingBagCollectionSharder that can build `fused_triton`, for use with DMP in the place of TorchRec's.

    compute_kernels_offered: what a planner may choose from on CUDA where TorchRec's sharder offers `fused`. TorchRec's
        own planner cannot tell the two kernels apart, so offer both only if each table's constraints name one of them
        (`make_planner` needs no such care).

    The other arguments are those of EmbeddingBagCollectionSharder.
    """

    def __init__(self, *args: Any, compute_kernels_offered: tuple[str, ...] = (FUSED_TRITON,), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unknown = set(compute_kernels_offered) - {FUSED, FUSED_TRITON}
        if unknown:
            raise ValueError(f"compute_kernels_offered has {sorted(unknown)}; allowed: {FUSED}, {FUSED_TRITON}")
        self._offered = compute_kernels_offered

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        kernels = super().compute_kernels(sharding_type, compute_device_type)
        if compute_device_type != "cuda" or FUSED not in kernels:
            return kernels
        return [*self._offered, *(kernel for kernel in kernels if kernel != FUSED)]

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TritonShardedEmbeddingBagCollection:
        return TritonShardedEmbeddingBagCollection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )

    def reshard(
        self,
        sharded_module: ShardedEmbeddingBagCollection,
        changed_shard_to_params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedEmbeddingBagCollection:
        for table, sharding in changed_shard_to_params.items():
            planned = sharded_module.module_sharding_plan[table].compute_kernel
            if sharding.compute_kernel != planned:
                raise ValueError(
                    f"table {table}: resharding moves shards and keeps the compute kernel {planned}; "
                    f"the new plan says {sharding.compute_kernel}. Shard anew and load a checkpoint to change it."
                )
        return super().reshard(sharded_module, changed_shard_to_params, env, device)

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        return TritonShardedEmbeddingBagCollection


class TritonFeatureProcessedEmbeddingBagCollectionSharder(FeatureProcessedEmbeddingBagCollectionSharder):
    """The same for a FeatureProcessedEmbeddingBagCollection: its inner collection is sharded by ours."""

    def __init__(
        self,
        ebc_sharder: TritonEmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(
            ebc_sharder or TritonEmbeddingBagCollectionSharder(qcomm_codecs_registry=qcomm_codecs_registry),
            qcomm_codecs_registry,
        )

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return self._ebc_sharder.compute_kernels(sharding_type, compute_device_type)
