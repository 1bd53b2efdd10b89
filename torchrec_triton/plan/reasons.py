"""What support.py says of tables that TorchRec describes: the bridge from TorchRec's names to its rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from torchrec_triton._compat import interpreter_enabled
from torchrec_triton.support import MAX_DIM, unsupported_reasons

FUSED = EmbeddingComputeKernel.FUSED.value
FUSED_TRITON = EmbeddingComputeKernel.FUSED_TRITON.value
_CUTS_COLUMNS = [
    kind.value for kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD)
]


class UnsupportedTableError(ValueError):
    """`fused_triton` was asked for by name and cannot be had. Raised alike on every rank, before any collective.

    reasons: table -> every reason.
    """

    def __init__(self, reasons: Mapping[str, list[str]]) -> None:
        self.reasons = dict(reasons)
        lines = [f"{len(self.reasons)} table(s) cannot have the compute kernel {FUSED_TRITON}:"]
        lines += [f"  table {table}: {'; '.join(why)}" for table, why in self.reasons.items()]
        lines += [f"Change what is named above, or ask for 'auto' or '{FUSED}' for these tables."]
        super().__init__("\n".join(lines))


def collection_reasons(
    module: EmbeddingBagCollectionInterface,
    params: Mapping[str, ParameterSharding],
    fused_params: dict[str, Any] | None,
    device_type: str,
) -> dict[str, list[str]]:
    """Why each table of `module` cannot run on Triton under its ParameterSharding; [] where it can.

    params: one for every table. fused_params: the sharder's. TorchRec itself merges the two with the optimizer that was
    applied to the parameter, so what is judged is what FBGEMM's constructor would be given.
    """
    # TorchRec rewrites what was given to apply_optimizer_in_backward in place; to judge must not change it.
    applied = [kwargs for parameter in module.parameters() for kwargs in getattr(parameter, "_optimizer_kwargs", ())]
    before = [dict(kwargs) for kwargs in applied]
    try:
        infos = ShardedEmbeddingBagCollection.create_grouped_sharding_infos(
            module, dict(params), "embedding_bags.", dict(fused_params or {})
        )
    finally:
        for kwargs, kept in zip(applied, before):
            kwargs.clear()
            kwargs.update(kept)
    reasons = {}
    for info in (info for group in infos.values() for info in group):
        table = info.embedding_config
        reasons[table.name] = sharding_reasons(
            info.param_sharding,
            device_type,
            (table.num_embeddings, table.embedding_dim),
            data_type=table.data_type,
            pooling_mode=table.pooling,
            weighted=table.is_weighted,
            **(info.fused_params or {}),
        )
        if table.use_virtual_table:
            reasons[table.name].append("use_virtual_table=True: only key-value kernels hold virtual tables")
    return reasons


def sharding_reasons(
    sharding: ParameterSharding, device_type: str, shape: tuple[int, int] | None = None, **keys: Any
) -> list[str]:
    """Why a table cannot run on Triton, from its place in a plan and what else is known of it.

    shape: (rows, dim) of the table, judged where the plan names no shards. keys: go to unsupported_reasons.
    """
    shapes = [shard.shard_sizes for shard in getattr(sharding.sharding_spec, "shards", [])]
    if not shapes and shape is not None:
        rows, dim = shape
        # Before planning nobody knows how narrow the columns are cut; the sharder judges the widths that come out.
        shapes = [(rows, dim % MAX_DIM or MAX_DIM if sharding.sharding_type in _CUTS_COLUMNS else dim)]
    return unsupported_reasons(
        device_type=device_type,
        interpreter=interpreter_enabled(),
        capability=torch.cuda.get_device_capability() if device_type == "cuda" and torch.cuda.is_available() else None,
        rows=sorted({rows for rows, _ in shapes}),
        dims=sorted({dim for _, dim in shapes}),
        sharding_type=sharding.sharding_type,
        **keys,
    )


def planned_device_type(params: Mapping[str, ParameterSharding]) -> str | None:
    """Type of the device that a plan puts tables on; None where it doesn't say (all DATA_PARALLEL)."""
    for sharding in params.values():
        for shard in getattr(sharding.sharding_spec, "shards", []):
            device = None if shard.placement is None else shard.placement.device()
            if device is not None and device.type != "meta":
                return str(device.type)
    return None
