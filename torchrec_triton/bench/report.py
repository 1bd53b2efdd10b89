"""The report of a run: JSON as it was measured, Markdown and plots made from it alone, on any machine."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torchrec_triton.bench import plot

Row = dict[str, Any]
PARTS = ("forward", "backward", "sum")
FBGEMM = ("fbgemm", "fbgemm2")
GROUPS = {
    "real": "Real workloads",
    "launch": "Launch-bound: what the host takes is what a step takes",
    "sweep": "Run length: one table, uniform ids",
    "grid": "Grid",
}


def best(row: Row, part: str) -> dict[str, float]:
    """FBGEMM's times with the faster of its two forwards for this part."""
    return min((row[side][part] for side in FBGEMM), key=lambda times: times["p50"])


def ratio(row: Row, part: str) -> float:
    """FBGEMM's median over ours: above 1 ours is faster."""
    return best(row, part)["p50"] / row["triton"][part]["p50"]


def fraction(row: Row, part: str) -> float | None:
    """Share of the floor that our time achieves, or None where no limits of the card were given."""
    least = row["floor"][part]["ms"]
    return None if least is None else least / row["triton"][part]["p50"]


def summary(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """For each part: median, P10 and least speed-up over the shapes, and which shapes are below 1."""
    rows = list(rows)
    result = {}
    for part in PARTS:
        ratios = sorted(ratio(row, part) for row in rows)
        result[part] = {
            "median": statistics.median(ratios),
            "p10": ratios[len(ratios) // 10],
            "least": ratios[0],
            "below_1": {row["name"]: r for row in rows if (r := ratio(row, part)) < 1},
        }
    return result


def weighted_pairs(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """(unweighted, weighted) rows of one shape."""

    def key(row: Row, weighted: bool) -> str:
        return json.dumps({**row["shape"], "weighted": weighted}, sort_keys=True)

    rows = list(rows)
    plain = {key(row, True): row for row in rows if not row["shape"]["weighted"]}
    return [(plain[k], row) for row in rows if row["shape"]["weighted"] and (k := key(row, True)) in plain]


HEADER = (
    "| shape | forward ms | FBGEMM | ratio | backward ms | FBGEMM | ratio | sum ms | FBGEMM | ratio "
    "| of floor, fwd / bwd |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    """The row as a line of the table of times."""
    cells = [row["name"] + (" *" if row["waits_for_device"] else "")]
    for part in PARTS:
        ours = row["triton"][part]
        cells += [_span(ours), _span(best(row, part)), f"{ratio(row, part):.2f}"]
    shares = [fraction(row, part) for part in PARTS[:2]]
    cells.append(" / ".join("-" if share is None else f"{share:.0%}" for share in shares))
    return _row(cells)


def _span(times: dict[str, float]) -> str:
    """Median, then P10 to P90."""
    digits = 4 if times["p50"] < 0.1 else 3 if times["p50"] < 10 else 2
    return f"{times['p50']:.{digits}f} ({times['p10']:.{digits}f}-{times['p90']:.{digits}f})"


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _table(header: str, rows: Iterable[Iterable[object]]) -> list[str]:
    columns = [cell.strip() for cell in header.split("|")]
    return [_row(columns), "|" + "---|" * len(columns), *map(_row, rows), ""]


def to_json(result: dict[str, Any]) -> str:
    """One line a row."""
    head = json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1)
    return head[:-2] + ',\n "rows": [\n' + ",\n".join(map(json.dumps, result["rows"])) + "\n]}\n"


def save(result: dict[str, Any], path: Path) -> None:
    """Whole or not at all: who is stopped while writing leaves the file that was there."""
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(to_json(result))
    unfinished.replace(path)


def write(result: dict[str, Any], path: Path) -> None:
    """JSON at `path`; Markdown and plots beside it."""
    save(result, path)
    plots = {f"{path.stem}-{name}.svg": svg for name, svg in charts(result["rows"]).items()}
    for name, svg in plots.items():
        path.with_name(name).write_text(svg)
    path.with_suffix(".md").write_text(markdown(result, list(plots)))


def render(path: str) -> int:
    """The command `bench --render`: Markdown and plots of a JSON file that a run left."""
    try:
        result = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    if not isinstance(result, dict) or not {"card", "rows", "failed"} <= result.keys():
        print(f"{path}: is not the report of a `torchrec-triton bench` run", file=sys.stderr)
        return 2
    write(result, Path(path))
    return 0


def charts(rows: list[Row]) -> dict[str, str]:
    """Plots by name: speed-up against mean run length, against D, and over shapes."""

    def points(x: Callable[[Row], float | None]) -> dict[str, list[tuple[float, float]]]:
        found = [(at, row) for row in rows if (at := x(row)) is not None]
        return {part: [(at, ratio(row, part)) for at, row in found] for part in PARTS}

    def dim(row: Row) -> float | None:
        dims = set(row["shape"]["dims"])
        return float(dims.pop()) if len(dims) == 1 else None

    if not rows:
        return {}
    ranked = {part: sorted(ratio(row, part) for row in rows) for part in PARTS}
    shares = {part: [(100 * (i + 0.5) / len(r), value) for i, value in enumerate(r)] for part, r in ranked.items()}
    label = "FBGEMM / Triton"
    return {
        "run-length": plot.chart(
            "Speed-up against run length", "lookups / distinct rows", label,
            points(lambda row: row["ids"] / row["unique_rows"] if row["ids"] else None), log_x=True, spread=0.03,
        ),
        "dim": plot.chart(
            "Speed-up against D", "D (shapes whose tables have one)", label, points(dim),
            log_x=True, x_ticks={d for row in rows if (d := dim(row))}, spread=0.06,
        ),
        "shapes": plot.chart(
            "Speed-up over shapes", "percent of shapes with less", label, shares, x_ticks=range(0, 101, 25), joined=True
        ),
    }  # fmt: skip


def markdown(result: dict[str, Any], plots: Iterable[str] = ()) -> str:
    """The report: what is compared and how, the summary, then every shape."""
    rows = result["rows"]
    lines = [f"# {result['gpu']}, {result['date']}", "", *_how(result), *_verdict(result)]
    lines += [f"![{name}]({name})\n" for name in plots]
    for group, title in GROUPS.items():
        chosen = [row for row in rows if row["group"] == group]
        if chosen:
            lines += [f"## {title}", "", HEADER, *map(line, chosen), ""]
            lines += _host_and_memory(chosen) if group == "launch" else []
    if any(row["waits_for_device"] for row in rows):
        lines += [
            "\\* A side waits for the device inside the call, or its launches take too long to be hidden.",
            "",
        ]
    lines += [*_weighted(rows), "## Host time and memory", "", *_host_and_memory(rows), *_runs(rows)]
    return "\n".join(lines)


_METHOD = """## What is compared, and how

- **Sides.** This package's TBE, and FBGEMM's CUDA TBE (`SplitTableBatchedEmbeddingBagsCodegen`) at its best: each
  column takes the faster of its default and its opt-in forward (`use_experimental_tbe`, which it has without VBE
  only), deterministic mode is off, and where lookups are weighted, `feature_requires_grad` tells FBGEMM to leave out
  the gradient of the per-sample weights: nothing wants it, and ours leaves it out.
- **Same work.** fp16 weights (fp32 where a shape's name says so), fp32 output, SUM pooling, exact row-wise Adagrad (lr
  0.01, eps 1e-8), stochastic rounding, bounds check WARNING, int64 ids and offsets, equal batches and gradients. A
  forward is everything from the call to the output; a backward everything from the output's gradient to the updated
  tables: sort, workspace, optimizer. The sum is of one and the same run.
- **Gate.** Before a shape is timed, two steps from equal weights, rounding to nearest, have to give equal outputs,
  weights and state on both sides within rounding, FBGEMM's opt-in forward among them; and sampled bags and rows of
  every table, its most used row among them, have to agree with float64 arithmetic that shares no code with either
  side. A shape that fails has no times.
- **Times** are CUDA events: median (P10-P90) of {counted} runs a side. Idle work is queued ahead, and a run counts
  only if the GPU had not begun it when the host had launched all of it. The sides take turns in one process, in a
  turning order; {batches} batches rotate so that no two neighbouring runs share one. Both FBGEMM forwards work on one
  set of tables, so caches favour FBGEMM if anybody.
- **Host** times are medians of {host_runs} calls on an idle GPU, nothing queued ahead. **Memory** is the most that a
  pass takes beyond what was allocated before it; a forward's includes its output.
- **Ratio**: FBGEMM's median over ours; above 1 ours is faster. **Of floor**: the least time that the card allows for
  the bytes of a pass, as a share of our time. It is the larger of memory bytes over the copy rate and L2 bytes over
  the L2 gather rate. Forward: distinct rows, inputs, output; L2: every looked-up row. Backward: gradient once,
  distinct rows in and out, 64 B of state a distinct row, inputs, a radix sort of 8-bit digits; L2: a gradient row a
  lookup. Inputs are ids, offsets and per-sample weights. The JSON file has every term.
- **Shapes.** The grid has {tables}. Ids are uniform or follow a Zipf law, scattered over the table. VBE: features in
  turn have all, 7/8, 6/8, 5/8 of the batch, on two ranks.

Limits of the card, where a copy reached {copied} TB/s in this run:
"""


def _how(result: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    card, hardware = result["card"], result["hardware"]
    limits = [
        f"- {name.replace('_', ' ')}: {card[name]['terabytes_per_second']} TB/s ({card[name]['source']})"
        for name in ("copy", "l2_gather", "memory_gather")
    ]
    if card["name"] != result["gpu"]:
        limits.append(f"- These are limits of another GPU, {card['name']}: shares of the floor mean little here.")
    return [
        f"{result['gpu']} ({hardware['multiprocessors']} multiprocessors, {hardware['memory_gib']} GiB, driver "
        f"{hardware['driver']}); {versions}. Commit {result['commit']}. `{result['command']}`, "
        f"{result.get('seconds', 0):.0f} s, of which {result['compile_seconds']:.0f} s compiled kernels in parallel.",
        "",
        _METHOD.format(
            **{key: result[key] for key in ("counted", "batches", "host_runs")},
            tables=_grid_tables(result["rows"]),
            copied=hardware["copy_terabytes_per_second"],
        ),
        *limits,
        "- Random rows come from memory at the memory gather rate at best: a pass made of them can't fill the floor.",
        "",
    ]


def _grid_tables(rows: list[Row]) -> str:
    shapes = [row["shape"]["rows"] for row in rows if row["group"] == "grid"]
    if not shapes:
        return "several tables of different sizes"
    full = max(shapes, key=len)
    fewest = min(map(len, shapes))
    sizes = ", ".join(f"{r:,}" for r in full)
    fewer = f"; those of many ids the first {fewest} or more of them" if fewest < len(full) else ""
    return f"{len(full)} tables of {sizes} rows, a feature each{fewer}"


def _verdict(result: dict[str, Any]) -> list[str]:
    lines = ["## Summary", ""]
    if result["counted"] < 10:
        lines += [f"For orientation only: {result['counted']} runs a side are too few to be quoted.", ""]
    groups = {
        "real workloads": ("real",), "launch-bound": ("launch",), "grid and run-length sweep": ("grid", "sweep")
    }  # fmt: skip
    table, below = [], []
    for title, members in groups.items():
        rows = [row for row in result["rows"] if row["group"] in members]
        for part, found in summary(rows).items() if rows else ():
            slow = found["below_1"]
            figures = (f"{found[key]:.2f}" for key in ("median", "p10", "least"))
            table.append([title, len(rows), part, *figures, len(slow)])
            if slow:
                names = (f"{name} ({slow[name]:.2f})" for name in sorted(slow, key=slow.__getitem__))
                below.append(f"- {title}, {part}: {', '.join(names)}")

    def spread(heading: str) -> list[str]:
        over = {row["name"]: ours / theirs for row in result["rows"] for ours, theirs in [cost(row, heading)]}
        most = max(over, key=over.__getitem__)
        return [heading, f"{statistics.median(over.values()):.2f}", f"{over[most]:.2f}", most]

    lines += _table("speed-up over | shapes | part | median | P10 | least | below 1.0", table)
    if below:
        lines += ["Below 1.0, slowest first:", "", *below, ""]
    elif table:
        lines += ["No shape is below 1.0 in any part.", ""]
    if result["rows"]:
        lines += _table("ours over FBGEMM's, all shapes | median | largest | of shape", map(spread, COSTS))
    if result["failed"]:
        failures = (f"- {failure['name']}: {failure['reason']}" for failure in result["failed"])
        lines += ["**Not timed:**", "", *failures, ""]
    if result["skipped"]:
        lines += [f"**Not run, because time was up:** {', '.join(result['skipped'])}", ""]
    if first := result["first_step"]:
        lines += [
            "First step of a model (26 tables, D=128, one id a bag, B=8192), from the call of the module to the end of "
            f"its backward: {first['cold']:.1f} s with an empty Triton cache, {first['warm']:.1f} s in a second "
            f"process, which finds it filled. The whole processes, imports included: {first['cold_process']:.1f} s and "
            f"{first['warm_process']:.1f} s.",
            "",
        ]
    return lines


def _weighted(rows: list[Row]) -> list[str]:
    pairs = weighted_pairs(rows)
    if not pairs:
        return []

    def factors(time: Callable[[Row, str], float]) -> list[list[float]]:
        return [[time(weighted, part) / time(plain, part) for part in PARTS] for plain, weighted in pairs]

    sides = zip(
        factors(lambda row, part: row["triton"][part]["p50"]), factors(lambda row, part: best(row, part)["p50"])
    )
    cells = [ours + theirs for ours, theirs in sides]
    table = [["median", *map(statistics.median, zip(*cells))], ["largest", *map(max, zip(*cells))]]
    table += [[weighted["name"], *row] for (_, weighted), row in zip(pairs, cells)]
    return [
        "## Weighted over unweighted time, same shape",
        "",
        *_table(
            "shape | forward | backward | sum | FBGEMM forward | backward | sum",
            ([name, *(f"{factor:.2f}" for factor in row)] for name, *row in table),
        ),
    ]


# Costs beside time, by heading: what is added up, unit.
COSTS = {
    "host forward us": (("host_forward_us",), 1),
    "host backward us": (("host_backward_us",), 1),
    "host both us": (("host_forward_us", "host_backward_us"), 1),
    "forward MiB": (("forward_bytes",), 2**20),
    "backward MiB": (("backward_bytes",), 2**20),
}


def cost(row: Row, heading: str) -> tuple[float, float]:
    """(ours, FBGEMM's smaller one) of a host time or a peak of memory, in its unit."""
    keys, unit = COSTS[heading]
    ours, *theirs = (sum(row[side][key] for key in keys) / unit for side in ("triton", *FBGEMM))
    return ours, min(theirs)


def _host_and_memory(rows: list[Row]) -> list[str]:
    def cell(row: Row, heading: str) -> str:
        return " / ".join(f"{value:,.0f}" for value in cost(row, heading))

    table = ([row["name"], *(cell(row, heading) for heading in COSTS)] for row in rows)
    return _table(" | ".join(["ours / FBGEMM", *COSTS]), table)


def _runs(rows: list[Row]) -> list[str]:
    kinds = list(rows[0]["runs"]) if rows else []

    def cells(row: Row) -> list[str]:
        counts = [f"{row['runs'][kind]:,} / {row['run_lookups'][kind]:,}" for kind in kinds]
        floors = [f"{row['floor'][part]['ms']:.3f}" if row["floor"][part]["ms"] else "-" for part in PARTS[:2]]
        return [row["name"], f"{row['ids']:,}", f"{row['unique_rows']:,}", *counts, *floors]

    return [
        "## Runs (a row and all its lookups) / lookups in them, by length",
        "",
        *_table(
            " | ".join(["shape", "ids", "distinct rows", *kinds, "floor forward ms", "floor backward ms"]),
            map(cells, rows),
        ),
    ]
