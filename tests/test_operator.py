"""The operator against the fp64 reference and against FBGEMM: small batches, in the interpreter where there is no GPU.

Memory that a kernel did not write is NaN here, so a read of it shows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType as OptimType
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    UserEnabledConfigDefinition,
)
from harness import (
    DTYPES,
    Batch,
    Case,
    U,
    build,
    check_output,
    check_update,
    check_weight_gradient,
    contents,
    make_batch,
    same_bits,
    spacing,
    specs,
    step,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cases

from torchrec_triton import TritonTableBatchedEmbeddingBags, _compat, support
from torchrec_triton.kernels import ops, transpose, tuning

FBGEMM = SplitTableBatchedEmbeddingBagsCodegen
MODES = ("FATAL", "WARNING", "IGNORE", "V2_FATAL", "V2_WARNING", "V2_IGNORE")

# One of each kind of input, for tests that are about something else.
PLAIN = Case(
    rows=(50, 7), dims=(8, 20), feature_table_map=(0, 0, 1), lengths=(2, 0, 5, 1, 3, 0, 4, 1, 2, 6, 0, 1), seed=1
)
WEIGHTED = replace(PLAIN, weighted=True)
MEAN = replace(PLAIN, mean=True)
VBE = replace(PLAIN, batch_sizes=((2, 1), (0, 4), (3, 2)))
KINDS = [pytest.param(case, id=name) for name, case in dict(plain=PLAIN, weighted=WEIGHTED, mean=MEAN, vbe=VBE).items()]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of runs share launches where lookups are few, and tables of all widths where they are fewer still."""
    taken = getattr(request, "param", "one bucket")
    if taken != "one bucket":
        sizes = {"few_elements": 0} | ({"few": 0} if taken == "many" else {})
        monkeypatch.setattr(tuning, "TILES", replace(tuning.TILES, **sizes))


every_way = pytest.mark.parametrize("way", ["one bucket", "few", "many"], indirect=True)


def one_table(rows: int, dim: int, ids: list[int], offsets: list[int], device: Any, **options: Any) -> tuple[Any, Any]:
    """A module with one table of ones and one batch of it: (module, (indices, offsets))."""
    case = Case(rows=(rows,), dims=(dim,), feature_table_map=(0,), lengths=())
    module = build(case, device, strict=True, eps=0.0, **options)
    module.split_embedding_weights()[0].fill_(1.0)
    return module, (torch.tensor(ids, device=device), torch.tensor(offsets, device=device))


def bag_gradient(values: list[float], dim: int, device: Any) -> torch.Tensor:
    return torch.tensor(values, device=device)[:, None].expand(-1, dim)


# --- any batch -------------------------------------------------------------------------------------------------------

OPTIMIZERS = st.one_of(
    st.just({}),
    st.just({"optimizer": "EXACT_SGD", "learning_rate": 0.5}),
    st.just({"weight_decay": 0.25, "eps": 1.0}),
    st.just({"gradient_clipping": True, "max_gradient": 0.5}),
)
# FBGEMM's CPU kernel for fp32 tables has no weight decay, whatever the mode.
DECAYING = st.sampled_from(("L2", "DECOUPLE")).map(lambda mode: {"weight_decay": 0.25, "weight_decay_mode": mode})


@every_way
@settings(max_examples=40)
@given(case=cases(), options=OPTIMIZERS | DECAYING, stochastic=st.booleans())
def test_two_steps_of_any_batch_match_the_reference(case: Case, options: dict[str, Any], stochastic: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = case.with_options(stochastic_rounding=stochastic, **options)
    module = build(case, device, strict=True)
    for number in range(2):
        before, batch = contents(module), make_batch(case, device, number)
        if batch.per_sample_weights is not None:
            batch.per_sample_weights.requires_grad_()
        out = step(module, case, batch)
        exact = number == 0
        weights = batch.per_sample_weights
        if weights is not None:
            check_weight_gradient(case, batch, before, weights.grad)
            weights.requires_grad_(False)
        check_output(case, batch, before, out, exact)
        check_update(case, batch, before, contents(module), exact, stochastic)


@every_way
@settings(max_examples=17)
@given(case=cases(precisions=("FP32",), output_dtypes=("FP32",), pruned=False, min_batch=1), options=OPTIMIZERS)
def test_three_steps_of_any_batch_match_fbgemm(case: Case, options: dict[str, Any]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # FBGEMM's CPU kernels take features only in the order of their tables, and write outside their memory when VBE
    # comes with int32 ids.
    case = replace(case.with_options(**options), feature_table_map=tuple(sorted(case.feature_table_map)))
    if case.batch_sizes is not None:
        case = replace(case, index_dtype=torch.int64)
    ours, theirs = build(case, device, strict=True), build(case, device, FBGEMM)
    # FBGEMM's CPU kernel adds up the lookups of a row one after another: 300 equal ones leave it 2e-5 from the exact
    # sum of 3, and ours, which adds up tiles, 2e-6.
    serial = 2 * U * sum(case.lengths)
    for number in range(3):
        batch = make_batch(case, device, number)
        torch.testing.assert_close(step(ours, case, batch), step(theirs, case, batch), rtol=1e-5, atol=1e-5 + serial)
    # Else both are within a few fp32 roundings of the exact step, which changes little where the state is not small.
    for mine, its in zip(contents(ours), contents(theirs), strict=True):
        for a, b in zip(mine, its, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 + serial)
    assert ours.iter.item() == theirs.iter.item() and ours.step == theirs.step


# --- sizes at the edge -----------------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("rows", [(0,), (0, 5), (5, 0, 3), (1,), (1, 1, 1)])
@pytest.mark.parametrize("bags", [0, 1, 3])
@pytest.mark.parametrize("length", [0, 2])
def test_empty_tables_batches_and_bags(rows: tuple[int, ...], bags: int, length: int, device: torch.device) -> None:
    tables = len(rows)
    # A table without rows can be asked for nothing.
    lengths = tuple(length if count else 0 for count in rows for _ in range(bags))
    case = Case(rows=rows, dims=(4, 12, 8)[:tables], feature_table_map=tuple(range(tables)), lengths=lengths)
    module = build(case, device, strict=True)
    for number in range(2):
        before, batch = contents(module), make_batch(case, device, number)
        out = step(module, case, batch)
        check_output(case, batch, before, out, exact=number == 0)
        check_update(case, batch, before, contents(module), exact=number == 0)
    assert [state[0].shape for state in module.split_optimizer_states()] == [(count,) for count in rows]


@every_way
@pytest.mark.parametrize("vbe", [False, True])
def test_ids_without_bags_update_nothing(vbe: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(Case(rows=(5,), dims=(8,), feature_table_map=(0,), lengths=(2,)), device, strict=True)
    before = contents(module)
    weights = torch.rand(3, device=device, requires_grad=True)
    real = torch.empty
    # What is left unwritten would name row 1.
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: real(*shape, **options).fill_(1))
    sizes = [[0, 0]] if vbe else None
    ids, offsets = torch.tensor([1, 2, 3], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    out = module(ids, offsets, weights, batch_size_per_feature_per_rank=sizes)
    assert out.numel() == 0
    out.sum().backward()
    assert weights.grad is not None and not weights.grad.any()
    assert same_bits(contents(module), before)


@every_way
@pytest.mark.parametrize("dim", [4, 16, 20, 124, 252, 516, 1024, 1028, 1280, 2048, 4096])
@pytest.mark.parametrize("precision", DTYPES)
def test_any_width(dim: int, precision: str, device: torch.device) -> None:
    case = Case(
        rows=(7, 7),
        dims=(dim, 4),
        feature_table_map=(0, 1),
        lengths=(1, 4, 0, 2, 1, 1),
        weighted=True,
        weights_precision=precision,
        output_dtype=precision,
        options={"stochastic_rounding": False},
    )
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    batch.per_sample_weights.requires_grad_()
    check_output(case, batch, before, step(module, case, batch).detach(), exact=True)
    check_weight_gradient(case, batch, before, batch.per_sample_weights.grad)
    batch.per_sample_weights.requires_grad_(False)
    check_update(case, batch, before, contents(module), exact=True)


@every_way
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_several_tiles_of_runs_of_rows_128_wide(precision: str, weighted: bool, device: torch.device) -> None:
    """The width of most real tables, where fp32 has tiles of its own for short and middle runs."""
    lengths = (9, 0, 30, 1, 12, 40, 7, 3)
    case = Case(
        (21, 70), (128, 128), (0, 1), lengths, weighted=weighted, weights_precision=precision, seed=5,
        options={"stochastic_rounding": False},
    )  # fmt: skip
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    check_output(case, batch, before, step(module, case, batch).detach(), exact=True)
    check_update(case, batch, before, contents(module), exact=True)


@every_way
@pytest.mark.parametrize("tables", [2, 3, 4, 31, 33, 64, 65])
def test_any_number_of_tables(tables: int, device: torch.device) -> None:
    bags = 1 if tables > 31 else 2
    case = Case(
        rows=(2,) * tables,
        dims=tuple(4 if t % 2 else 8 for t in range(tables)),
        feature_table_map=tuple(range(tables)),
        lengths=(1,) * (tables * bags),
        ids="equal",
    )
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    check_output(case, batch, before, step(module, case, batch), exact=True)
    check_update(case, batch, before, contents(module), exact=True)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 8, 9, 255, 256, 257])
def test_the_last_row_at_any_total_of_rows(total: int, device: torch.device) -> None:
    rows = (total,) if total == 1 else (total - 1, 1)
    case = Case(
        rows=rows,
        dims=(4,) * len(rows),
        feature_table_map=tuple(range(len(rows))),
        lengths=(1, 1) * len(rows),
        ids="equal",
    )
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    step(module, case, batch)
    check_update(case, batch, before, contents(module), exact=True)


# Lengths around the borders of the classes of runs: one, few, a block of lookups, several blocks.
@every_way
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 31, 32, 33, 127, 128, 129, 255, 256, 257, 385, 513, 1025])
@pytest.mark.parametrize("bags", [1, 2])
def test_a_row_with_any_number_of_occurrences(length: int, bags: int, device: torch.device) -> None:
    case = Case(rows=(3, 2), dims=(4, 36), feature_table_map=(0, 1), lengths=(length,) * (2 * bags), ids="equal")
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    check_output(case, batch, before, step(module, case, batch), exact=True)
    check_update(case, batch, before, contents(module), exact=True)


@every_way
@pytest.mark.parametrize("dim, seed", [(4, 0), (4, 1), (132, 2)])
def test_runs_of_every_length_at_any_place_in_a_block(dim: int, seed: int, device: torch.device) -> None:
    lengths = torch.tensor(
        [1, 2, 3, 4, 5, 6, 31, 32, 33, 64, 100, 127, 128, 129, 191, 255, 256, 257, 300, 384, 400, 511]
    )
    generator = torch.Generator().manual_seed(seed)
    lengths = lengths[torch.randperm(len(lengths), generator=generator)]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    bags = torch.tensor([ids.numel() // 16] * 15 + [ids.numel() - 15 * (ids.numel() // 16)])
    case = Case(rows=(len(lengths),), dims=(dim,), feature_table_map=(0,), lengths=tuple(bags.tolist()), seed=seed)
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    batch.indices.copy_(ids[torch.randperm(ids.numel(), generator=generator)])
    check_output(case, batch, before, step(module, case, batch), exact=True)
    check_update(case, batch, before, contents(module), exact=True)


@every_way
@pytest.mark.parametrize("weighted", [False, True])
def test_runs_of_many_blocks_beside_short_ones(weighted: bool, device: torch.device) -> None:
    # 12,288 occurrences of one row and, around them in the sorted order, runs that begin and end inside a block.
    lengths = (96, 384) * 32
    case = Case(rows=(64, 5), dims=(8, 4), feature_table_map=(0, 1), lengths=lengths, weighted=weighted, ids="skewed")
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    batch.indices[: batch.indices.numel() // 2][::2] = 3
    batch.indices[batch.indices.numel() // 2 :] = 4
    check_output(case, batch, before, step(module, case, batch), exact=True)
    check_update(case, batch, before, contents(module), exact=True)


@pytest.mark.parametrize("lengths", [(7,) * 40, (6, 0, 31, 1, 70, 5) * 7, (33, 90, 0)], ids=["even", "uneven", "long"])
@pytest.mark.parametrize("dim", [8, 20, 64, 512])
@pytest.mark.parametrize("share", [1, 4, 5, 32], ids=["side by side", "a fourth", "some", "one"])
def test_bags_share_a_program_or_do_not(
    share: int, dim: int, lengths: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program takes all bags of a tile, or fewer; one alone that is long has a tile of twice as many rows."""
    monkeypatch.setattr(ops, "_bags_a_program", lambda bags, programs, length: max(1, bags // share))
    case = Case(rows=(9,), dims=(dim,), feature_table_map=(0,), lengths=lengths, weights_precision="FP16")
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    check_output(case, batch, before, step(module, case, batch), exact=True)


@pytest.mark.parametrize(
    ("bags", "count", "length", "expected"),
    [
        (32, 2**17, 5, 32), (32, 2**17, 20, 8), (16, 2**17, 20, 16), (16, 2**17, 50, 4), (8, 2**19, 50, 8),
        (8, 2**15, 100, 2), (8, 2**15, 20, 8), (8, 2**14, 50, 2), (4, 2**19, 20, 4), (4, 2**11, 20, 1),
        (2, 2**11, 100, 1), (1, 2**11, 100, 1), (4, 2 * 4224, 20, 2), (32, 2**15, 20, 8), (32, 2**15, 1, 32),
    ],
)  # fmt: skip
def test_bags_a_program(bags: int, count: int, length: float, expected: int) -> None:
    """What was fastest of the ways that were measured, for `count` bags: docs/notes/kernel-log.md, section 32."""
    assert ops._bags_a_program(bags, -(-count // bags), length) == expected


@pytest.mark.parametrize("longest", [1, 8, 70])
@pytest.mark.parametrize("batch_sizes", [None, ((100, 35), (1, 160))], ids=["", "vbe"])
def test_many_short_bags_are_linearized_in_larger_tiles(
    longest: int, batch_sizes: tuple | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a few of them are long, which their tile takes in parts."""
    monkeypatch.setattr(transpose, "MANY_BAGS", 0)
    count = sum(map(sum, batch_sizes)) if batch_sizes else 2 * 145
    lengths = [1 + b % 2 for b in range(count)]
    lengths[40] = lengths[130] = lengths[140] = longest
    case = Case(
        rows=(9, 300), dims=(8, 20), feature_table_map=(1, 0), lengths=tuple(lengths), batch_sizes=batch_sizes,
        weighted=True,
    )  # fmt: skip
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    check_output(case, batch, before, step(module, case, batch), exact=True)
    check_update(case, batch, before, contents(module), exact=True)


@pytest.mark.parametrize("weights_precision", DTYPES)
@pytest.mark.parametrize("output_dtype", DTYPES)
def test_every_pair_of_weight_and_output_types(weights_precision: str, output_dtype: str, device: torch.device) -> None:
    case = replace(PLAIN, weights_precision=weights_precision, output_dtype=output_dtype)
    module = build(case, device, strict=True)
    module.split_embedding_weights()[0].fill_(1.5)
    before = contents(module)
    batch = make_batch(case, device)
    check_output(case, batch, before, step(module, case, batch), exact=True)


def test_bf16_keeps_values_beyond_fp16(device: torch.device) -> None:
    case = replace(PLAIN, weights_precision="BF16", output_dtype="BF16")
    module = build(case, device, strict=True)
    module.split_embedding_weights()[0].fill_(3e5)
    out = module(torch.tensor([1], device=device), torch.tensor([0, 1, 1, 1], device=device))
    assert torch.equal(out[0, :8], torch.full((8,), 3e5, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("length, error", [(4096, 1e-6), (100_000, 1e-6)])
def test_a_long_bag_of_fp32_rows_keeps_its_digits(length: int, error: float, device: torch.device) -> None:
    # A serial fp32 sum is off by 4e-5 and 1.4e-4 here. A sum wider than fp32 is off by the output's rounding, 6e-8.
    module, _ = one_table(1, 4, [], [0], device)
    weights = module.split_embedding_weights()[0].fill_(0.1)
    out = module(torch.zeros(length, dtype=torch.int64, device=device), torch.tensor([0, length], device=device))
    exact = length * weights[0, 0].double().item()
    assert ((out.double() - exact).abs() / exact).max() < error


# --- numbers worked out by hand ---------------------------------------------------------------------------------------


@every_way
def test_an_id_that_occurs_twice_is_updated_once(device: torch.device) -> None:
    module, batch = one_table(4, 4, [1, 1, 2], [0, 2, 3], device, learning_rate=0.1)
    for state, weight in ((4.0, 0.9), (8.0, 0.82928932)):
        module(*batch).backward(bag_gradient([1.0, 2.0], 4, device))
        tables, states = contents(module)
        torch.testing.assert_close(states[0].cpu(), torch.tensor([0.0, state, state, 0.0]))
        torch.testing.assert_close(tables[0][:, 3].cpu(), torch.tensor([1.0, weight, weight, 1.0]))


@every_way
@pytest.mark.parametrize(
    "mode, expected, state",
    [
        ("NONE", [1.96348516, 1.92697033, 1.89045549, 1.85394065], 7.5),
        ("L2", [1.95893685, 1.92471755, 1.89049825, 1.85627896], 8.54),
        ("DECOUPLE", [1.94348516, 1.90697033, 1.87045549, 1.83394065], 7.5),
    ],
)
def test_weight_decay(mode: str, expected: list[float], state: float, device: torch.device) -> None:
    module, batch = one_table(2, 4, [0], [0, 1], device, learning_rate=0.1, weight_decay=0.1, weight_decay_mode=mode)
    module.split_embedding_weights()[0].fill_(2.0)
    module(*batch).backward(torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device))
    tables, states = contents(module)
    torch.testing.assert_close(tables[0].cpu(), torch.tensor([expected, [2.0] * 4]))
    torch.testing.assert_close(states[0].cpu(), torch.tensor([state, 0.0]))


@every_way
@pytest.mark.parametrize("clipped, state", [(True, 4.0), (False, 100.0)])
def test_gradients_are_clipped_before_they_are_summed(clipped: bool, state: float, device: torch.device) -> None:
    module, batch = one_table(2, 4, [1, 1], [0, 1, 2], device, gradient_clipping=clipped, max_gradient=1.0)
    weights = torch.ones(2, device=device, requires_grad=True)
    module(*batch, weights).backward(bag_gradient([5.0, 5.0], 4, device))
    assert contents(module).states[0].tolist() == [0.0, state]
    assert weights.grad.tolist() == ([4.0, 4.0] if clipped else [20.0, 20.0])


@every_way
def test_a_mean_over_a_bag_and_over_an_empty_bag(device: torch.device) -> None:
    case = Case(rows=(3,), dims=(4,), feature_table_map=(0,), lengths=(), mean=True)
    module = build(case, device, strict=True, learning_rate=0.1, eps=0.0)
    module.split_embedding_weights()[0].copy_(torch.arange(12.0).reshape(3, 4))
    out = module(torch.tensor([0, 1, 2], device=device), torch.tensor([0, 3, 3], device=device))
    assert out.tolist() == [[4, 5, 6, 7], [0, 0, 0, 0]]
    out.backward(bag_gradient([3.0, 1.0], 4, device))
    torch.testing.assert_close(contents(module).states[0].cpu(), torch.ones(3))


def test_two_backward_passes_are_two_updates(device: torch.device) -> None:
    module, batch = one_table(2, 4, [1], [0, 1], device, learning_rate=0.1)
    for _ in range(2):
        module(*batch).backward(bag_gradient([1.0], 4, device))
    assert contents(module).states[0].tolist() == [0.0, 2.0]
    torch.testing.assert_close(contents(module).tables[0][1, 0].item(), 1 - 0.1 - 0.1 / 2**0.5, rtol=0, atol=4 * U)

    module, batch = one_table(2, 4, [1], [0, 1], device, learning_rate=0.1)
    out = module(*batch)
    out.backward(bag_gradient([1.0], 4, device), retain_graph=True)
    out.backward(bag_gradient([1.0], 4, device))
    assert contents(module).states[0].tolist() == [0.0, 2.0]


@every_way
def test_a_row_without_gradient_under_eps_zero_stays(device: torch.device) -> None:
    module, batch = one_table(2, 4, [1], [0, 1], device)
    module(*batch).backward(bag_gradient([0.0], 4, device))
    assert contents(module).tables[0].eq(1.0).all() and contents(module).states[0].eq(0.0).all()


@every_way
def test_nan_and_infinity_stay_in_their_rows_and_bags(device: torch.device) -> None:
    module, _ = one_table(40, 20, [], [0], device)
    module.split_embedding_weights()[0][0] = torch.inf
    module.split_embedding_weights()[0][7] = torch.nan
    ids = torch.tensor([1, 2, 7, 3, 3, 3, 3, 3, 3, 0, -1, 4], device=device)
    offsets = torch.tensor([0, 2, 3, 9, 10, 11, 12], device=device)
    out = module(ids, offsets)
    assert out[[0, 2, 4, 5]].isfinite().all() and out[1].isnan().all() and out[3].isinf().all()
    gradient = torch.ones(6, 20, device=device)
    gradient[5] = torch.nan
    out.backward(gradient)
    assert contents(module).tables[0].isfinite().all(1).logical_not().nonzero().flatten().tolist() == [0, 4, 7]


# --- rounding --------------------------------------------------------------------------------------------------------


def stochastic_module(precision: str, device: torch.device, rows: int = 64) -> tuple[Any, tuple[Any, Any]]:
    """lr 1, SGD: a gradient of g moves the weight 1.0 by -g before it is rounded."""
    case = Case(rows=(rows,), dims=(64,), feature_table_map=(0,), lengths=(), weights_precision=precision)
    module = build(case, device, strict=True, optimizer="EXACT_SGD", learning_rate=1.0)
    module.split_embedding_weights()[0].fill_(1.0)
    return module, (torch.arange(rows, device=device), torch.arange(rows + 1, device=device))


@pytest.mark.parametrize("precision", ["FP16", "BF16"])
@pytest.mark.parametrize("start, fraction", [(1.0, 0.3), (-1.0, 0.3), (1.0, -0.5), (2.0**-16, 0.3)])
def test_stochastic_rounding_is_unbiased(precision: str, start: float, fraction: float, device: torch.device) -> None:
    module, batch = stochastic_module(precision, device)
    weights = module.split_embedding_weights()[0].fill_(start)
    unit = spacing(weights[:1, :1], weights.dtype).item()
    # A move away from 0 by a fraction of the spacing there ends above the nearer neighbour with that probability.
    move = fraction * unit if fraction > 0 else fraction * spacing(weights[:1, :1] * 0.75, weights.dtype).item()
    target = start + (move if start > 0 else -move)
    module(*batch).backward(torch.full((64, 64), start - target, device=device))
    away = weights.double() != start
    n, p = weights.numel(), abs(fraction)
    assert weights.unique().numel() == 2
    # Both neighbours lie one spacing apart, so the mean is right exactly when the share is: five standard deviations.
    assert abs(away.double().mean().item() - p) < 5 * (p * (1 - p) / n) ** 0.5
    # Rows and columns draw independently: shares by row and by column scatter as they should, not more.
    for axis in (0, 1):
        share = away.double().mean(axis)
        assert (share - p).abs().max() < 6 * (p * (1 - p) / 64) ** 0.5
        assert share.std() > 0.3 * (p * (1 - p) / 64) ** 0.5


@every_way
def test_stochastic_rounding_follows_the_seed_and_differs_between_steps(device: torch.device) -> None:
    def run(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        module, batch = stochastic_module("FP16", device, rows=4)
        results = []
        for _ in range(2):
            module.split_embedding_weights()[0].fill_(1.0)
            module(*batch).backward(torch.full((4, 64), 0.3 * 2.0**-11, device=device))
            results.append(module.split_embedding_weights()[0].clone())
        return results

    first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], first[1])


@every_way
@pytest.mark.parametrize("precision", ["FP16", "BF16"])
def test_rounding_to_nearest_on_request(precision: str, device: torch.device) -> None:
    case = Case(rows=(4,), dims=(64,), feature_table_map=(0,), lengths=(), weights_precision=precision)
    module = build(case, device, strict=True, optimizer="EXACT_SGD", learning_rate=1.0, stochastic_rounding=False)
    weights = module.split_embedding_weights()[0].fill_(1.0)
    gradient = torch.linspace(-0.01, 0.01, 256, device=device).reshape(4, 64)
    module(torch.arange(4, device=device), torch.arange(5, device=device)).backward(gradient)
    assert torch.equal(weights, (1.0 - gradient).to(weights.dtype))


# --- determinism and state of a call ---------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("precision", ["FP32", "FP16"])
def test_the_same_inputs_give_the_same_bits(case: Case, precision: str, device: torch.device) -> None:
    case = replace(case, weights_precision=precision, ids="skewed")

    def run() -> tuple[torch.Tensor, Any]:
        torch.manual_seed(7)
        module = build(case, device, strict=True)
        batch = make_batch(case, device)
        gradient = torch.randn(batch.grad_output.shape, generator=torch.Generator().manual_seed(0))
        out = step(module, case, replace(batch, grad_output=gradient.to(batch.grad_output)))
        return out, contents(module)

    (out, after), (out_again, after_again) = run(), run()
    assert torch.equal(out, out_again) and same_bits(after, after_again)


def test_the_learning_rate_is_that_of_the_forward(device: torch.device) -> None:
    module, batch = one_table(2, 4, [1], [0, 1], device, learning_rate=0.1)
    out = module(*batch)
    module.set_learning_rate(100.0)
    out.backward(bag_gradient([1.0], 4, device))
    torch.testing.assert_close(contents(module).tables[0][1].cpu(), torch.full((4,), 0.9))
    assert module.get_learning_rate() == 100.0


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_then_two_backwards(case: Case, first: int, device: torch.device) -> None:
    module = build(case, device, strict=True)
    batches = [make_batch(case, device, number) for number in range(2)]
    outs = [module(b.indices, b.offsets, **b.kwargs(case)) for b in batches]
    for number in (first, 1 - first):
        before = contents(module)
        outs[number].backward(batches[number].grad_output)
        check_update(case, batches[number], before, contents(module), exact=True)


@every_way
def test_storage_may_be_replaced_between_forward_and_backward(device: torch.device) -> None:
    module = build(PLAIN, device, strict=True)
    before, batch = contents(module), make_batch(PLAIN, device)
    out = module(batch.indices, batch.offsets)
    old = {}
    for name in ("weights_dev", "weights_host", "momentum1_dev", "momentum1_host"):
        tensor = getattr(module, name)
        if tensor.numel():
            old[name] = tensor.data
            tensor.data = tensor.data.clone()
            old[name].fill_(torch.nan)
    assert len(old) == 2
    out.backward(batch.grad_output)
    check_update(PLAIN, batch, before, contents(module), exact=True)
    assert all(tensor.isnan().all() for tensor in old.values())


@pytest.mark.parametrize("case", KINDS)
def test_no_node_and_no_update_without_grad(case: Case, device: torch.device) -> None:
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    if batch.per_sample_weights is not None:
        batch.per_sample_weights.requires_grad_()
    with torch.no_grad():
        out = module(batch.indices, batch.offsets, **batch.kwargs(case))
    assert out.grad_fn is None and not out.requires_grad
    assert same_bits(before, contents(module))
    # eval() is no no_grad: the module has no other behaviour in it, as FBGEMM's has none.
    out = module.eval()(batch.indices, batch.offsets, **batch.kwargs(case))
    assert out.requires_grad and same_bits(before, contents(module))


def test_the_callers_tensors_stay_as_they_are(device: torch.device) -> None:
    case = replace(WEIGHTED, pruned=True)
    module = build(case, device, strict=True)
    batch = make_batch(case, device)
    tensors = (batch.indices, batch.offsets, batch.per_sample_weights, batch.grad_output)
    copies = [tensor.clone() for tensor in tensors]
    step(module, case, batch)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


# --- gradients of any layout ------------------------------------------------------------------------------------------


def layouts(gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = gradient.shape
    padded = torch.full((rows, columns + 3), torch.nan).to(gradient)
    padded[:, 3:] = gradient
    spread = torch.full((2 * rows, columns), torch.nan).to(gradient)
    spread[::2] = gradient
    shifted = torch.empty(gradient.numel() + 1).to(gradient)
    shifted[1:] = gradient.flatten()
    return {
        "transposed": gradient.t().contiguous().t(),
        "column slice": padded[:, 3:],
        "row slice": spread[::2],
        "shifted by one element": shifted[1:].view(rows, columns),
    }


@every_way
@pytest.mark.parametrize("layout", ["transposed", "column slice", "row slice", "shifted by one element"])
@pytest.mark.parametrize("output_dtype", ["FP32", "FP16"])
def test_a_gradient_of_any_layout(layout: str, output_dtype: str, device: torch.device) -> None:
    case = replace(PLAIN, output_dtype=output_dtype)
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    module(batch.indices, batch.offsets).backward(layouts(batch.grad_output)[layout])
    check_update(case, batch, before, contents(module), exact=True)


@pytest.mark.parametrize("case", [PLAIN, VBE])
def test_an_expanded_gradient(case: Case, device: torch.device) -> None:
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    module(batch.indices, batch.offsets, **batch.kwargs(case)).sum().backward()
    ones = replace(batch, grad_output=torch.ones_like(batch.grad_output))
    check_update(case, ones, before, contents(module), exact=True)


# --- per-sample weights ----------------------------------------------------------------------------------------------


def test_weights_apply_and_empty_weights_mean_none(device: torch.device) -> None:
    module, batch = one_table(3, 4, [1, 2], [0, 2], device)
    module.split_embedding_weights()[0].copy_(torch.arange(3.0)[:, None].expand(3, 4))
    assert module(*batch).tolist() == [[3.0] * 4]
    assert module(*batch, torch.tensor([10.0, 100.0], device=device)).tolist() == [[210.0] * 4]
    assert module(*batch, torch.empty(0, device=device)).tolist() == [[3.0] * 4]


def test_an_empty_batch_keeps_its_weights_in_the_graph(device: torch.device) -> None:
    # A rank without ids must still give a gradient to what its weights come from, or a reduction over ranks hangs.
    module, _ = one_table(3, 4, [], [0], device)
    ids, offsets = torch.empty(0, dtype=torch.int64, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    scale = torch.ones(1, device=device, requires_grad=True)
    module(ids, offsets, torch.empty(0, device=device) * scale).sum().backward()
    assert scale.grad.tolist() == [0.0]
    mean = build(MEAN, device, strict=True)
    out = mean(ids, torch.zeros(7, dtype=torch.int64, device=device), torch.empty(0, device=device))
    assert out.shape == (2, sum(MEAN.feature_dims)) and not out.any()


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_weights_raises(count: int, device: torch.device) -> None:
    module, batch = one_table(3, 4, [1, 2], [0, 2], device)
    with pytest.raises(ValueError, match=rf"{count} .*2 "):
        module(*batch, torch.ones(count, device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("strided", [False, True])
def test_weights_of_any_float_type_and_layout(dtype: torch.dtype, strided: bool, device: torch.device) -> None:
    module = build(WEIGHTED, device, strict=True)
    before, batch = contents(module), make_batch(WEIGHTED, device)
    given_weights = batch.per_sample_weights.to(dtype)
    if strided:
        given_weights = given_weights.repeat_interleave(2)[::2]
    given_weights = given_weights.detach().requires_grad_()
    out = module(batch.indices, batch.offsets, given_weights)
    out.backward(batch.grad_output)
    check_output(WEIGHTED, batch, before, out.detach(), exact=True)
    check_update(WEIGHTED, batch, before, contents(module), exact=True)
    assert given_weights.grad.dtype == dtype and given_weights.grad.shape == given_weights.shape
    if dtype in (torch.float32, torch.float64):
        check_weight_gradient(WEIGHTED, batch, before, given_weights.grad)


def test_the_weight_gradient_is_made_only_when_wanted_and_is_a_tensor_of_its_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    original = ops.sample_weight_grad
    monkeypatch.setattr(ops, "sample_weight_grad", lambda *a, **k: made.append(original(*a, **k)) or made[-1])
    module = build(WEIGHTED, device, strict=True)
    batch = make_batch(WEIGHTED, device)
    step(module, WEIGHTED, batch)
    assert made == []
    leaf = batch.per_sample_weights.requires_grad_()
    # What TorchRec does on its way back: scale the incoming gradient in place.
    scaled = _ScaleInPlace.apply(leaf)
    before = contents(module)
    module(batch.indices, batch.offsets, scaled).backward(batch.grad_output)
    assert len(made) == 1
    check_weight_gradient(WEIGHTED, batch, before, leaf.grad / 3)


class _ScaleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.mul_(3)


@every_way
@pytest.mark.parametrize("mask", [[0, 1, 1], [1, 0, 0], [0, 0, 0]])
@pytest.mark.parametrize("case", [WEIGHTED, replace(VBE, weighted=True)])
def test_the_mask_of_features_is_for_the_weight_gradient_alone(
    case: Case, mask: list[int], device: torch.device
) -> None:
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    batch.per_sample_weights.requires_grad_()
    wanted = torch.tensor(mask, dtype=torch.int32, device=device)
    out = module(batch.indices, batch.offsets, feature_requires_grad=wanted, **batch.kwargs(case))
    out.backward(batch.grad_output)
    check_weight_gradient(case, batch, before, batch.per_sample_weights.grad, mask)
    batch.per_sample_weights.requires_grad_(False)
    check_update(case, batch, before, contents(module), exact=True)


def test_weights_get_their_gradient_beside_frozen_parameters(device: torch.device) -> None:
    module = build(WEIGHTED, device, strict=True, learning_rate=0.0)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    before, batch = contents(module), make_batch(WEIGHTED, device)
    batch.per_sample_weights.requires_grad_()
    step(module, WEIGHTED, batch)
    check_weight_gradient(WEIGHTED, batch, before, batch.per_sample_weights.grad)
    assert all(torch.equal(a, b) for a, b in zip(before.tables, contents(module).tables, strict=True))


def test_weights_with_mean_pooling_run_on_fbgemm_or_are_refused(device: torch.device) -> None:
    batch = make_batch(WEIGHTED, device)
    with pytest.raises(NotImplementedError, match="MEAN"):
        build(MEAN, device, strict=True)(batch.indices, batch.offsets, batch.per_sample_weights)
    ours, theirs = build(MEAN, device), build(MEAN, device, FBGEMM)
    outs = [module(batch.indices, batch.offsets, batch.per_sample_weights) for module in (ours, theirs)]
    assert torch.equal(*outs)


# --- variable batch --------------------------------------------------------------------------------------------------

VBE_TABLES = Case(rows=(2, 3), dims=(4, 8), feature_table_map=(0, 1), lengths=())


@pytest.mark.parametrize(
    "sizes, offsets, numbers",
    [
        ([[1], [2]], [0, 2, 5], ["3", "2"]),
        ([[1], [1], [1]], [0, 2, 4, 5], ["3", "2"]),
        ([[1]], [0, 5], ["1", "2"]),
        ([[1, 1], [1]], [0, 2, 4, 5], ["1", "2"]),
        ([[2], [-1]], [0, 5], ["-1"]),
    ],
)
def test_sizes_that_contradict_each_other_raise(
    sizes: list[list[int]], offsets: list[int], numbers: list[str], device: torch.device
) -> None:
    module = build(VBE_TABLES, device, strict=True)
    before = contents(module)
    with pytest.raises(ValueError) as error:
        module(
            torch.zeros(5, dtype=torch.int64, device=device),
            torch.tensor(offsets, device=device),
            batch_size_per_feature_per_rank=sizes,
        )
    assert all(number in str(error.value) for number in numbers)
    assert same_bits(before, contents(module))


def test_bags_that_features_cannot_share_raise(device: torch.device) -> None:
    module = build(VBE_TABLES, device, strict=True)
    with pytest.raises(ValueError, match=r"3 .*2 "):
        module(torch.zeros(3, dtype=torch.int64, device=device), torch.arange(4, device=device))


def block_offsets(case: Case, gap: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """[ranks, F] offsets of blocks that leave `gap` elements free before each, and the size of the whole."""
    ranks, end, rows = len(case.batch_sizes[0]), 0, []
    for rank in range(ranks):
        row = []
        for sizes, dim in zip(case.batch_sizes, case.feature_dims, strict=True):
            row.append(end + gap)
            end += gap + sizes[rank] * dim
        rows.append(row)
    return torch.tensor(rows, device=device), end


@pytest.mark.parametrize("output_dtype", DTYPES)
def test_a_given_output_is_written_in_place(output_dtype: str, device: torch.device) -> None:
    case = replace(VBE, output_dtype=output_dtype)
    module, plain = build(case, device, strict=True), build(case, device, strict=True)
    batch = make_batch(case, device)
    places, size = block_offsets(case, 12, device)
    given_output = torch.full((size,), 7.0, dtype=DTYPES[output_dtype], device=device)
    out = module(batch.indices, batch.offsets, vbe_output=given_output, vbe_output_offsets=places, **batch.kwargs(case))
    assert out.data_ptr() == given_output.data_ptr() and given_output._version > 0
    expected = plain(batch.indices, batch.offsets, **batch.kwargs(case))
    gradient, written, at = torch.zeros(size, device=device).to(out.dtype), torch.zeros(size, dtype=torch.bool), 0
    for rank, row in enumerate(places.tolist()):
        for sizes, dim, begin in zip(case.batch_sizes, case.feature_dims, row, strict=True):
            count = sizes[rank] * dim
            assert torch.equal(out[begin : begin + count], expected[at : at + count])
            gradient[begin : begin + count] = batch.grad_output[at : at + count]
            written[begin : begin + count] = True
            at += count
    assert out.detach()[~written.to(device)].eq(7.0).all()
    before = contents(module)
    out.backward(gradient)
    check_update(case, batch, before, contents(module), exact=True)


def test_two_modules_share_one_output(device: torch.device) -> None:
    sizes = ((2, 1), (1, 3))
    cases_ = [
        Case(
            rows=(9,) * 2,
            dims=(4, 8),
            feature_table_map=(0, 1),
            lengths=(2, 0, 1, 3, 1, 1, 2),
            batch_sizes=sizes,
            seed=s,
        )
        for s in (1, 2)
    ]
    modules = [build(case, device, strict=True) for case in cases_]
    batches = [make_batch(case, device) for case in cases_]
    places, half = block_offsets(cases_[0], 0, device)
    shared = torch.full((2 * half,), torch.nan, device=device)
    out = shared
    for number, (case, module, batch) in enumerate(zip(cases_, modules, batches, strict=True)):
        out = module(
            batch.indices,
            batch.offsets,
            vbe_output=out,
            vbe_output_offsets=places + number * half,
            **batch.kwargs(case),
        )
    assert out.data_ptr() == shared.data_ptr()
    befores = [contents(module) for module in modules]
    for case, batch, before, piece in zip(cases_, batches, befores, out.detach().split(half), strict=True):
        check_output(case, batch, before, piece, exact=True)
    out.backward(torch.cat([batch.grad_output for batch in batches]))
    for case, module, batch, before in zip(cases_, modules, batches, befores, strict=True):
        check_update(case, batch, before, contents(module), exact=True)


# --- ids and offsets that are not right -------------------------------------------------------------------------------


def two_tables(device: torch.device, cls: type = TritonTableBatchedEmbeddingBags, **options: Any) -> Any:
    """Two tables of 3 rows: table 0 holds 1, 2, 3 by row, table 1 holds 100."""
    case = Case(rows=(3, 3), dims=(4, 4), feature_table_map=(0, 1), lengths=())
    module = build(case, device, cls, **options)
    module.split_embedding_weights()[0].copy_(torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 4))
    module.split_embedding_weights()[1].fill_(100.0)
    return module


@pytest.mark.parametrize("mode", [mode for mode in MODES if "FATAL" not in mode])
@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bad", [3, 4, 2**31, 2**40, -2, -(2**40)])
def test_an_id_out_of_range_reads_row_0_of_its_own_table(
    mode: str, variable: bool, weighted: bool, bad: int, device: torch.device
) -> None:
    module = two_tables(device, strict=True, bounds_check_mode=mode)
    ids = torch.tensor([1, bad, 2], device=device)
    weights = torch.full((3,), 2.0, device=device) if weighted else None
    sizes = [[1], [1]] if variable else None
    out = module(ids, torch.tensor([0, 2, 3], device=device), weights, batch_size_per_feature_per_rank=sizes)
    factor = 2.0 if weighted else 1.0
    # FBGEMM's check zeroes nothing but the id, so the weight of a bad id still counts for row 0.
    assert out.flatten().tolist() == [3.0 * factor] * 4 + [100.0 * factor] * 4
    before = contents(module)
    out.backward(torch.ones_like(out))
    moved = [(a != b).any(1).tolist() for a, b in zip(before.tables, contents(module).tables, strict=True)]
    assert moved == [[True, True, False], [False, False, True]]
    if "WARNING" in mode:
        assert module.bounds_check_warning.item() > 0


@pytest.mark.parametrize("variable", [False, True])
def test_an_id_out_of_range_reads_no_row_when_nothing_is_checked(variable: bool, device: torch.device) -> None:
    module = two_tables(device, strict=True, bounds_check_mode="NONE")
    before = contents(module)
    sizes = [[1], [1]] if variable else None
    ids = torch.tensor([1, 3, 2, -7, 2**40], device=device)
    out = module(ids, torch.tensor([0, 2, 5], device=device), batch_size_per_feature_per_rank=sizes)
    assert out.flatten().tolist() == [2.0] * 4 + [100.0] * 4
    out.backward(torch.ones_like(out))
    moved = [(a != b).any(1).tolist() for a, b in zip(before.tables, contents(module).tables, strict=True)]
    assert moved == [[False, True, False], [False, False, True]]


@every_way
@pytest.mark.parametrize("mode", ["WARNING", "IGNORE", "NONE"])
@pytest.mark.parametrize("rows", [(0, 3), (3, 0)])
def test_an_id_of_a_table_without_rows_reads_and_updates_nothing(
    mode: str, rows: tuple[int, ...], device: torch.device
) -> None:
    case = Case(rows=rows, dims=(4, 4), feature_table_map=(0, 1), lengths=(), seed=1)
    module = build(case, device, strict=True, bounds_check_mode=mode)
    before = contents(module)
    weights = torch.ones(2, device=device, requires_grad=True)
    out = module(torch.tensor([0, 0], device=device), torch.tensor([0, 1, 2], device=device), weights)
    out.sum().backward()
    empty = rows.index(0)
    expected = torch.zeros(1, 8, device=device)
    expected[0, 4 * (1 - empty) :][:4] = before.tables[1 - empty][0]
    assert torch.equal(out, expected)
    assert weights.grad[empty] == 0
    assert contents(module).states[1 - empty].nonzero().flatten().tolist() == [0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a failed device-side assertion ends the process's CUDA context")
@pytest.mark.parametrize("mode", ["FATAL", "V2_FATAL"])
@pytest.mark.parametrize("variable", [False, True])
def test_an_id_out_of_range_is_an_error_in_fatal_mode(mode: str, variable: bool, device: torch.device) -> None:
    module = two_tables(device, strict=True, bounds_check_mode=mode)
    sizes = [[1], [1]] if variable else None
    with pytest.raises(RuntimeError):
        module(
            torch.tensor([1, 3, 2], device=device),
            torch.tensor([0, 2, 3], device=device),
            batch_size_per_feature_per_rank=sizes,
        )


@every_way
@pytest.mark.parametrize("mode", ["WARNING", "IGNORE", "NONE"])
def test_pruned_ids_add_nothing_and_update_nothing(mode: str, device: torch.device) -> None:
    case = replace(WEIGHTED, pruned=True)
    module = build(case, device, strict=True, bounds_check_mode=mode)
    before, batch = contents(module), make_batch(case, device)
    assert batch.indices.eq(-1).any()
    batch.per_sample_weights.requires_grad_()
    check_output(case, batch, before, step(module, case, batch), exact=True)
    check_weight_gradient(case, batch, before, batch.per_sample_weights.grad)
    batch.per_sample_weights.requires_grad_(False)
    check_update(case, batch, before, contents(module), exact=True)


@pytest.mark.parametrize(
    "ids, offsets",
    [
        ([1, 2, 0, -1, -1, -1], [0, 2, 3]),
        ([1, 2, 0, 2, 2, 2], [0, 2, 3]),
        ([1, 2, 0], [0, 3, 2]),
        ([1, 2, 0], [0, 5, 4]),
        ([1, 2, 0], [-1, 2, 3]),
        ([1, 2, 0], [0, 2, 99]),
    ],
)
@pytest.mark.parametrize("mode", ["WARNING", "IGNORE"])
def test_offsets_are_repaired_as_fbgemm_repairs_them(
    ids: list[int], offsets: list[int], mode: str, device: torch.device
) -> None:
    ours = two_tables(device, strict=True, bounds_check_mode=mode)
    theirs = two_tables(device, FBGEMM, bounds_check_mode=mode)
    outs = []
    for module in (ours, theirs):
        # FBGEMM's kernels cannot take -1. Its check leaves them alone, and a weight of 0 makes row 0 add nothing.
        kept = [max(i, 0) for i in ids] if module is theirs else ids
        weights = torch.tensor([float(i >= 0) for i in ids], device=device)
        out = module(torch.tensor(kept, device=device), torch.tensor(offsets, device=device), weights)
        out.backward(torch.ones_like(out))
        outs.append(out.detach())
    assert torch.equal(*outs)
    if -1 not in ids:
        for a, b in zip(contents(ours).tables, contents(theirs).tables, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "offsets, repaired",
    [
        ([0, 5, 4, 3, 6], [0, 5, 5, 5, 6]),
        ([0, 5, 3, 4, 6], [0, 5, 5, 5, 6]),
        ([9, 1, -7, 3, 2], [6, 6, 6, 6, 6]),
        ([-3, 99, 0, 0, 0], [0, 6, 6, 6, 6]),
    ],
)
@pytest.mark.parametrize("variable", [False, True])
def test_an_id_is_judged_by_the_table_that_reads_it_whatever_the_offsets(
    offsets: list[int], repaired: list[int], variable: bool, device: torch.device
) -> None:
    # Several offsets decrease, across features whose tables differ in size: an id must not pass as another table's.
    case = Case(rows=(3, 3, 3, 1000), dims=(4,) * 4, feature_table_map=(0, 1, 2, 3), lengths=(), seed=2)
    module = build(case, device, strict=True, bounds_check_mode="IGNORE")
    before = contents(module)
    ids, given_offsets = torch.full((6,), 900, device=device), torch.tensor(offsets, device=device)
    sizes = [[1]] * 4 if variable else None
    out = module(ids, given_offsets, batch_size_per_feature_per_rank=sizes).flatten()
    assert given_offsets.tolist() == repaired
    for feature, table in enumerate(before.tables):
        begin, end = repaired[feature : feature + 2]
        row = table[900 if feature == 3 else 0]
        assert torch.equal(out[4 * feature :][:4], (end - begin) * row)


@every_way
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("variable", [False, True])
def test_every_id_out_of_range_is_repaired_and_counted_once(
    dtype: torch.dtype, variable: bool, device: torch.device
) -> None:
    # Bags longer than what the lookup checks at a step, short ones, empty ones; a wrong id in every seventh place.
    lengths = (600, 0, 1, 300, 5, 2, 0, 3, 700, 4)
    case = Case(rows=(9, 800), dims=(8, 20), feature_table_map=(0, 1), lengths=lengths, seed=3)
    if variable:
        case = replace(case, batch_sizes=((6,), (4,)))
    module = build(case, device, strict=True)
    before, batch = contents(module), make_batch(case, device)
    ids, offsets = batch.indices.to(dtype), batch.offsets.to(dtype)
    border = int(offsets[6 if variable else 5])  # of the tables
    rows = torch.where(torch.arange(ids.numel(), device=device) < border, *case.rows)
    wrong = torch.arange(ids.numel(), device=device) % 7 == 3
    given = torch.where(wrong, torch.where(torch.arange(ids.numel(), device=device) % 2 == 0, -2, rows), ids).to(dtype)
    right = torch.where(wrong, 0, ids)
    out = module(given, offsets, **batch.kwargs(case))
    assert torch.equal(given, right)
    assert module.bounds_check_warning.item() == wrong.sum().item()
    check_output(case, replace(batch, indices=right.long()), before, out, exact=True)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 255, 256, 257, 600])
def test_all_ids_of_a_program_are_checked(length: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one small step or in large ones."""
    monkeypatch.setattr(ops, "_bags_a_program", lambda bags, programs, length: 1)
    module, (_, offsets) = one_table(3, 8, [0] * 3 * length, [0, length, 2 * length, 3 * length], device)
    given = torch.full((3 * length,), 3, device=device)
    assert (module(given, offsets) == length).all()  # rows of ones
    assert not given.any() and module.bounds_check_warning.item() == 3 * length


@every_way
@pytest.mark.parametrize("offsets", [[0, 3, 2], [0, 5, 4], [-1, 2, 3], [0, 2, 99], [3, 0, 0], [2, 2, 2]])
def test_offsets_that_are_not_checked_never_reach_outside(offsets: list[int], device: torch.device) -> None:
    module = two_tables(device, strict=True, bounds_check_mode="NONE")
    out = module(torch.tensor([1, 2, 0], device=device), torch.tensor(offsets, device=device))
    out.backward(torch.ones_like(out))
    assert out.isfinite().all()
    assert all(t.isfinite().all() for t in (*contents(module).tables, *contents(module).states))


@pytest.mark.parametrize("indices, offsets", [(torch.float32, torch.int64), (torch.int64, torch.float32)])
def test_ids_and_offsets_must_be_integers(indices: torch.dtype, offsets: torch.dtype, device: torch.device) -> None:
    module, batch = one_table(3, 4, [1, 2], [0, 2], device)
    with pytest.raises(ValueError, match="must be int32 or int64"):
        module(batch[0].to(indices), batch[1].to(offsets))


# --- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", DTYPES)
def test_defaults_are_fbgemms(precision: str, device: torch.device) -> None:
    keys = {"weights_precision": SparseType[precision]}
    ours = TritonTableBatchedEmbeddingBags([(5, 8)], device=device, strict=True, **keys)
    theirs = FBGEMM(specs([5], [8], device), device=device, cache_precision=SparseType.FP32, **keys)
    assert ours.optimizer_args == theirs.optimizer_args
    assert ours.get_learning_rate() == theirs.get_learning_rate()
    for name in ("optimizer", "output_dtype", "pooling_mode", "bounds_check_mode_int", "stochastic_rounding"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    batch = (torch.tensor([1], device=device), torch.tensor([0, 1], device=device))
    assert ours(*batch).dtype == torch.float32


def test_eps_by_default(device: torch.device) -> None:
    keys = {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    module = TritonTableBatchedEmbeddingBags([(2, 4)], device=device, strict=True, **keys)
    module.split_embedding_weights()[0].fill_(1.0)
    out = module(torch.tensor([1], device=device), torch.tensor([0, 1], device=device))
    out.backward(torch.full((1, 4), 0.01, device=device))
    assert contents(module).tables[0][1].tolist() == pytest.approx([0.9000001] * 4, abs=1e-7)
    assert contents(module).states[0].tolist() == pytest.approx([0.0, 1e-4], rel=1e-6)


@pytest.mark.parametrize(
    "options, name",
    [
        ({"max_norm": 1.0}, "max_norm=1.0"),
        ({"pooling_mode": "NONE"}, "pooling_mode=NONE"),
        ({"optimizer": "EXACT_ADAGRAD"}, "optimizer=EXACT_ADAGRAD"),
    ],
)
def test_what_triton_does_not_take_is_said_once_and_runs_on_fbgemm(
    options: dict[str, Any], name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    tables = replace(PLAIN, dims=(8, 8))
    with pytest.raises(NotImplementedError, match=name):
        build(tables, device, strict=True, table_names=["a", "b"], **options)
    with caplog.at_level(logging.INFO, logger="torchrec_triton"):
        module = build(tables, device, table_names=["a", "b"], **options)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1 and name in said[0] and "a, b" in said[0]
        assert not module.uses_triton and len(module.triton_reasons) == 1
        if options.get("pooling_mode") != "NONE":
            batch = make_batch(tables, device)
            module(batch.indices, batch.offsets).sum().backward()
        assert len(caplog.records) == 1


def test_a_missing_compiler_is_found_at_construction(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at the first launch, which may be that of an update. The module is judged as if it were on a GPU."""
    launch_problem = _compat.launch_problem
    monkeypatch.setattr(_compat, "launch_problem", lambda device_type: launch_problem("cuda"))
    monkeypatch.setattr(support, "unsupported_reasons", lambda **keys: [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotImplementedError, match="no C compiler for Triton's launcher; install gcc"):
        TritonTableBatchedEmbeddingBags([(2, 4)], device=device, strict=True)
    with caplog.at_level(logging.INFO, logger="torchrec_triton"):
        module = TritonTableBatchedEmbeddingBags([(2, 4)], device=device, learning_rate=0.5)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "no C compiler" in said and len(module.triton_reasons) == 1
    module.split_embedding_weights()[0].fill_(1.0)
    module(torch.tensor([1], device=device), torch.tensor([0, 1], device=device)).sum().backward()
    assert contents(module).tables[0].tolist() == [[1.0] * 4, [0.5] * 4]


def test_an_unknown_keyword_is_a_type_error(device: torch.device) -> None:
    with pytest.raises(TypeError, match="no_such_key"):
        TritonTableBatchedEmbeddingBags([(2, 4)], device=device, no_such_key=1)


def test_adopting_keeps_storage_and_state(device: torch.device) -> None:
    tbe = build(PLAIN, device, FBGEMM)
    batch = make_batch(PLAIN, device)
    step(tbe, PLAIN, batch)
    before, pointers = contents(tbe), [t.data_ptr() for t in tbe.split_embedding_weights()]
    adopted = TritonTableBatchedEmbeddingBags.adopt(tbe, strict=True)
    assert adopted is tbe and adopted.uses_triton
    assert pointers == [t.data_ptr() for t in adopted.split_embedding_weights()]
    check_output(PLAIN, batch, before, step(adopted, PLAIN, batch), exact=False)
    check_update(PLAIN, batch, before, contents(adopted), exact=False)
    with pytest.raises(TypeError, match="Linear"):
        TritonTableBatchedEmbeddingBags.adopt(torch.nn.Linear(2, 2))


def test_a_copy_is_independent(device: torch.device) -> None:
    module = build(PLAIN, device, strict=True)
    step(module, PLAIN, make_batch(PLAIN, device))
    twin = copy.deepcopy(module)
    before = contents(module)
    batch = make_batch(PLAIN, device, 1)
    step(twin, PLAIN, batch)
    assert same_bits(before, contents(module))
    check_update(PLAIN, batch, before, contents(twin), exact=False)


def test_hyper_parameters_can_be_changed(device: torch.device) -> None:
    module, batch = one_table(2, 4, [1], [0, 1], device, learning_rate=0.1)
    module.update_hyper_parameters({"lr": 0.5})
    module(*batch).backward(bag_gradient([1.0], 4, device))
    torch.testing.assert_close(contents(module).tables[0][1].cpu(), torch.full((4,), 0.5))


def test_the_step_counter_can_be_set_beyond_fp32(device: torch.device) -> None:
    module, batch = one_table(1, 4, [0], [0, 1], device)
    module.set_optimizer_step(2**24 + 1)
    module(*batch).backward(bag_gradient([1.0], 4, device))
    assert module.iter.item() == 2**24 + 2
    assert [list(state) for state in module.get_optimizer_state()] == [["sum"]]
    assert module.get_optimizer_state()[0]["sum"].shape == (1,)


def test_compiled_equals_eager(device: torch.device) -> None:
    eager, compiled = build(WEIGHTED, device, strict=True), build(WEIGHTED, device, strict=True)
    head = torch.nn.Linear(sum(WEIGHTED.feature_dims), 1).to(device)

    def model(module: Any, batch: Batch) -> torch.Tensor:
        return head(module(batch.indices, batch.offsets, batch.per_sample_weights)).square().mean()

    fast = torch.compile(model, backend="aot_eager")
    for number in range(3):
        batch = make_batch(replace(WEIGHTED, lengths=WEIGHTED.lengths[number:] + (1,) * number), device, number)
        losses = []
        for function, module in ((model, eager), (fast, compiled)):
            loss = function(module, batch)
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
    assert same_bits(contents(eager), contents(compiled))


@every_way
@pytest.mark.parametrize("optimizer", [OptimType.EXACT_SGD, OptimType.EXACT_ROWWISE_ADAGRAD])
def test_clipping_keeps_nan_where_it_is(optimizer: Any, device: torch.device) -> None:
    module = TritonTableBatchedEmbeddingBags(
        [(3, 4)], device=device, optimizer=optimizer, gradient_clipping=True, max_gradient=0.5, strict=True
    )
    module.split_embedding_weights()[0].zero_()
    out = module(torch.tensor([1, 2], device=device), torch.tensor([0, 1, 2], device=device))
    gradient = torch.ones_like(out)
    gradient[0, 0] = float("nan")
    out.backward(gradient)
    table = module.split_embedding_weights()[0]
    assert table[1, 0].isnan() and not table[2].isnan().any() and not table[0].any()


@pytest.mark.parametrize("name", ["vbe_output", "vbe_output_offsets"])
def test_a_vbe_output_on_another_device_is_refused(name: str, device: torch.device) -> None:
    module = build(VBE, device, strict=True)
    batch = make_batch(VBE, device)
    given = {
        "vbe_output": torch.zeros(1000, device=device),
        "vbe_output_offsets": torch.zeros(2, 3, dtype=torch.int64, device=device),
    }
    given[name] = given[name].to("meta")
    with pytest.raises((ValueError, AssertionError), match=f"{name} is on meta|same device"):
        module(batch.indices, batch.offsets, **given, **batch.kwargs(VBE))


def test_a_small_vbe_output_is_refused(device: torch.device) -> None:
    module = TritonTableBatchedEmbeddingBags([(10, 8), (5, 4)], device=device, strict=True)
    with pytest.raises(ValueError, match="vbe_output has 4 elements, the blocks of this call take 12"):
        module(
            torch.tensor([1, 2], device=device),
            torch.tensor([0, 1, 2], device=device),
            batch_size_per_feature_per_rank=[[1], [1]],
            vbe_output=torch.zeros(4, device=device),
            vbe_output_offsets=torch.tensor([[0, 8]], device=device),
        )


def test_wrong_arguments_are_named(device: torch.device) -> None:
    module = TritonTableBatchedEmbeddingBags([(10, 8), (5, 4)], device=device, strict=True)
    ids, offsets = torch.tensor([1, 2], device=device), torch.tensor([0, 1, 2], device=device)
    for error, match, call in [
        (TypeError, "indices is a list", lambda: module([1, 2], offsets)),
        (ValueError, "per_sample_weights is torch.int64", lambda: module(ids, offsets, ids)),
        (
            ValueError,
            "feature_requires_grad has 1 values for 2 features",
            lambda: module(ids, offsets, torch.ones(2, device=device), torch.ones(1)),
        ),
        (TypeError, "must be a list", lambda: module(ids, offsets, batch_size_per_feature_per_rank=((1,), (1,)))),
        (ValueError, "embedding_specs is empty", lambda: TritonTableBatchedEmbeddingBags([], device=device)),
        (ValueError, "tables of .-1. rows", lambda: TritonTableBatchedEmbeddingBags([(-1, 4)], device=device)),
        (ValueError, "names tables .2.", lambda: TritonTableBatchedEmbeddingBags([(3, 4)], [0, 2], device=device)),
    ]:
        with pytest.raises(error, match=match):
            call()


def test_strict_is_judged_before_fbgemm_builds(device: torch.device) -> None:
    with pytest.raises(NotImplementedError, match="optimizer=ADAM"):
        TritonTableBatchedEmbeddingBags([(3, 4)], device=device, optimizer=OptimType.ADAM, strict=True)


def test_adopting_judges_what_the_module_was_built_with(device: torch.device) -> None:
    writes_back = UserEnabledConfigDefinition(use_writeback_bwd_prehook=True)
    tbe = FBGEMM(specs((3,), (4,), device), optimizer=OptimType.EXACT_SGD, extra_optimizer_config=writes_back)
    with pytest.raises(NotImplementedError, match="extra_optimizer_config"):
        TritonTableBatchedEmbeddingBags.adopt(tbe, strict=True)


def test_weights_of_mean_tables_are_said_once(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    module = TritonTableBatchedEmbeddingBags([(3, 4)], device=device, pooling_mode=PoolingMode.MEAN)
    arguments = torch.tensor([1, 2], device=device), torch.tensor([0, 2], device=device), torch.ones(2, device=device)
    with caplog.at_level(logging.WARNING, logger="torchrec_triton"):
        for _ in range(2):
            module(*arguments)
    assert [record.getMessage() for record in caplog.records] == [
        "1 tables: FBGEMM's kernels run calls with weights, because the tables pool MEAN"
    ]
