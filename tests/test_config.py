"""Configuration files: what is read, and what a wrong one is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from torchrec_triton.config import Config, ConfigError, FusedParams, OptimizerName, load_config
from torchrec_triton.support import FBGEMM_KEYS

ROOT = Path(__file__).parents[1]
SMALLEST = "model: {tables: [{name: user, rows: 10, dim: 8}, {name: item_a, rows: 20, dim: 4}]}\n"


@pytest.fixture
def read(tmp_path):
    def read_text(text: str) -> Config:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_config(path)

    return read_text


def test_every_shipped_config_is_valid():
    paths = sorted((ROOT / "configs").glob("*.yaml"))
    demo = next(path for path in paths if path.name == "demo.yaml")
    assert load_config(demo).compute_kernel == "auto"


def test_defaults(read):
    config = read(SMALLEST)
    assert config.kernels() == {"user": "auto", "item_a": "auto"}
    assert config.model.tables[0].features == ("user",)
    assert (config.model.tables[1].pooling, config.model.tables[1].data_type) == ("SUM", "FP32")
    assert config.operator_keywords() == {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.01, "eps": 1e-8}


def test_the_other_arm_is_one_line_away(monkeypatch):
    """And a run's files stand where the configuration says, wherever it is started from; reports have no path of a
    machine where they stand below."""
    text = (ROOT / "configs" / "ab_demo.yaml").read_text()
    assert text.count("\ncompute_kernel: auto") == 1
    config = load_config(ROOT / "configs" / "ab_demo.yaml")
    assert (config.ab.baseline, config.compute_kernel) == ("fused", "auto")
    file, _, name = config.data.source.rpartition(":")
    assert name == "Instacart" and Path(file).resolve() == ROOT / "examples" / "instacart.py"
    monkeypatch.chdir(ROOT / "configs")
    assert load_config("ab_demo.yaml").data.source == f"{ROOT / 'examples' / 'instacart.py'}:Instacart"
    monkeypatch.chdir(ROOT)
    assert load_config("configs/ab_demo.yaml").data.source == "examples/instacart.py:Instacart"


def test_frozen_and_keyword_only(read):
    config = read(SMALLEST)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config(config.model)  # type: ignore[misc]


def test_the_first_matching_rule_decides(read):
    config = read(
        SMALLEST
        + "compute_kernel: fused\n"
        + "rules: [{tables: item_*, compute_kernel: fused_triton}, {tables: '*_a', compute_kernel: auto}]\n"
    )
    assert config.kernels() == {"user": "fused", "item_a": "fused_triton"}


def test_a_name_with_the_signs_of_a_pattern_is_a_name(read):
    rules = "[{tables: 'a[0]', compute_kernel: fused}]"
    config = read(f"model: {{tables: [{{name: 'a[0]', rows: 3, dim: 4}}]}}\nrules: {rules}")
    assert config.kernels() == {"a[0]": "fused"}


def test_keys_can_be_taken_from_another_mapping(read):
    config = read("model: {tables: [&first {name: a, rows: 3, dim: 4}, {<<: *first, name: b}]}")
    assert [(table.name, table.rows) for table in config.model.tables] == [("a", 3), ("b", 3)]


def test_numbers_without_a_dot_before_the_exponent_are_numbers(read):
    assert read(SMALLEST + "optimizer: {eps: 1e-6, learning_rate: 1}\n").optimizer.eps == 1e-6


def test_fused_params_become_fbgemm_members(read):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

    config = read(SMALLEST + "optimizer: {name: EXACT_SGD}\nfused_params: {weight_decay_mode: L2, max_gradient: 1.5}\n")
    assert config.torchrec_fused_params() == {
        "optimizer": EmbOptimType.EXACT_SGD,
        "learning_rate": 0.01,
        "eps": 1e-8,
        "weight_decay_mode": WeightDecayMode.L2,
        "max_gradient": 1.5,
    }


def test_every_name_is_fbgemms():
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import BoundsCheckMode, WeightDecayMode

    hints = get_type_hints(FusedParams, include_extras=True)
    assert set(hints) <= set(FBGEMM_KEYS)
    members = {key: set(get_args(hint)) for key, hint in hints.items() if get_origin(hint) is Literal}
    assert members.pop("output_dtype") <= set(SparseType.__members__)
    assert members == {
        "bounds_check_mode": set(BoundsCheckMode.__members__),
        "weight_decay_mode": set(WeightDecayMode.__members__),
    }
    assert set(get_args(OptimizerName)) <= set(EmbOptimType.__members__)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (SMALLEST + "compute_kernal: fused", ["compute_kernal", "did you mean compute_kernel?", "rules", "steps"]),
        (SMALLEST + "compute_kernel: fused_tritton", ["compute_kernel", "did you mean fused_triton?", "auto, fused"]),
        (SMALLEST + "compute_kernel: Fused_Triton", ["did you mean fused_triton?"]),
        (SMALLEST + "steps: 0", ["steps", "0", "1 and above"]),
        (SMALLEST + "steps: true", ["steps", "a whole number", "True"]),
        (SMALLEST + "steps: 1.5", ["steps", "a whole number", "1.5"]),
        (SMALLEST + "steps:", ["steps", "None"]),
        (SMALLEST + "seed: -1", ["seed", "-1"]),
        (SMALLEST + "optimizer: {learning_rate: fast}", ["optimizer.learning_rate", "a number", "'fast'"]),
        (SMALLEST + "optimizer: {learning_rate: .nan}", ["optimizer.learning_rate", "nan"]),
        (SMALLEST + "optimizer: {lr: 1}", ["optimizer.lr", "name, learning_rate, eps"]),
        (SMALLEST + "optimizer: {name: ADAGRAD}", ["optimizer.name", "EXACT_ADAGRAD"]),
        (SMALLEST + "optimizer: EXACT_SGD", ["optimizer", "keys and values", "'EXACT_SGD'"]),
        (SMALLEST + "fused_params: {eps: 1.0}", ["fused_params.eps", "under optimizer.eps"]),
        (SMALLEST + "fused_params: {lr: 1.0}", ["fused_params.lr", "under optimizer.learning_rate"]),
        (SMALLEST + "fused_params: {pooling_mode: MEAN}", ["fused_params.pooling_mode", "model.tables (pooling)"]),
        (SMALLEST + "fused_params: {embedding_specs: 3}", ["fused_params.embedding_specs", "model.tables (rows, dim)"]),
        (SMALLEST + "fused_params: {table_names: 3}", ["fused_params.table_names", "model.tables (name)"]),
        (SMALLEST + "fused_params: {extra_optimizer_config: {x: true}}", ["extra_optimizer_config", "no such key"]),
        (SMALLEST + "fused_params: {max_gradiant: 1}", ["fused_params.max_gradiant", "did you mean max_gradient?"]),
        (SMALLEST + "fused_params: {max_norm: big}", ["fused_params.max_norm", "a number", "'big'"]),
        (SMALLEST + "fused_params: {max_norm: -1}", ["fused_params.max_norm", "-1", "0 and above"]),
        (SMALLEST + "fused_params: {gradient_clipping: 1}", ["gradient_clipping", "true or false", "got 1"]),
        (SMALLEST + "fused_params: {bounds_check_mode: WARN}", ["'WARN'", "did you mean WARNING?", "V2_FATAL"]),
        (SMALLEST + "fused_params: {output_dtype: FP33}", ["fused_params.output_dtype", "'FP33'", "FP32, FP16, BF16"]),
        (SMALLEST + "fused_params: {weight_decay_mode: DECOUPLED}", ["did you mean DECOUPLE?", "COWCLIP"]),
        (SMALLEST + "fused_params: [1]", ["fused_params", "keys and values"]),
        (SMALLEST + "rules: [{tables: 'x*', compute_kernel: auto}]", ["rules[0].tables", "'x*'", "user, item_a"]),
        (SMALLEST + "rules: {tables: user}", ["rules", "a list"]),
        (SMALLEST + "data: {history: 5}", ["data.history", "batch_size, source, options"]),
        (SMALLEST + "data: {options: 5}", ["data.options", "keys and values", "got 5"]),
        (SMALLEST + "pipeline: sparse", ["pipeline", "'sparse'", "did you mean sparse_dist?", "base"]),
        (SMALLEST + "ab: {base_line: fused}", ["ab.base_line", "did you mean baseline?", "steps_a_turn"]),
        (SMALLEST + "ab: {baseline: fbgemm}", ["ab.baseline", "'fbgemm'", "auto, fused, fused_triton"]),
        (SMALLEST + "ab: {plan: freeze}", ["ab.plan", "did you mean frozen?", "replan"]),
        (SMALLEST + "ab: {limits: {speed: 1}}", ["ab.limits.speed", "did you mean speed_ratio?"]),
        (SMALLEST + "ab: {limits: {loss_difference: small}}", ["ab.limits.loss_difference", "a number", "'small'"]),
        (SMALLEST + "ab: {steps_a_turn: 0}", ["ab.steps_a_turn", "1 and above"]),
        ("model: {tables: [{name: a, rows: 3, dim: 4, sharding: [tw]}]}", ["sharding", "'tw'", "table_wise"]),
        ("model: {tables: [{name: a, rows: 3, dim: 4, sharding: [data_parallel]}]}", ["'data_parallel'", "row_wise"]),
        ("model: {tables: [{name: a, rows: 3, dim: 4, pooling_factor: -1}]}", ["pooling_factor", "-1", "0 and above"]),
        (SMALLEST + SMALLEST, ["model", "more than once"]),
        ("steps: 3", ["model", "missing"]),
        ("", ["the file", "keys and values"]),
        ("model: {tables: [{name: a, rows: 3}]}", ["model.tables[0].dim", "missing"]),
        ("model: {tables: [{name: a, rows: 3, dim: 6}]}", ["model.tables[0].dim", "6", "multiples of 4"]),
        ("model: {tables: [{name: a, rows: 3, dim: 4, data_type: FP64}]}", ["data_type", "FP32, FP16, BF16"]),
        (
            "model: {tables: [{name: a, rows: 3, dim: 4}, {name: a, rows: 3, dim: 4}]}",
            ["name", "'a'", "more than once"],
        ),
        ("model: {tables: [{name: a, rows: 3, dim: 4, features: [f, f]}]}", ["features", "'f'", "more than once"]),
        ("model: {tables: [}", ["run.yaml", "line 1"]),
        ("model: {tables: []}", ["model.tables", "at least one"]),
        ("model: {hidden: [], tables: [{name: a, rows: 3, dim: 4}]}", ["model.hidden", "at least one"]),
        ("model: {tables: [{name: a.b, rows: 3, dim: 4}]}", ["model.tables: name", "'a.b'", "without a dot"]),
        ("model: {tables: [{name: '', rows: 3, dim: 4}]}", ["model.tables: name", "''"]),
        (SMALLEST + "steps: 3\nseed: 1\nsteps: 4", ["steps", "more than once", f"line {SMALLEST.count(chr(10)) + 3}"]),
    ],
)
def test_a_wrong_file_is_told_the_key_and_what_is_allowed(read, text, parts):
    with pytest.raises(ConfigError) as error:
        read(text)
    assert "run.yaml" in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_file_that_is_not_utf_8_is_told(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"steps: \xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.yaml: .*utf-8.* can't decode"):
        load_config(tmp_path / "run.yaml")
