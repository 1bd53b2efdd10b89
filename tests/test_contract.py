"""What is leaned on beneath the public interfaces of TorchRec and FBGEMM: it exists, with the signature that is used.

docs/upstream.md says why each is needed and when it may go; a name that is missing there fails here too.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from distributed_harness import ranks
from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
from torchrec.distributed import collective_utils, embeddingbag, fp_embeddingbag, sharding_plan
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import (
    BaseEmbeddingSharder,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology, shard_estimators
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingEnv2D, ShardingStrategy
from torchrec_cases import Case, Table, lookups, shard, step

DOCUMENT = Path(__file__).parent.parent / "docs" / "upstream.md"
SHARDINGS = (
    TwPooledEmbeddingSharding,
    CwPooledEmbeddingSharding,
    TwCwPooledEmbeddingSharding,
    RwPooledEmbeddingSharding,
    TwRwPooledEmbeddingSharding,
    GridPooledEmbeddingSharding,
)
SPLIT = fbgemm.SplitTableBatchedEmbeddingBagsCodegen

# (owner, method, the parameters that we pass or override, in the order in which we rely on it)
METHODS: list[tuple[Any, str, str]] = [
    (GroupedPooledEmbeddingsLookup, "_create_embedding_kernel", "self config device pg sharding_type env"),
    (
        GroupedPooledEmbeddingsLookup,
        "__init__",
        "self grouped_configs device pg feature_processor scale_weight_gradients sharding_type env",
    ),
    *((sharding, "create_lookup", "self device fused_params feature_processor") for sharding in SHARDINGS),
    *((sharding, "__init__", "self sharding_infos env device") for sharding in SHARDINGS),
    (BatchedFusedEmbeddingBag, "__init__", "self config pg device sharding_type env"),
    (
        ShardedEmbeddingBagCollection,
        "__init__",
        "self module table_name_to_parameter_sharding env fused_params device",
    ),
    (
        ShardedEmbeddingBagCollection,
        "create_embedding_bag_sharding",
        "sharding_infos env device permute_embeddings qcomm_codecs_registry",
    ),
    (
        ShardedEmbeddingBagCollection,
        "create_grouped_sharding_infos",
        "module table_name_to_parameter_sharding prefix fused_params",
    ),
    (embeddingbag, "replace_placement_with_meta_device", "sharding_infos"),
    (EmbeddingBagCollectionSharder, "shard", "self module params env device module_fqn"),
    (EmbeddingBagCollectionSharder, "reshard", "self sharded_module changed_shard_to_params env device"),
    (BaseEmbeddingSharder, "__init__", "self fused_params qcomm_codecs_registry sharded_module_order_overwrite"),
    (BaseEmbeddingSharder, "compute_kernels", "self sharding_type compute_device_type"),
    (FeatureProcessedEmbeddingBagCollectionSharder, "__init__", "self ebc_sharder qcomm_codecs_registry"),
    (EmbeddingEnumerator, "_filter_compute_kernels", "self name allowed_compute_kernels sharding_type"),
    (EmbeddingEnumerator, "_filter_sharding_types", "self name allowed_sharding_types"),
    (EmbeddingEnumerator, "enumerate", "self module sharders"),
    (EmbeddingEnumerator, "populate_estimates", "self sharding_options"),
    (EmbeddingEnumerator, "__init__", "self topology batch_size constraints estimator"),
    (EmbeddingShardingPlanner, "plan", "self module sharders"),
    (EmbeddingShardingPlanner, "collective_plan", "self module sharders pg"),
    (EmbeddingPerfEstimatorConfig, "get_device_bw", "self compute_device compute_kernel"),
    (EmbeddingPerfEstimator, "__init__", "self topology constraints is_inference config"),
    (EmbeddingPerfEstimator, "estimate", "self sharding_options"),
    (EmbeddingStorageEstimator, "__init__", "self topology constraints"),
    (EmbeddingStorageEstimator, "estimate", "self sharding_options"),
    (shard_estimators, "get_num_poolings", "constraints so"),
    (collective_utils, "invoke_on_rank_and_broadcast_result", "pg rank func"),
    (sharding_plan, "get_default_sharders", ""),
    (
        SPLIT,
        "forward",
        "self indices offsets per_sample_weights feature_requires_grad batch_size_per_feature_per_rank "
        "total_unique_indices hash_zch_identities hash_zch_runtime_meta vbe_output vbe_output_offsets",
    ),
    (SPLIT, "prepare_inputs", "self indices offsets per_sample_weights batch_size_per_feature_per_rank"),
    (
        SPLIT,
        "_generate_vbe_metadata",
        "self offsets batch_size_per_feature_per_rank vbe_output vbe_output_offsets",
    ),
    (
        fbgemm,
        "check_allocated_vbe_output",
        "output_dtype batch_size_per_feature_per_rank vbe_output vbe_output_offsets",
    ),
    (SPLIT, "get_learning_rate", "self"),
    (SPLIT, "split_embedding_weights", "self"),
]


def identifier(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__name__', owner).split('.')[-1]}.{name}"


@pytest.mark.parametrize("owner, name, parameters", METHODS, ids=[identifier(o, n) for o, n, _ in METHODS])
def test_signature(owner: Any, name: str, parameters: str) -> None:
    found = list(inspect.signature(getattr(owner, name)).parameters)
    wanted = parameters.split()
    assert found[: len(wanted)] == wanted, found


# Attributes of live objects: of the first four lists after one training step.
SHARDING_ATTRIBUTES = ["_grouped_embedding_configs_per_rank", "_rank", "_pg", "_device", "_env"]
COLLECTION_ATTRIBUTES = ["_lookups", "_embedding_shardings", "module_sharding_plan"]
KERNEL_ATTRIBUTES = ["_emb_module", "_optim", "_config"]
OPERATOR_ATTRIBUTES = [
    "D_offsets",
    "bounds_check_mode_int",
    "bounds_check_warning",
    "current_device",
    "embedding_specs",
    "embedding_table_index_type",
    "enable_raw_embedding_streaming",
    "feature_table_map",
    "iter",
    "iter_cpu",
    "momentum1_host",
    "momentum1_physical_offsets",
    "optimizer",
    "optimizer_args",
    "output_dtype",
    "placeholder_autograd_tensor",
    "pooling_mode",
    "stats_reporter",
    "step",
    "table_names",
    "tbe_input_multiplexer",
    "timesteps_prefetched",
    "use_cpu",
    "use_writeback_bwd_prehook",
    "weight_decay_mode",
    "weights_host",
    "weights_physical_offsets",
    "weights_precision",
]
OPTIMIZER_ARGUMENTS = ["stochastic_rounding", "eps", "weight_decay", "gradient_clipping", "max_gradient", "max_norm"]
PLANNER_ATTRIBUTES = ["_enumerator", "_best_plan", "_storage_reservation", "_topology"]
ENUMERATOR_ATTRIBUTES = ["_constraints", "_compute_device", "_estimators"]
ESTIMATOR_ATTRIBUTES = ["_constraints", "_topology"]
SHARDER_ATTRIBUTES = ["_sharded_module_order_overwrite"]
VBE_FIELDS = ["B_offsets", "output_offsets_feature_rank", "B_offsets_rank_per_feature", "max_B", "output_size"]


def missing_attributes(case: Case) -> list[str]:
    """On a rank: what live objects of TorchRec and FBGEMM lack."""
    model = shard(case)
    step(model, case, 0)
    sharded = model.module.ebc
    missing = [name for name in COLLECTION_ATTRIBUTES if not hasattr(sharded, name)]
    for sharding in sharded._embedding_shardings:
        missing += [f"{type(sharding).__name__}.{name}" for name in SHARDING_ATTRIBUTES if not hasattr(sharding, name)]
    for lookup in lookups(model):
        for kernel in lookup._emb_modules:
            operator = kernel._emb_module
            missing += [name for name in KERNEL_ATTRIBUTES if not hasattr(kernel, name)]
            missing += [name for name in OPERATOR_ATTRIBUTES if not hasattr(operator, name)]
            missing += [name for name in OPTIMIZER_ARGUMENTS if not hasattr(operator.optimizer_args, name)]
    return missing


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("names", [("tw0", "cw", "twcw", "rw", "twrw"), ("grid",)])
def test_attributes_of_live_objects(names: tuple[str, ...]) -> None:
    """TorchRec's own `fused` kernel, so that nothing of ours can supply what is missing."""
    case = Case(tuple(Table(f"{name}_table", name, "fused") for name in names))
    assert ranks(2).run(missing_attributes, case) == [[], []]


def test_attributes_of_planner_and_sharder() -> None:
    topology = Topology(world_size=1, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology)
    for owner, names in (
        (planner, PLANNER_ATTRIBUTES),
        (EmbeddingEnumerator(topology, batch_size=1), ENUMERATOR_ATTRIBUTES),
        (EmbeddingPerfEstimator(topology=topology), ESTIMATOR_ATTRIBUTES),
        (EmbeddingStorageEstimator(topology=topology), ESTIMATOR_ATTRIBUTES),
        (EmbeddingBagCollectionSharder(), SHARDER_ATTRIBUTES),
    ):
        assert not [name for name in names if not hasattr(owner, name)], type(owner)


def test_classes_and_fields() -> None:
    assert EmbeddingComputeKernel.FUSED_TRITON.value == "fused_triton"
    assert {"compute_kernel", "embedding_tables", "fused_params", "data_type"} <= _fields(GroupedEmbeddingConfig)
    assert {"compute_kernel", "use_virtual_table"} <= _fields(ShardedEmbeddingTable)
    fields = {"sharding_type", "compute_kernel", "ranks", "sharding_spec", "output_dtype", "stochastic_rounding"}
    assert fields | {"cache_params", "enforce_hbm", "bounds_check_mode"} <= _fields(ParameterSharding)
    assert "sharding_strategy" in inspect.signature(ShardingEnv2D.__init__).parameters
    assert ShardingStrategy.FULLY_SHARDED.value == "fully_sharded"
    assert issubclass(TwCwPooledEmbeddingSharding, CwPooledEmbeddingSharding)
    assert not isinstance(GroupedPooledEmbeddingsLookup._create_embedding_kernel, staticmethod)
    assert set(VBE_FIELDS) <= set(fbgemm.invokers.lookup_args.VBEMetadata._fields)
    assert sharder_name(EmbeddingBagCollectionSharder().module_type)
    inner = EmbeddingBagCollectionSharder()
    assert FeatureProcessedEmbeddingBagCollectionSharder(inner)._ebc_sharder is inner
    assert "_embedding_bag_collection" in inspect.getsource(fp_embeddingbag)


def _fields(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_compiled_kernels_of_triton() -> None:
    """The launcher's way past Triton's own: what a launch returns, launches again; tests on a GPU do both."""
    from triton import knobs
    from triton.backends.nvidia import compiler
    from triton.compiler import CompiledKernel
    from triton.runtime.cache import get_cache_manager
    from triton.runtime.jit import JITFunction

    launch = inspect.getsource(CompiledKernel.__getitem__)
    assert "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, launch_metadata," in launch
    assert "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args)" in launch
    assert knobs.runtime.launch_enter_hook.calls == knobs.runtime.launch_exit_hook.calls == []
    assert "n_regs" in inspect.getsource(CompiledKernel)
    assert "launch_pdl" in inspect.getsource(compiler.CUDAOptions)
    assert "return kernel" in inspect.getsource(JITFunction.run)
    cache = get_cache_manager("00")
    assert {"get_file", "put"} <= {name for name in dir(cache) if not name.startswith("_")}


def test_every_name_is_documented() -> None:
    text = DOCUMENT.read_text()
    names = {name for _, name, _ in METHODS if name != "__init__"}
    names |= {*SHARDING_ATTRIBUTES, *COLLECTION_ATTRIBUTES, *KERNEL_ATTRIBUTES, *OPERATOR_ATTRIBUTES}
    names |= {*PLANNER_ATTRIBUTES, *ENUMERATOR_ATTRIBUTES, *ESTIMATOR_ATTRIBUTES, *SHARDER_ATTRIBUTES}
    names |= {*OPTIMIZER_ARGUMENTS, *VBE_FIELDS, "_ebc_sharder", "_embedding_bag_collection", "sharding_strategy"}
    names |= {"run", "function", "packed_metadata", "launch_enter_hook", "launch_exit_hook", "launch_pdl", "gdc_wait"}
    names |= {"n_regs", "metadata.shared", "triton.runtime.cache.get_cache_manager", "make_radix_sort"}
    names |= {"use_virtual_table", "is_qr_tbe"}  # FBGEMM 1.6 has no is_qr_tbe
    assert not {name for name in names if f"`{name}`" not in text}
