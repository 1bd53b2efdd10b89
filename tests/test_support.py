"""The support rules: complete against the packages' own signatures, and each reason fit to be read."""

from __future__ import annotations

import enum
import inspect
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrec_triton.support import FBGEMM_KEYS, HONOURED, KEYS, LIMITED, NO_EFFECT, markdown, unsupported_reasons

ROOT = Path(__file__).parent.parent

# Keywords of the constructor in FBGEMM 1.6.0; the signature of the installed release is read below.
FBGEMM_1_6_0 = """
    embedding_specs feature_table_map cache_algorithm cache_load_factor cache_sets cache_reserved_memory cache_precision
    weights_precision output_dtype enforce_hbm optimizer record_cache_metrics gather_uvm_cache_stats stochastic_rounding
    gradient_clipping max_gradient max_norm learning_rate eps momentum weight_decay weight_decay_mode eta beta1 beta2
    ensemble_mode emainplace_mode counter_based_regularization cowclip_regularization pooling_mode device
    bounds_check_mode uvm_non_rowwise_momentum use_experimental_tbe prefetch_pipeline stats_reporter_config table_names
    optimizer_state_dtypes multipass_prefetch_config global_weight_decay uvm_host_mapped extra_optimizer_config
    tbe_input_multiplexer_config embedding_table_index_type embedding_table_offset_type embedding_shard_info
    enable_raw_embedding_streaming res_params
"""


class OptimType(enum.Enum):
    EXACT_SGD = "exact_sgd"
    ADAM = "adam"


@dataclass
class Switches:
    use_rowwise_bias_correction: bool = False
    use_writeback_bwd_prehook: bool = False


def reasons(**keys: Any) -> list[str]:
    return unsupported_reasons(**{"device_type": "cuda", "interpreter": False, "capability": (9, 0), **keys})


def parameters(constructor: Any) -> list[str]:
    return [name for name in inspect.signature(constructor).parameters if name not in ("self", "kwargs", "args")]


def test_every_keyword_of_the_constructor_has_a_rule() -> None:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    assert set(parameters(SplitTableBatchedEmbeddingBagsCodegen.__init__)) <= set(KEYS)
    assert set(FBGEMM_1_6_0.split()) <= set(FBGEMM_KEYS)


def test_every_key_of_fused_params_has_a_rule() -> None:
    from fbgemm_gpu.tbe.ssd import SSDTableBatchedEmbeddingBags
    from torchrec.distributed import batched_embedding_kernel, embedding_sharding, fused_params
    from torchrec.distributed.types import CacheParams, KeyValueParams

    constants = {
        value
        for module, prefixes, suffixes in (
            (fused_params, ("FUSED_PARAM_",), ("",)),
            (batched_embedding_kernel, ("RES_", "ENABLE_"), ("_STR",)),
            (embedding_sharding, ("CACHE_", "USE_ONE_TBE"), ("",)),
        )
        for name, value in vars(module).items()
        if name.startswith(prefixes) and name.endswith(suffixes) and isinstance(value, str)
    }
    key_value = {*parameters(SSDTableBatchedEmbeddingBags.__init__), *(field.name for field in fields(KeyValueParams))}
    # "stats" is the planner's own; the others reach the operator, most of them with a prefix.
    cache = {field.name if field.name in KEYS else f"cache_{field.name}" for field in fields(CacheParams)} - {
        "cache_stats"
    }
    assert len(constants) > 10
    assert (constants | key_value | cache) - set(KEYS) == set()


def test_a_rule_says_how_or_why() -> None:
    for key, rule in KEYS.items():
        assert rule.effect in (HONOURED, NO_EFFECT, LIMITED), key
        assert rule.note, key
        assert ("allowed: " in rule.note) == (rule.effect == LIMITED), key


@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD", OptimType.EXACT_SGD])
@pytest.mark.parametrize("precision", ["FP32", "fp16", "BF16"])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_what_the_kernels_take(optimizer: Any, precision: str, pooling: str) -> None:
    group = {
        "optimizer": optimizer,
        "weights_precision": precision,
        "output_dtype": precision,
        "pooling_mode": pooling,
        "dims": (4, 128, 1028, 8192),
        "rows": (0, 1, 3_000_000_000),
        "embedding_table_index_type": torch.int32,
        "embedding_table_offset_type": torch.int64,
        "weight_decay_mode": "L2",
        "weight_decay": 0.1,
        "gradient_clipping": True,
        "max_gradient": 0.5,
        "max_norm": 0.0,
        "extra_optimizer_config": Switches(),
        "enable_raw_embedding_streaming": False,
        "bounds_check_mode": "V2_FATAL",
        "prefetch_pipeline": True,
        "cache_precision": "FP16",
    }
    assert reasons(locations=("DEVICE",), **group) == []
    assert unsupported_reasons(device_type="cpu", interpreter=True, locations=("HOST",), **group) == []
    assert unsupported_reasons(device_type="cuda", interpreter=False, **group) == []


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"device_type": "cpu"}, ["device_type=cpu", "TRITON_INTERPRET=1"]),
        ({"device_type": "mtia"}, ["device_type=mtia", "allowed: cuda"]),
        ({"capability": (7, 5)}, ["7.5", "allowed: 8.0"]),
        ({"locations": ("DEVICE", "MANAGED_CACHING")}, ["MANAGED_CACHING", "allowed: DEVICE"]),
        ({"locations": ("HOST",)}, ["HOST", "allowed: DEVICE"]),
        ({"optimizer": OptimType.ADAM}, ["optimizer=ADAM", "EXACT_SGD, EXACT_ROWWISE_ADAGRAD"]),
        ({"weights_precision": "INT8"}, ["weights_precision=INT8", "FP32, FP16, BF16"]),
        ({"data_type": "NFP8"}, ["weights_precision=NFP8", "FP32, FP16, BF16"]),
        ({"output_dtype": "INT8"}, ["output_dtype=INT8", "FP32, FP16, BF16"]),
        ({"pooling_mode": "NONE"}, ["pooling_mode=NONE", "SUM, MEAN"]),
        ({"pooling_mode": "MEAN", "weighted": True}, ["MEAN", "per-sample weights"]),
        ({"pooling_mode": "MEAN", "sharding_type": "grid_shard"}, ["MEAN", "GRID_SHARD", "sum"]),
        ({"sharding_type": "data_parallel"}, ["DATA_PARALLEL"]),
        ({"dims": (8, 10)}, ["dim 10", "multiple of 4"]),
        ({"dims": (8192, 8196)}, ["dim 8196", "allowed: up to 8192"]),
        ({"dims": iter((8196,))}, ["dim 8196"]),
        ({"max_norm": 1.0}, ["max_norm=1.0", "allowed: 0"]),
        ({"max_norm": "big"}, ["max_norm=big", "allowed: 0"]),
        ({"lr": 0.1}, ["lr=0.1", "allowed: learning_rate"]),
        ({"weight_decay_mode": "COUNTER"}, ["weight_decay_mode=COUNTER", "NONE, L2, DECOUPLE"]),
        ({"embedding_table_index_type": torch.int16}, ["embedding_table_index_type=torch.int16", "INT32, INT64"]),
        ({"extra_optimizer_config": Switches(use_writeback_bwd_prehook=True)}, ["use_writeback_bwd_prehook=True"]),
        ({"extra_optimizer_config": {"use_writeback_bwd_prehook": True}}, ["every switch off"]),
        ({"enable_raw_embedding_streaming": True}, ["enable_raw_embedding_streaming=True", "unset"]),
        ({"kvzch_tbe_config": object()}, ["kvzch_tbe_config", "key-value"]),
        ({"__register_tbe_row_alignment": 16}, ["__register_tbe_row_alignment=16", "quantised"]),
        ({"a_key_of_tomorrow": 3}, ["a_key_of_tomorrow=3", "no rule"]),
    ],
)
def test_a_reason_names_the_key_its_value_and_what_is_allowed(keys: dict[str, Any], words: list[str]) -> None:
    found = reasons(**keys)
    assert len(found) == 1, found
    for word in words:
        assert word in found[0]


def test_all_reasons_are_given_at_once() -> None:
    assert len(reasons(optimizer="ADAM", max_norm=1.0, output_dtype="INT8", locations=("MANAGED",))) == 4


def test_any_value_of_a_key_without_effect_is_taken() -> None:
    for key, rule in KEYS.items():
        if rule.effect != LIMITED and key != "embedding_specs":
            assert reasons(**{key: object()}) == [], key


def test_asking_needs_neither_torch_nor_the_package() -> None:
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('support', {str(ROOT / 'torchrec_triton' / 'support.py')!r})\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['support'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert module.unsupported_reasons(device_type='cuda', interpreter=False) == []\n"
        "assert not {'torch', 'triton', 'torchrec', 'fbgemm_gpu', 'torchrec_triton'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_documented_table_is_current() -> None:
    assert (ROOT / "docs" / "support.md").read_text() == markdown()
