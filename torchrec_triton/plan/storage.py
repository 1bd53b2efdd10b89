"""Memory of fused tables that TorchRec's own estimate leaves out."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption, Storage

from torchrec_triton.plan.estimator import collection_of, lookups_and_bags
from torchrec_triton.plan.reasons import FUSED, FUSED_TRITON
from torchrec_triton.support import name_of


def backward_bytes(kernel: str, dim: int, scaled: bool) -> float:
    """Bytes that a backward on a GPU takes for each lookup at its peak: sorted lookups, lists of runs, partial sums.

    From docs/benchmarks/2026-12-01-h200.json; a test holds them against the newest report there.
    Without cuda-cccl the sort of `fused_triton` takes what FBGEMM's does.
    """
    if kernel == FUSED:
        return 56 if scaled else 40
    return (28 if scaled else 24) + min(dim, 128) / 32


class StorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's, and row-wise Adagrad's state where only the sharder's fused_params name it (TorchRec looks at the
    parameter alone), and the backward's workspace, of each table as if all of a rank were one group."""

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        super().estimate(sharding_options, *args, **kwargs)
        (sharders,) = (*args, *kwargs.values())  # by module type; the argument's name is not the same in all releases
        for option in sharding_options:
            if option.compute_kernel not in (FUSED, FUSED_TRITON):
                continue
            applied = getattr(option.tensor, "_optimizer_classes", [None])[0]
            named = (sharders[option.module_type_key].fused_params or {}).get("optimizer")
            row_bytes = 4 if applied is None and name_of(named) == "EXACT_ROWWISE_ADAGRAD" else 0
            on_gpu = self._topology.compute_device == "cuda"
            workspace = self._workspace(option) if on_gpu and collection_of(option) else 0
            for shard in option.shards:
                rows, dim = shard.size
                size = rows * row_bytes + (workspace if rows * dim else 0)
                shard.storage += Storage(hbm=size, ddr=0) if on_gpu else Storage(hbm=0, ddr=size)

    def _workspace(self, option: ShardingOption) -> int:
        """Bytes on a rank with a shard of the table."""
        lookups, _ = lookups_and_bags(option, self._constraints, self._topology)
        collection = collection_of(option)
        mean = collection.embedding_bags[option.name].mode == "mean"
        scaled = collection.is_weighted() or (mean and option.compute_kernel == FUSED_TRITON)
        return round(lookups * backward_bytes(option.compute_kernel, option.tensor.shape[1], scaled))
