"""The benchmark without its clock: configuration, shapes, floor, gate, turns of the sides, report."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from torchrec_triton import cli
from torchrec_triton.bench import compiling, floor, gate, plot, rates, report
from torchrec_triton.bench import config as settings
from torchrec_triton.bench import run as bench
from torchrec_triton.bench.config import Card, Grid, GridTables, Rate, Suite, Sweep
from torchrec_triton.bench.gate import GateError, Pair
from torchrec_triton.bench.workloads import PROD66, Batch, Workload, grid, make_batch, real, sweep, workloads
from torchrec_triton.config import ConfigError
from torchrec_triton.kernels import ops
from torchrec_triton.plan.rates import read_rates
from torchrec_triton.support import MAX_DIM

H200 = Path(__file__).parents[1] / "configs" / "bench_h200.yaml"
CPU = torch.device("cpu")
TABLES = GridTables(rows=(40, 20, 30), most_ids=600)
CARD = Card(
    name="a card",
    copy=Rate(terabytes_per_second=4.0, source="measured"),
    l2_gather=Rate(terabytes_per_second=8.0, source="measured"),
    memory_gather=Rate(terabytes_per_second=3.0, source="measured"),
)


# --- configuration -------------------------------------------------------------------------------------------------


def test_the_shipped_configuration_has_the_shapes_that_are_asked_for():
    loaded = settings.load(H200)
    shapes = workloads(loaded.full, loaded.grid_tables)
    measured = [shape for shape in shapes if shape.group in ("grid", "sweep")]
    assert {shape.name for shape in shapes if shape.group == "real"} == {shape.name for shape in real()}
    assert len([shape for shape in shapes if shape.group == "launch"]) == 2
    assert len(measured) >= 100
    plain = {(s.pooling[0], s.alpha, s.batch, s.dims[0]) for s in measured if not (s.weighted or s.vbe)}
    assert plain >= set(itertools.product((1, 5, 20, 100), (0, 1.05, 1.2), (256, 4096, 65536), (16, 64, 128, 256)))
    assert {s.data_type for s in measured} == {"FP16", "FP32"}
    assert {(s.weighted, s.vbe) for s in measured} == set(itertools.product((False, True), repeat=2))
    assert max(shape.num_ids for shape in measured) <= loaded.grid_tables.most_ids
    assert loaded.full.counted >= 10 and loaded.full.batches >= 3
    assert 10 < len(workloads(loaded.quick, loaded.grid_tables)) < 50


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("grid_tables:", "grid_table:", "grid_table: a configuration file has no such key; did you mean grid_tables?"),
        ("most_ids: 16777216", "most_ids: 0", "grid_tables.most_ids: 0 is not allowed; allowed: 1 and above"),
        ("counted: 11", "counted: 9", "full.counted: 9 is too few"),
        ("batches: 3", "batches: 2", "full.batches: 2 is not allowed; allowed: 3 and above"),
        (
            "copy: {terabytes_per_second: 4.26,",
            "copy: {rate: 4.26,",
            "card.copy.rate: a configuration file has no such",
        ),
        ("dim: [64, 128], mean", "dim: [62], mean", "full.sweep[0].dim[0]: 62 is not allowed; allowed: multiples of 4"),
        (
            "dim: [64, 128], mean",
            "dim: [16384], mean",
            f"full.sweep[0].dim[0]: 16384 is not allowed; allowed: multiples of 4, 4 and above and below {MAX_DIM + 1}",
        ),
        (
            "rows: [1000000, 10000, 100000, 1000, 3000000, 300000, 30000, 300]",
            "rows: []",
            "grid_tables.rows: [] is not allowed; allowed: one value and more",
        ),
        ("alpha: [1.05]", "alpha: []", "full.grid[0].alpha: [] is not allowed; allowed: one value and more"),
        (
            "batch: [256, 4096",
            "batch: [9999999999, 4096",
            "full.grid[0].batch[0]: 9999999999 is not allowed; allowed: 1",
        ),
        ("rows: [1000000,", "rows: [a,", "grid_tables.rows[0]: expected a whole number, got 'a'"),
        ("counted: 11", "counted: true", "full.counted: expected a whole number, got True"),
        ("seconds: 540", "seconds: .nan", "full.seconds: nan is not allowed; allowed: 1 and above"),
        ("first_step: true", "first_step: 1", "full.first_step: expected true or false, got 1"),
        ("    - prod66 B=65536\n", "    - 5\n", "full.real[0]: expected text, got 5"),
        ("quick:\n", "[1, 2]: 3\nquick:\n", "while constructing a mapping"),
        ("quick:\n", "\tquick:\n", "while scanning for the next token found character"),
        ("name: NVIDIA H200", "name: !!python/name:os.system", "could not determine a constructor for the tag"),
        ("name: NVIDIA H200", "name: \udcff", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_wrong_configuration_names_the_key_and_what_is_allowed(tmp_path, old, new, message, capsys, monkeypatch):
    text = H200.read_text()
    assert old in text
    path = tmp_path / "bench.yaml"
    path.write_text(text.replace(old, new, 1), errors="surrogateescape")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{path}: {message}") and said.count("\n") == 1


def test_an_unknown_workload_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match="'prod66 B=65537' is no real workload; did you mean prod66 B=65536"):
        workloads(Suite(real=("prod66 B=65537",)), TABLES)


def test_a_shape_twice_is_an_error():
    cells = Grid(pooling=(1,), alpha=(0,), batch=(8,), dim=(8,))
    with pytest.raises(ConfigError, match="'L=1 zipf=0 B=8 D=8' is there twice"):
        workloads(Suite(real=(), grid=(cells, cells)), TABLES)


def test_a_shape_of_too_many_ids_is_an_error():
    cells = Grid(pooling=(2**16,), alpha=(0,), batch=(2**15,), dim=(8,))
    with pytest.raises(ConfigError, match="B=32768 D=8' has 2,147,483,648 ids; allowed: below 2,147,483,648"):
        workloads(Suite(real=(), grid=(cells,)), TABLES)


@pytest.mark.parametrize("arguments, suite", [([], "full"), (["--quick"], "quick")])
def test_a_wrong_suite_names_its_file_and_key(tmp_path, arguments, suite, capsys):
    path = tmp_path / "bench.yaml"
    before, after = H200.read_text().split(f"\n{suite}:\n")
    path.write_text(f"{before}\n{suite}:\n" + after.replace("prod66 B=8192\n", "prod66 B=8193\n", 1))
    assert cli.main(["bench", "--config", str(path), *arguments]) == 2
    start = f"{path}: {suite}.real: 'prod66 B=8193' is no real workload; did you mean prod66 B=8192?"
    said = capsys.readouterr().err
    assert said.startswith(start) and said.count("\n") == 1


def test_only_one_thing_is_done(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--quick", "--rates", "some.json"])
    assert "--rates: not allowed with argument --quick" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--config", "nowhere.yaml"], []])
def test_the_command_says_what_is_missing(arguments, capsys, monkeypatch):
    monkeypatch.chdir(H200.parents[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", *arguments]) == 2
    message = capsys.readouterr().err
    assert ("nowhere.yaml: No such file" if arguments else "there is no GPU") in message


# --- shapes --------------------------------------------------------------------------------------------------------


def test_a_batch_has_the_sizes_of_its_workload():
    shape = Workload("", (50, 7), (8, 4), (3, 1), batch=5, weighted=True)
    batch = make_batch(shape, 0, CPU)
    assert batch.offsets.tolist() == [0, 3, 6, 9, 12, 15, 16, 17, 18, 19, 20]
    assert batch.offsets.dtype == batch.indices.dtype == torch.int64
    assert batch.weights.shape == batch.indices.shape == (shape.num_ids,) == (20,)
    assert int(batch.indices[:15].max()) < 50 and int(batch.indices[15:].max()) < 7 and int(batch.indices.min()) >= 0
    again, other = make_batch(shape, 0, CPU), make_batch(shape, 1, CPU)
    assert torch.equal(batch.indices, again.indices) and not torch.equal(batch.indices, other.indices)


def test_jagged_bags_have_their_mean():
    batch = make_batch(Workload("", (50,), (8,), (20,), batch=2000, jagged=True), 0, CPU)
    lengths = batch.offsets.diff().double()
    assert int(batch.offsets[-1]) == batch.indices.numel()
    # Poisson: the variance is the mean. Five standard errors each, of 2000 bags.
    assert abs(lengths.mean() - 20) < 5 * (20 / 2000) ** 0.5
    assert abs(lengths.var() - 20) < 5 * 20 * (2 / 2000) ** 0.5


@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.05, 1.2])
def test_zipf_ids_follow_their_law_and_hot_rows_are_not_neighbours(alpha):
    rows, count = 10_000, 200_000
    batch = make_batch(Workload("", (rows,), (8,), (count,), batch=1, alpha=alpha), 0, CPU)
    hits, order = torch.bincount(batch.indices, minlength=rows).sort(descending=True)
    if alpha == 0:
        assert int(hits[0]) < 3 * count / rows  # a mean of 20: 60 is nine standard deviations off
        return
    power = 1 - alpha
    hottest = (2.0**power - 1) / ((rows + 1.0) ** power - 1) if power else torch.log(torch.tensor(2.0)) / 9.21044
    assert float(hits[0]) / count == pytest.approx(float(hottest), rel=0.05)
    assert order[:8].diff().abs().min() > 100


def test_vbe_gives_features_batches_of_their_own_and_both_ranks_bags():
    shape = Workload("", (9,) * 5, (4, 8, 4, 8, 4), (2,) * 5, batch=16, vbe=True)
    batch = make_batch(shape, 0, CPU)
    assert [sum(sizes) for sizes in batch.batch_sizes] == [16, 14, 12, 10, 16]
    assert batch.batch_sizes[0] == [6, 10]
    assert batch.offsets.numel() - 1 == 68 and batch.indices.numel() == shape.num_ids == 136
    assert shape.output_shape == ((16 + 12 + 16) * 4 + (14 + 10) * 8,)
    assert replace(shape, vbe=False).output_shape == (16, 28)


def test_features_of_an_output_are_found_with_and_without_vbe():
    plain = Workload("", (9, 9), (2, 3), (1, 1), batch=2)
    assert plain.feature(torch.arange(10.0), 1).tolist() == [[2, 3, 4], [7, 8, 9]]
    vbe = Workload("", (9, 9), (1, 2), (1, 1), batch=8, vbe=True)  # [[3, 5], [2, 5]]: rank-major, then feature
    output = torch.arange(22.0)
    assert vbe.feature(output, 0)[:, 0].tolist() == [0, 1, 2, 7, 8, 9, 10, 11]
    assert vbe.feature(output, 1).reshape(-1).tolist() == [3, 4, 5, 6, *range(12, 22)]


def test_a_grid_drops_tables_rather_than_shapes():
    cells = list(grid(Grid(pooling=(1, 100), alpha=(0, 1.2), batch=(5, 300), dim=(8,), vbe=True), TABLES))
    assert len(cells) == 8 and len({cell.name for cell in cells}) == 8
    assert [len(cell.rows) for cell in cells] == [3, 3, 2, 2, 1, 1, 1, 1]
    assert all(cell.rows == TABLES.rows[: len(cell.rows)] and cell.vbe for cell in cells)


@pytest.mark.parametrize("run", [1, 4, 32, 1000])
def test_a_sweep_has_the_mean_run_that_it_names(run):
    (shape,) = sweep(Sweep(dim=(8,), mean_run=(run,), batch=1000, pooling=40))
    found = floor.runs(shape, make_batch(shape, 0, CPU))
    assert found["ids"] / found["unique_rows"] == pytest.approx(max(run, 1.05), rel=0.02)


# --- floor ---------------------------------------------------------------------------------------------------------


def hand_made() -> tuple[Workload, Batch]:
    """Table 0: row 0 seven times, rows 1 and 2 once; table 1: rows 0 and 1, three and one times."""
    shape = Workload("", (3, 300), (8, 4), (9, 4), batch=1, weighted=True)
    indices = torch.tensor([0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1])
    return shape, Batch(indices, torch.tensor([0, 9, 13]), torch.ones(13))


def test_runs_of_a_hand_made_batch():
    found = floor.runs(*hand_made())
    assert found["unique"] == [3, 2] and found["unique_rows"] == 5 and found["ids"] == 13
    assert found["runs"] == {"1": 3, "2-4": 1, "5-32": 1, "33-255": 0, "256+": 0}
    assert found["run_lookups"] == {"1": 3, "2-4": 3, "5-32": 7, "33-255": 0, "256+": 0}
    assert found["longest_run"] == 7


@pytest.mark.parametrize(
    ("length", "kind"), [(1, "1"), (4, "2-4"), (5, "5-32"), (33, "33-255"), (255, "33-255"), (256, "256+")]
)
def test_the_ends_of_run_classes(length, kind):
    shape = Workload("", (3,), (4,), (length,), batch=1)
    found = floor.runs(shape, Batch(torch.zeros(length, dtype=torch.int64), torch.tensor([0, length]), None))
    assert [k for k, count in found["runs"].items() if count] == [kind]
    assert found["run_lookups"][kind] == length


def test_bytes_of_a_hand_made_batch():
    shape, batch = hand_made()
    moved = floor.traffic(shape, batch, [3, 2], weight_bytes=2)
    rows, inputs, output = (3 * 8 + 2 * 4) * 2, 13 * 8 + 3 * 8 + 13 * 4, (8 + 4) * 4
    assert moved["forward"] == {"hbm": {"rows": rows, "inputs": inputs, "output": output}, "l2": (9 * 8 + 4 * 4) * 2}
    # 303 row keys take 9 bits, two digits; key and payload are 4 bytes each, read and written. Two of 300 rows have
    # sectors of their own; the states of a table of three take no more than themselves.
    hbm = {"rows": 2 * rows, "state": 3 * 8 + 2 * 64, "inputs": inputs, "output": output, "sort": 2 * 2 * 13 * 8}
    assert moved["backward"] == {"hbm": hbm, "l2": (9 * 8 + 4 * 4) * 4}


def test_the_floor_is_the_tighter_of_both_limits():
    assert floor.floor_ms({"hbm": {"a": 3e9, "b": 1e9}, "l2": 7e9}, CARD) == pytest.approx(1.0)
    assert floor.floor_ms({"hbm": {"a": 3e9, "b": 1e9}, "l2": 16e9}, CARD) == pytest.approx(2.0)


# --- gate ----------------------------------------------------------------------------------------------------------

SHAPES = {
    "plain": Workload("plain", (30, 3), (8, 20), (4, 6), batch=6),
    "weighted": Workload("weighted", (30, 3), (8, 20), (4, 6), batch=6, weighted=True, jagged=True),
    "vbe": Workload("vbe", (30, 3), (8, 20), (4, 6), batch=8, vbe=True, weighted=True),
    "fp32": Workload("fp32", (30, 3), (8, 20), (4, 6), batch=6, data_type="FP32"),
}


def gated(shape: Workload, change=None) -> dict[str, float]:
    pair = Pair.build(shape, CPU)
    batches = [make_batch(shape, seed, CPU) for seed in range(2)]
    if change:
        change(pair)
    result = gate.gate(pair, shape, batches, torch.randn(shape.output_shape))
    assert pair.ours.optimizer_args.stochastic_rounding and pair.theirs.optimizer_args.stochastic_rounding
    return result


@pytest.mark.parametrize("name", SHAPES)
def test_equal_sides_pass_the_gate(name):
    result = gated(SHAPES[name])
    # Half a spacing of fp16 is what rounding uses up.
    assert (0 if name == "fp32" else 0.5) < result["float64 weights"] <= 1


def test_empty_bags_pass_the_gate():
    gated(Workload("empty", (30, 3), (8, 4), (0, 1), batch=4))


def _scaled(side: str, attribute: str, factor: float):
    """One side's forward or learning rate wrong by a factor."""

    def change(pair: Pair) -> None:
        tbe = getattr(pair, side)
        if attribute == "learning_rate":
            tbe.set_learning_rate(gate.LEARNING_RATE * factor)
        else:
            forward = tbe.forward
            tbe.forward = lambda *arguments, **more: forward(*arguments, **more) * factor

    return change


def test_what_is_wrong_only_in_stochastic_rounding_is_found(monkeypatch):
    """Times are taken with it."""
    update = ops.update

    def wrong(layout, weights, state, grad, batch, optimizer):
        update(layout, weights, state, grad, batch, optimizer)
        if optimizer.rule.stochastic_rounding:
            weights.zero_()

    monkeypatch.setattr(ops, "update", wrong)
    with pytest.raises(GateError, match="stochastic weights"):
        gated(SHAPES["plain"])


@pytest.mark.parametrize("side", ["ours", "theirs"])
@pytest.mark.parametrize(
    ("attribute", "factor", "part"), [("forward", 1.0001, "output1"), ("learning_rate", 2, "weights")]
)
def test_a_side_that_is_wrong_is_named(side, attribute, factor, part):
    with pytest.raises(GateError, match=part):
        gated(SHAPES["plain"], _scaled(side, attribute, factor))


@pytest.mark.parametrize("attribute", ["forward", "learning_rate"])
def test_an_error_that_both_sides_share_is_found(attribute):
    def both(pair: Pair) -> None:
        for side in ("ours", "theirs"):
            _scaled(side, attribute, 1.01)(pair)

    with pytest.raises(GateError, match="float64") as error:
        gated(SHAPES["vbe"], both)
    assert "output1" not in str(error.value)


def test_a_lost_lookup_is_found():
    """One of 500 lookups of a row left out by ours: the output of a bag shows it, or else the state."""

    def lose(pair: Pair) -> None:
        forward = pair.ours.forward

        def without_the_first(indices, *arguments, **more):
            indices = indices.clone()
            indices[0] = -1
            return forward(indices, *arguments, **more)

        pair.ours.forward = without_the_first

    with pytest.raises(GateError, match=r"output1 .*state "):
        gated(Workload("", (1,), (8,), (125,), batch=4), lose)


def test_nan_does_not_pass_the_gate():
    def poison(pair: Pair) -> None:
        reset = pair.reset

        def with_nan() -> None:
            reset()
            for tbe in (pair.ours, pair.theirs):
                gate.flat(tbe)[0].fill_(float("nan"))

        object.__setattr__(pair, "reset", with_nan)

    with pytest.raises(GateError):
        gated(SHAPES["plain"], poison)


# --- timing --------------------------------------------------------------------------------------------------------


def test_sides_take_turns_and_neighbours_never_share_a_batch():
    seen = []
    calls = {name: name for name in bench.SIDES}
    batches = list(range(3))

    def sample(call, batch, grad):
        seen.append((call, batch))
        return len(seen), 0.0

    times = bench.interleave(calls, batches, None, 9, sample, uncounted=2)
    assert {len(found) for found in times.values()} == {9}
    assert all(seen[i][1] != seen[i + 1][1] for i in range(len(seen) - 1))
    rounds = [seen[i : i + 3] for i in range(0, len(seen), 3)]
    assert len(rounds) == 11 and all({call for call, _ in turn} == set(calls) for turn in rounds)
    assert {turn[0][0] for turn in rounds[2:]} == set(calls)
    assert min(first for first, _ in times["triton"] + times["fbgemm"] + times["fbgemm2"]) == 7
    for name in calls:
        used = [batch for call, batch in seen[6:] if call == name]
        assert [used.count(batch) for batch in batches] == [3, 3, 3]


def test_quantiles():
    assert bench.quantiles([float(i) for i in range(11, 0, -1)]) == {"p50": 6.0, "p10": 2.0, "p90": 10.0}
    assert bench.quantiles([3.0]) == {"p50": 3.0, "p10": 3.0, "p90": 3.0}


def test_shapes_with_the_same_kernels_are_compiled_in_one_process():
    weighted = replace(PROD66, name="weighted", weighted=True)
    cells = list(grid(Grid(pooling=(1, 5), alpha=(0, 1.2), batch=(8,), dim=(8, 16)), TABLES))
    work = compiling.groups([*cells, PROD66, weighted, replace(cells[0], data_type="FP32")])
    assert [len(group) for group in work] == [1, 1, 2, 2, 1]  # alpha does not matter
    assert len(work[0][0].rows) == 66 and max(work[0][0].rows) <= 1_000_000


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """The command on CPU tensors in Triton's interpreter, with everything but the clock and the memory counters."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1)
    monkeypatch.setattr(bench, "_device", lambda: CPU)
    monkeypatch.setattr(bench.compiling, "warm_up", lambda *work: 0.0)
    origin = {"hardware": dict.fromkeys(("multiprocessors", "memory_gib", "driver", "copy_terabytes_per_second"), 1)}
    origin |= {"gpu": "a card", "date": "2026-01-01", "commit": "abc", "versions": {}, "command": "bench"}
    monkeypatch.setattr(bench, "_origin", lambda commit: origin)

    class Timer:
        waits = False

        def __call__(self, call, batch, grad):
            forward, backward = bench.host_time(call, batch, grad)
            return forward / 1000, backward / 1000

    monkeypatch.setattr(bench, "GpuTimer", Timer)
    config = tmp_path / "bench.yaml"
    config.write_text(
        """
        card: {name: a card, copy: &rate {terabytes_per_second: 1, source: x}, l2_gather: *rate, memory_gather: *rate}
        grid_tables: {rows: [9, 4], most_ids: 100}
        full: {real: []}
        quick:
          real: []
          grid:
            - {pooling: [2], alpha: [0, 1.2], batch: [3], dim: [8]}
            - {pooling: [2], alpha: [0], batch: [8], dim: [4], vbe: true, weighted: true}
          counted: 3
          host_runs: 1
        """
    )
    only = ("--only", "L=2", "--output", str(tmp_path / "out" / "run.json"))
    return ["bench", "--config", str(config), "--quick", *only]


def test_the_command_from_configuration_to_report(on_cpu, tmp_path, capsys):
    assert cli.main(on_cpu) == 0
    result = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [row["name"] for row in result["rows"]] == [
        "L=2 zipf=0 B=8 D=4 weighted VBE",
        "L=2 zipf=0 B=3 D=8",
        "L=2 zipf=1.2 B=3 D=8",
    ]
    for row in result["rows"]:
        assert all(len(row[side]["samples"]) == 3 and row[side]["sum"]["p50"] > 0 for side in bench.SIDES)
    text = (tmp_path / "out" / "run.md").read_text()
    assert all(row["name"] in text for row in result["rows"])
    assert len(list((tmp_path / "out").glob("*.svg"))) == 3


def test_a_shape_that_fails_the_gate_has_no_times_and_fails_the_command(on_cpu, tmp_path, capsys, monkeypatch):
    build = Pair.build

    def wrong_in_one(shape, device):
        pair = build(shape, device)
        if shape.vbe:
            _scaled("ours", "forward", 1.01)(pair)
        return pair

    monkeypatch.setattr(Pair, "build", wrong_in_one)
    assert cli.main(on_cpu) == 1
    printed = capsys.readouterr()
    assert "not timed: L=2 zipf=0 B=8 D=4 weighted VBE: the gate failed: output1 differs by" in printed.err
    result = json.loads((tmp_path / "out" / "run.json").read_text())
    assert len(result["rows"]) == 2 and not any(row["shape"]["vbe"] for row in result["rows"])
    assert "**Not timed:**" in (tmp_path / "out" / "run.md").read_text()


def test_a_shape_that_does_not_fit_is_named_and_the_next_is_measured(on_cpu, tmp_path, capsys, monkeypatch):
    build = Pair.build

    def too_large(shape, device):
        if shape.vbe:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(shape, device)

    monkeypatch.setattr(Pair, "build", too_large)
    assert cli.main(on_cpu) == 1
    assert "not timed: L=2 zipf=0 B=8 D=4 weighted VBE: does not fit into the GPU's" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "out" / "run.json").read_text())["rows"]) == 2


def test_shapes_that_time_does_not_allow_are_named_and_fail_the_command(on_cpu, tmp_path, capsys, monkeypatch):
    clock = itertools.count(0, 400)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    assert cli.main(on_cpu) == 1
    result = json.loads((tmp_path / "out" / "run.json").read_text())
    assert len(result["rows"]) == 1 and len(result["skipped"]) == 2
    assert "not run within 540 s: 2 shapes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "nothing"],
            "--only nothing: no shape has that in its name; besides the grid there are launch-bound",
        ),
        (["--counted", "0"], "--counted 0: is not allowed"),
    ],
)
def test_wrong_arguments_are_named(on_cpu, capsys, arguments, message):
    assert cli.main([*on_cpu, *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_report_that_cannot_be_written_is_told_before_it_is_measured(on_cpu, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main([*on_cpu, "--output", str(tmp_path / "file" / "run.json")]) == 2
    assert capsys.readouterr().err.startswith(f"--output {tmp_path}/file/run.json: ")


def test_rates_are_measured_at_every_point_of_their_axes(on_cpu, tmp_path, monkeypatch):
    """In small, but through the gate and the turns of the sides."""
    axes = {"data_type": ("FP32", "FP16"), "weighted": (False, True), "dim": (8,), "pooling": (2,)}
    monkeypatch.setattr(rates, "AXES", {**axes, "reuse": (0.5, 4), "lookups": (32,)})
    monkeypatch.setattr(rates, "TABLES", 2)
    launches = [Workload("one", (9, 9), (8, 8), (1, 1), batch=2), Workload("two", (9, 9), (8, 20), (1, 1), batch=2)]
    monkeypatch.setattr(rates, "launch_bound", lambda: launches)
    assert cli.main(["bench", "--rates", str(tmp_path / "rates.json")]) == 0
    read = read_rates(tmp_path / "rates.json")
    assert len(read.times) == 8 and read.gpu == "a card" and read.command == "torchrec-triton bench --rates rates.json"
    assert min(min(ms["fused"] + ms["fused_triton"]) for ms in read.times.values()) > 0


def test_what_a_further_width_adds():
    one, three = {"a": [1.0, 2.0], "b": [3.0, 4.0]}, {"a": [1.5, 4.0], "b": [2.9, 4.0]}
    assert rates.further_width((1, one), (3, three)) == {"a": [0.25, 1.0], "b": [0.0, 0.0]}  # noise is no gain


# --- report --------------------------------------------------------------------------------------------------------


def measured(shape: Workload, ours: float, theirs: float, theirs2: float) -> dict:
    """A row as `measure` makes it, with times of `ours`, `theirs` and `theirs2` ms forward and twice that backward."""
    row = bench.describe(shape, make_batch(shape, 0, CPU), 2, CARD)
    for side, forward in zip(bench.SIDES, (ours, theirs, theirs2)):
        parts = {part: times * forward for part, times in (("forward", 1), ("backward", 2), ("sum", 3))}
        row[side] = {part: {"p50": t, "p10": 0.9 * t, "p90": 1.1 * t} for part, t in parts.items()}
        row[side] |= {"host_forward_us": 100.0, "host_backward_us": 200.0, "forward_bytes": 2**20}
        row[side] |= {"backward_bytes": 2**21, "samples": [[forward, 2 * forward]]}
    return {**row, "gate": {"output1": 0.0}, "waits_for_device": False}


@pytest.fixture
def result() -> dict:
    cell = Workload("cell", (30,), (8,), (4,), batch=6, group="grid")
    weighted = replace(cell, name="cell weighted", weighted=True)
    return {
        "date": "2026-01-01",
        "gpu": "a card",
        "hardware": {"multiprocessors": 1, "memory_gib": 1, "driver": "1", "copy_terabytes_per_second": 4.1},
        "versions": {"torch": "2"},
        "commit": "abc",
        "command": "torchrec-triton bench",
        "card": {"name": "a card", **{k: vars(getattr(CARD, k)) for k in ("copy", "l2_gather", "memory_gather")}},
        "counted": 11,
        "batches": 3,
        "host_runs": 11,
        "seconds": 12.3,
        "compile_seconds": 4.0,
        "first_step": {"cold": 20.0, "warm": 1.5, "cold_process": 30.0, "warm_process": 11.5},
        "failed": [{"name": "wrong one", "reason": "output1 differs"}],
        "skipped": ["late one"],
        "rows": [
            measured(SHAPES["plain"], 1.0, 3.0, 2.0),
            measured(cell, 1.0, 0.8, 0.9),
            measured(weighted, 1.1, 2.2, 2.2),
        ],
    }


def test_ratios_take_the_better_fbgemm(result):
    plain, cell, _ = result["rows"]
    assert report.ratio(plain, "sum") == pytest.approx(2.0)
    assert report.ratio(cell, "forward") == pytest.approx(0.8)
    found = report.summary(result["rows"])["backward"]
    assert found["median"] == pytest.approx(2.0) and found["least"] == pytest.approx(0.8)
    assert found["below_1"] == {"cell": pytest.approx(0.8)}
    plain["floor"]["forward"]["ms"] = 0.25
    assert report.fraction(plain, "forward") == 0.25


def test_weighted_shapes_meet_their_twins(result):
    ((plain, weighted),) = report.weighted_pairs(result["rows"])
    assert (plain["name"], weighted["name"]) == ("cell", "cell weighted")


def test_who_is_stopped_while_writing_leaves_the_file_that_was_there(result, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    report.save(result, path)
    before, write = path.read_text(), Path.write_text

    def half(self, text):
        write(self, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        report.save({**result, "seconds": 99.0}, path)
    assert path.read_text() == before


def test_a_report_is_rendered_from_its_json_alone(result, tmp_path, capsys):
    path = tmp_path / "run.json"
    report.save(result, path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert cli.main(["bench", "--render", str(path)]) == 0
    text = path.with_suffix(".md").read_text()
    assert "| grid and run-length sweep | 2 | forward | 1.40 | 0.80 | 0.80 | 1 |" in text
    assert "- grid and run-length sweep, sum: cell (0.80)\n" in text
    assert "- wrong one: output1 differs" in text and "late one" in text
    assert "20.0 s with an empty Triton cache, 1.5 s in a second process" in text
    assert "| cell weighted | 1.10 | 1.10 | 1.10 | 2.75 | 2.75 | 2.75 |" in text
    assert "| host backward us | 1.00 | 1.00 | plain |" in text
    assert "| plain | 1.000 (0.900-1.100) | 2.000 (1.800-2.200) | 2.00 |" in text
    assert "median (P10-P90) of 11 runs" in text
    plots = sorted(tmp_path.glob("*.svg"))
    assert [svg.name for svg in plots] == ["run-dim.svg", "run-run-length.svg", "run-shapes.svg"]
    assert all(f"({svg.name})" in text for svg in plots)
    for svg in plots:
        ElementTree.parse(svg)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    columns = [line.count("|") for line in tables]
    rules = [i for i, line in enumerate(tables) if line.startswith("|---")]
    assert all(columns[i - 1] == columns[i] == columns[i + 1] for i in rules)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), ("{", "Expecting"), ("[]", "is not the report")]
)
def test_a_file_that_is_no_report_is_refused(tmp_path, capsys, content, message):
    path = tmp_path / "run.json"
    if content:
        path.write_text(content)
    assert cli.main(["bench", "--render", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_a_passed_shape_still_has_a_report(result):
    result |= {"rows": [], "first_step": None}
    assert "wrong one" in report.markdown(result)
    assert report.charts([]) == {}


def test_a_chart_places_its_points():
    svg = ElementTree.fromstring(plot.chart("t", "x", "y", {"a": [(1, 1), (100, 4)]}, log_x=True))
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in svg.iter("{http://www.w3.org/2000/svg}circle")]
    assert dots[0][0] < dots[1][0] and dots[0][1] > dots[1][1]


def test_a_chart_of_one_point_has_axes():
    svg = plot.chart("t", "x", "y", {"a": [(8, 1)], "b": []}, log_x=True, x_ticks=[8])
    labels = [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "1" in labels and "8" in labels
