"""What the Triton kernels take, and why they leave the rest to FBGEMM: the one truth about it.

Pure rules on names and numbers. This module imports neither torch nor anything of the package, so a planner can ask on
a host without a GPU. Every answer follows from things that are known at construction and equal on all ranks.

`KEYS` holds one rule for every keyword that the constructor of FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen`
(1.6.0 to 1.8.0) or TorchRec's `fused_params` (1.6.1 to 1.9.2) accepts. `python -m torchrec_triton.support` prints the
table in docs/support.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MIN_CAPABILITY = (8, 0)
MAX_DIM = 8192  # a tile holds a whole row; wider ones are neither compiled nor tested
OPTIMIZERS = ("EXACT_SGD", "EXACT_ROWWISE_ADAGRAD")
DTYPES = ("FP32", "FP16", "BF16")
POOLING_MODES = ("SUM", "MEAN")
WEIGHT_DECAY_MODES = ("NONE", "L2", "DECOUPLE")
INDEX_TYPES = ("INT32", "INT64")

HONOURED = "honoured"
NO_EFFECT = "no effect"
LIMITED = "limited"


@dataclass(frozen=True)
class Rule:
    """How one key is treated.

    effect: HONOURED (every value is), NO_EFFECT (no value changes what the kernels do), or LIMITED (`accepts` decides;
        a value it refuses is a reason to use FBGEMM).
    note: how it is honoured, why it has no effect, or what is allowed; the end of a reason's sentence.
    accepts: LIMITED only: value -> bool.
    """

    effect: str
    note: str
    accepts: Callable[[Any], bool] = lambda value: True


def name_of(value: Any) -> str:
    """Upper-case name of an enum member, a torch.dtype or a string: PoolingMode.SUM, "sum" and "SUM" are all "SUM"."""
    return str(getattr(value, "name", value)).removeprefix("torch.").upper()


def _honoured(note: str) -> Rule:
    return Rule(HONOURED, note)


def _no_effect(why: str) -> Rule:
    return Rule(NO_EFFECT, why)


def _one_of(names: Iterable[str]) -> Rule:
    names = tuple(names)
    return Rule(LIMITED, f"allowed: {', '.join(names)}", lambda value: name_of(value) in names)


def _unset(why: str) -> Rule:
    return Rule(LIMITED, f"{why}; allowed: leave it unset", lambda value: not value)


_NO_CACHE = "it concerns tables in host memory behind a GPU cache, and every table here is wholly in one memory"
_OTHER_OPTIMIZER = "neither exact SGD nor exact row-wise Adagrad reads it"
_STREAMING_DETAIL = "a detail of enable_raw_embedding_streaming, which has to be off"
_KEY_VALUE = "it configures key-value (SSD or DRAM) tables, which are not kept in device memory"
_QUANTISED = "it configures quantised inference modules"
_REGROUPING = "TorchRec groups tables by it and removes it before the operator is built"

FBGEMM_KEYS: dict[str, Rule] = {
    "embedding_specs": _honoured("every table in device memory (see locations), any number of rows"),
    "feature_table_map": _honoured("several features may share a table"),
    "weights_precision": _one_of(DTYPES),
    "output_dtype": _one_of(DTYPES),
    "optimizer": _one_of(OPTIMIZERS),
    "pooling_mode": _one_of(POOLING_MODES),
    "learning_rate": _honoured("read at each forward; changing it compiles nothing"),
    "eps": _honoured("added outside the square root"),
    "stochastic_rounding": _honoured("fp16 and bf16 weights; unbiased, seeded, its own random stream"),
    "gradient_clipping": _honoured("each element of the output's gradient is clamped before anything is summed"),
    "max_gradient": _honoured("the bound of gradient_clipping"),
    "max_norm": Rule(LIMITED, "there is no cap on row norms; allowed: 0", lambda value: not value),
    "weight_decay": _honoured("by weight_decay_mode; no effect under NONE or exact SGD, as in FBGEMM"),
    "weight_decay_mode": _one_of(WEIGHT_DECAY_MODES),
    "momentum": _no_effect(_OTHER_OPTIMIZER),
    "eta": _no_effect(_OTHER_OPTIMIZER),
    "beta1": _no_effect(_OTHER_OPTIMIZER),
    "beta2": _no_effect(_OTHER_OPTIMIZER),
    "ensemble_mode": _unset("ensemble row-wise Adagrad is not implemented"),
    "emainplace_mode": _unset("EMA in-place row-wise Adagrad is not implemented"),
    "counter_based_regularization": _unset("counter-based regularization is not implemented"),
    "cowclip_regularization": _unset("CowClip regularization is not implemented"),
    "global_weight_decay": _unset("global weight decay is not implemented"),
    "optimizer_state_dtypes": _unset("the state is always fp32"),
    "extra_optimizer_config": Rule(
        LIMITED,
        "none of its switches is implemented; allowed: unset, or every switch off",
        lambda value: not any(getattr(value, "__dict__", {"value": value}).values()),
    ),
    "bounds_check_mode": _honoured("all modes, V2 forms too, also by FBGEMM_TBE_BOUNDS_CHECK_MODE"),
    "embedding_table_index_type": _one_of(INDEX_TYPES),
    "embedding_table_offset_type": _one_of(INDEX_TYPES),
    "device": _honoured("a CUDA device, or cpu under Triton's interpreter (see device_type)"),
    "table_names": _honoured("named in messages"),
    "embedding_shard_info": _honoured("kept for FBGEMM's own bookkeeping; the operator works on the local shard"),
    "cache_algorithm": _no_effect(_NO_CACHE),
    "cache_load_factor": _no_effect(_NO_CACHE),
    "cache_sets": _no_effect(_NO_CACHE),
    "cache_reserved_memory": _no_effect(_NO_CACHE),
    "cache_precision": _no_effect(_NO_CACHE),
    "record_cache_metrics": _no_effect(_NO_CACHE),
    "gather_uvm_cache_stats": _no_effect(_NO_CACHE),
    "enforce_hbm": _no_effect(_NO_CACHE),
    "uvm_host_mapped": _no_effect(_NO_CACHE),
    "prefetch_pipeline": _no_effect(_NO_CACHE),
    "multipass_prefetch_config": _no_effect(_NO_CACHE),
    "uvm_non_rowwise_momentum": _no_effect("the state is one number a row, or none"),
    "use_experimental_tbe": _no_effect("it chooses between FBGEMM's own forward kernels"),
    "stats_reporter_config": _unset("statistics are reported from inside FBGEMM's forward only"),
    "tbe_input_multiplexer_config": _unset("inputs are recorded from inside FBGEMM's forward only"),
    "enable_raw_embedding_streaming": _unset("raw embedding streaming hooks into FBGEMM's forward only"),
    "res_params": _no_effect(_STREAMING_DETAIL),
    "preallocated_host_buffers": _unset("tables are allocated in device memory"),
    "is_qr_tbe": _unset("quotient-remainder tables have their own operator"),
}

# What reaches the operator's rules from TorchRec but is no keyword of FBGEMM's constructor.
TORCHREC_KEYS: dict[str, Rule] = {
    "lr": Rule(LIMITED, "FBGEMM's constructor refuses it; allowed: learning_rate", lambda value: False),
    "use_one_tbe_per_table": _no_effect(_REGROUPING),
    "_batch_key": _no_effect(_REGROUPING),
    **{
        key: _no_effect(_STREAMING_DETAIL)
        for key in (
            "res_enabled_tables",
            "res_store_shards",
            "res_chunk_size",
            "res_num_consumers",
            "res_num_uvm_hit_copy_threads",
            "res_num_hbm_copy_threads",
            "res_hbm_drain_interval",
            "res_use_copy_done_token",
        )
    },
    "enable_hbm_streaming": _unset("raw embedding streaming hooks into FBGEMM's forward only"),
    **{
        key: _unset(_KEY_VALUE)
        for key in (
            "kvzch_tbe_config",
            "kv_zch_params",
            "embedding_cache_mode",
            "load_ckpt_without_opt",
            "max_l1_cache_size",
            "l2_cache_size",
            "backend_type",
            "bulk_init_chunk_size",
            "lazy_bulk_init_enabled",
            "enable_async_update",
            "flushing_block_size",
            "gather_ssd_cache_stats",
            "use_passed_in_path",
            "use_rowwise_bias_correction",
            "tbe_unique_id",
            "pg",
            "ps_hosts",
            "ps_max_key_per_request",
            "ps_client_thread_num",
            "ps_max_local_index_length",
            "ssd_storage_directory",
            "ssd_rocksdb_shards",
            "ssd_rocksdb_write_buffer_size",
            "ssd_memtable_flush_period",
            "ssd_memtable_flush_offset",
            "ssd_l0_files_per_compact",
            "ssd_rate_limit_mbps",
            "ssd_size_ratio",
            "ssd_compaction_trigger",
            "ssd_max_write_buffer_num",
            "ssd_cache_location",
            "ssd_uniform_init_lower",
            "ssd_uniform_init_upper",
            "ssd_block_cache_size_per_tbe",
        )
    },
    **{
        key: _unset(_QUANTISED)
        for key in (
            "__register_tbes_in_named_modules",
            "__register_quant_state_dict_split_scale_bias",
            "__register_tbe_row_alignment",
            "__register_tbe_bounds_check_mode",
            "__register_lengths_to_offsets_lookup",
            "__register_ssd_table_list",
            "__register_is_ssd_table",
        )
    },
}

KEYS: dict[str, Rule] = {**FBGEMM_KEYS, **TORCHREC_KEYS}


def unsupported_reasons(
    *,
    device_type: str,
    interpreter: bool,
    capability: tuple[int, int] | None = None,
    optimizer: Any = "EXACT_SGD",
    weights_precision: Any = "FP32",
    output_dtype: Any = "FP32",
    pooling_mode: Any = "SUM",
    dims: Iterable[int] = (),
    rows: Iterable[int] = (),
    locations: Iterable[Any] = (),
    weighted: bool = False,
    sharding_type: Any = None,
    data_type: Any = None,
    **keys: Any,
) -> list[str]:
    """Why the Triton kernels cannot run a table or a group of tables; [] if they can.

    Enum members and their names mean the same. Each reason is a sentence that names the key, its value and what is
    allowed, fit for the message "table t: <reason>".

    device_type: "cuda" or "cpu"; interpreter: TRITON_INTERPRET=1 is in force.
    capability: CUDA compute capability; None when not known (planning for another machine): then not judged.
    dims, rows, locations: of the tables' local shards: columns, rows, FBGEMM's EmbeddingLocation.
    weighted: per-sample weights are part of the configuration (TorchRec's is_weighted).
    sharding_type: TorchRec's ShardingType; None outside TorchRec.
    data_type: TorchRec's name for weights_precision; wins when given.
    keys: every other keyword of FBGEMM's constructor or of fused_params that was given. A key without a rule is a
        reason too: it may be new in FBGEMM, and nothing that was asked for is ignored. If FBGEMM does not know it
        either, FBGEMM's own TypeError follows.
    """
    dims = tuple(dims)
    optimizer, pooling_mode = name_of(optimizer), name_of(pooling_mode)
    sharding_type = None if sharding_type is None else name_of(sharding_type)
    reasons = [
        *_device_reasons(device_type, interpreter, capability, [name_of(location) for location in locations]),
        *(f"embedding dim {dim} is not a multiple of 4, which FBGEMM's storage requires" for dim in dims if dim % 4),
        *(f"embedding dim {dim} is wider than a tile; allowed: up to {MAX_DIM}" for dim in dims if dim > MAX_DIM),
        *(f"number of rows {count} is negative; allowed: 0 and more" for count in rows if count < 0),
    ]
    if sharding_type == "DATA_PARALLEL":
        reasons.append("sharding_type=DATA_PARALLEL: an update made inside backward would never be reduced over ranks")
    if pooling_mode == "MEAN" and weighted:
        reasons.append(
            "pooling_mode=MEAN with per-sample weights: FBGEMM's CPU and GPU kernels disagree on its meaning"
        )
    if pooling_mode == "MEAN" and sharding_type == "GRID_SHARD":
        reasons.append("pooling_mode=MEAN with sharding_type=GRID_SHARD: TorchRec returns the sum; allowed: SUM")
    given = {
        "weights_precision": weights_precision if data_type is None else data_type,
        "output_dtype": output_dtype,
        "optimizer": optimizer,
        "pooling_mode": pooling_mode,
        **keys,
    }
    return reasons + [reason for key, value in given.items() if (reason := _key_reason(key, value))]


def _device_reasons(
    device_type: str, interpreter: bool, capability: tuple[int, int] | None, locations: list[str]
) -> list[str]:
    reasons = []
    if device_type == "cpu" and not interpreter:
        reasons.append(
            "device_type=cpu: Triton runs on CPU tensors only under its interpreter (set TRITON_INTERPRET=1)"
        )
    elif device_type not in ("cpu", "cuda"):
        reasons.append(f"device_type={device_type}; allowed: cuda, or cpu under Triton's interpreter")
    if device_type == "cuda" and capability is not None and tuple(capability) < MIN_CAPABILITY:
        need = ".".join(map(str, MIN_CAPABILITY))
        reasons.append(f"compute capability {'.'.join(map(str, capability))} of the GPU; allowed: {need} and above")
    allowed = "HOST" if device_type == "cpu" else "DEVICE"
    for location in dict.fromkeys(locations):
        if location != allowed:
            reasons.append(f"table location {location} on {device_type}; allowed: {allowed}")
    return reasons


def _key_reason(key: str, value: Any) -> str | None:
    rule = KEYS.get(key)
    if rule is None:
        return f"{key}={value!r}: this version of torchrec_triton has no rule for the key; allowed: leave it out"
    if rule.accepts(value):
        return None
    return f"{key}={getattr(value, 'name', value)}: {rule.note}"


def markdown() -> str:
    """The text of docs/support.md."""
    need = ".".join(map(str, MIN_CAPABILITY))
    conditions = [
        f"- A GPU with CUDA and compute capability {need} or above; CPU tensors only under `TRITON_INTERPRET=1`.",
        "- Every table in `DEVICE` memory (`HOST` for CPU tensors); never `MANAGED` or `MANAGED_CACHING`.",
        f"- No embedding dim above {MAX_DIM}: a tile holds a whole row. Cut by columns, the shards' dims count.",
        "- `MEAN` pooling without per-sample weights, and not under `GRID_SHARD`.",
        "- Any sharding type but `DATA_PARALLEL`.",
        "- A key that is in neither table is a reason to use FBGEMM.",
    ]
    titles = {"FBGEMM's constructor": FBGEMM_KEYS, "Only in TorchRec's `fused_params`": TORCHREC_KEYS}
    lines = ["# What runs on Triton", ""]
    lines += ["Generated by `python -m torchrec_triton.support > docs/support.md`; do not edit.", ""]
    lines += ["A table that fails a condition, or has a `limited` key with another value, runs on FBGEMM's kernel;"]
    lines += [
        "under `strict` or `fused_triton` it is an error. An embedding dim that is no multiple of 4 is an error with"
    ]
    lines += ["or without them: FBGEMM's own assertion about the storage, which is used here too.", ""]
    lines += ["## Conditions", "", *conditions]
    for title, rules in titles.items():
        lines += ["", f"## Keys: {title}", "", "| key | effect | how, why, or what is allowed |", "|---|---|---|"]
        lines += [f"| `{key}` | {rule.effect} | {rule.note} |" for key, rule in rules.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
