"""The verdict on a comparison, and its report: JSON, Markdown, and one HTML page without external parts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from torchrec_triton.ab.arm import PHASES
from torchrec_triton.ab.compare import PERCENTILES, Report
from torchrec_triton.ab.plot import bars, curves, distribution, intervals
from torchrec_triton.config import Limits
from torchrec_triton.plan.report import ranges

Rows = list[Sequence[str]]
_MEANING = {
    "input": "waiting for the batch, and starting the exchange of the next one's ids",
    "forward": "the model, with the exchange of pooled embeddings",
    "backward": "with the exchange of gradients, the update of the tables, and the rest of the next batch's exchange",
    "optimizer": "of the dense layers",
}


def judge(report: Report, limits: Limits) -> Report:
    """{passed, line, checks}; a check is {name, of, value, limit, passed}: the worst value and what it is of; passed is
    None where nothing was measured."""
    arms, ratio = report["arms"], report["speed_ratio"]["p50"]
    metrics = [arm["metrics"] for arm in arms.values()]
    apart: dict[str, dict[str, float]] = {
        key: {f"table {table['name']}": table[key]["share"] for table in report["tables"] if table[key]}
        for key in ("weight_difference", "state_difference")
    }
    if report["dense_difference"]:
        apart["weight_difference"]["dense layers"] = report["dense_difference"]["share"]
    measured: dict[str, dict[str, float]] = {
        "loss_difference": {"": report["loss_difference"]},
        "metric_difference": {name: abs(metrics[0][name] - metrics[1][name]) for name in ("auc", "log_loss")},
        **apart,
        "speed_ratio": {"": ratio["interval"][0]},
        "memory_ratio": {} if report["memory_ratio"] is None else {"": report["memory_ratio"]},
    }
    checks = []
    for name, values in measured.items():
        limit = getattr(limits, name)
        # What is no number counts as the worst; max alone would lose it.
        of, value = max(values.items(), key=lambda item: (math.isnan(item[1]), item[1]), default=("", None))
        if limit == getattr(Limits(), name) and (value is None or math.isfinite(value)):
            continue  # not asked for; what is infinite or no number fails unasked
        good = None if value is None else value >= limit if name == "speed_ratio" else value <= limit < math.inf
        checks.append({"name": name, "of": of, "value": value, "limit": limit, "passed": good})
    failed = [check for check in checks if check["passed"] is False]
    skipped = [check["name"] for check in checks if check["passed"] is None]
    low, high = ratio["interval"]
    what = (
        f"{label(report, 'B')} is {ratio['value']:.3f} times as fast as {label(report, 'A')} "
        f"(95 % interval {low:.3f} to {high:.3f})"
    )
    if failed:
        why = "; ".join(f"{_check(c)} {_number(c['value'])}, limit {_number(c['limit'])}" for c in failed)
        line = f"FAIL: {why}. {what}"
    else:
        count = len(checks) - len(skipped)
        passed = f"{count} check{'s' * (count != 1)} passed"
        line = f"PASS: {what}; {passed if checks else 'nothing was checked, because ab.limits sets no limit'}"
    line += f"; not measured here: {', '.join(skipped)}" if skipped else ""
    return {"passed": not failed, "line": line, "checks": checks}


def write(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(plain(report), indent=1, allow_nan=False) + "\n")
    if "verdict" in report:
        (folder / "report.md").write_text(markdown(report))
        (folder / "report.html").write_text(page(report))


def label(report: Report, arm: str) -> str:
    asked = "+".join(sorted({table[arm]["asked"] for table in report["tables"]}))
    got = "+".join(report["arms"][arm]["kernels"])
    return f"{arm} ({asked}{'' if got == asked else f': {got}'})"


def figures(report: Report) -> Rows:
    """What is measured of each arm: name, A, B, and a ratio or the difference, which says which way round it is."""
    a, b = report["arms"]["A"], report["arms"]["B"]
    rows: Rows = []
    for p in PERCENTILES:
        ratio = report["speed_ratio"][f"p{p}"]
        low, high = ratio["interval"]
        values = [f"{arm['step_ms'][f'p{p}']:.3f}" for arm in (a, b)]
        rows.append((f"step, ms, P{p}", *values, f"A / B {ratio['value']:.3f} ({low:.3f} to {high:.3f})"))
    rows += [
        (
            f"{phase}, ms",
            _spread(a, phase),
            _spread(b, phase),
            _quotient("A / B", *(x["phase_ms"][phase] for x in (a, b))),
        )
        for phase in PHASES
    ]
    if a["profile"]:
        for key, what in (("collective_ms", "collectives, ms"), ("gpu_ms", "GPU kernels and copies, ms")):
            one, two = a["profile"][key], b["profile"][key]
            if one is not None:
                rows.append((f"{what} (profiler)", f"{one:.3f}", f"{two:.3f}", _quotient("A / B", one, two)))
    rate = [arm["examples_per_second"] for arm in (a, b)]
    rows.append(("examples a second", f"{rate[0]:,.0f}", f"{rate[1]:,.0f}", _quotient("B / A", rate[1], rate[0])))
    if a["peak_memory_mb"]:
        peak = [max(arm["peak_memory_mb"]) for arm in (a, b)]
        rows.append(
            ("peak GPU memory, MB", f"{peak[0]:,.1f}", f"{peak[1]:,.1f}", f"B / A {report['memory_ratio']:.3f}")
        )
    for name, what in (("auc", "AUC"), ("log_loss", "log loss"), ("normalized_entropy", "normalized entropy")):
        one, two = a["metrics"][name], b["metrics"][name]
        rows.append((f"{what}, held out", f"{one:.5f}", f"{two:.5f}", _signed(one - two)))
    losses = a["final_loss"], b["final_loss"]
    rows.append(("training loss, last tenth", *(f"{x:.5f}" for x in losses), _signed(losses[0] - losses[1])))
    return rows


def tables(report: Report) -> Rows:
    """Of each table: name, size, kernel and placement in either arm, largest differences, reasons."""
    rows: Rows = []
    for table in report["tables"]:
        a, b = table["A"], table["B"]
        reasons = [
            f"{arm}: {r}" for arm, one in (("A", a), ("B", b)) for r in one["reasons"] if one["asked"] != "fused"
        ]
        rows.append(
            (
                table["name"],
                f"{table['rows']:,} x {table['dim']} {table['data_type']}",
                a["kernel"],
                b["kernel"],
                _placement(a) + (f" -> {_placement(b)}" if table["moved"] else ""),
                *(_difference(table[key]) for key in ("weight_difference", "state_difference")),
                "; ".join(reasons),
            )
        )
    rows.append(("dense layers", "", "", "", "on every rank", _difference(report["dense_difference"]), "", ""))
    return rows


FIGURES = ("", "A", "B", "compared")
TABLES = ("table", "size", "kernel A", "kernel B", "placement", "weights apart", "state apart", "reasons")
CHECKS = ("check", "measured", "limit", "")
TABLES_NOTE = (
    "Largest difference after training: absolute, and as a share of the table's largest value. "
    "A dash: there is no state, or it is cut otherwise in the other arm."
)


def checks(report: Report) -> Rows:
    said = {True: "pass", False: "FAIL", None: "not measured"}
    return [
        (_check(c), _number(c["value"]), _number(c["limit"]), said[c["passed"]]) for c in report["verdict"]["checks"]
    ]


def facts(report: Report) -> Rows:
    config, ab = report["config"], report["config"]["ab"]
    moved = [table["name"] for table in report["tables"] if table["moved"]]
    plan = {
        "given": "of a file, for both arms; only the kernels differ",
        "frozen": "one for both arms; only the kernels differ",
        "replan": f"the planner chose for each arm; moved: {', '.join(moved) or 'nothing'}",
    }[report["plan"]]
    first, last = report["timed"]
    rows: Rows = [
        ("device", f"{report['device']}, {report['world_size']} rank(s)"),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
        ("Triton's interpreter", "on" if report["interpreter"] else "off"),
        ("plan", plan),
        ("weights at the start", f"differ by {report['initial_difference']:.1e}"),
        ("steps", f"{config['steps']} of {config['data']['batch_size']} samples a rank; {first} to {last} are timed"),
        ("turns", f"{ab['steps_a_turn']} step(s) each, A and B going first by turns, the device idle in between"),
        ("pipeline", {"sparse_dist": "TrainPipelineSparseDist", "base": "TrainPipelineBase"}[config["pipeline"]]),
        ("time", "CUDA events" if report["arms"]["A"]["peak_memory_mb"] else "the host's clock"),
        ("date", report["date"]),
        ("command", report["command"]),
    ]
    return rows


def how(report: Report) -> list[str]:
    """What the figures mean."""
    lines = [
        "A step goes from the call of the pipeline to the end of its work; of all ranks the slowest counts. Times "
        "are compared as A / B: above 1, B is faster. Examples a second and memory are compared as B / A: above 1, B "
        "does or needs more. The 95 % intervals come from a bootstrap over pairs of turns.",
        "Phases: " + "; ".join(f"{phase}: {_MEANING[phase]}" for phase in PHASES) + ". Given are the "
        "median and the P10 to P90 of each phase for itself, of its slowest rank: they do not add up to a median step.",
    ]
    if profiled := report["arms"]["A"]["profile"]:
        lines.append(
            f"Collectives, and the GPU's kernels and copies, come from {profiled['steps']} further steps under the "
            "profiler: the time of a step in which at least one of them ran. Collectives are NCCL's kernels, or gloo's "
            "operations on the CPU; they include waiting for other ranks, and may overlap with the rest."
        )
    if report["arms"]["A"]["peak_memory_mb"]:
        lines.append(
            "Phases lie between events in the GPU's stream: where the GPU waits for the host they show the host's "
            "time, and where it lags behind the host, input takes next to nothing."
        )
        lines.append(
            "Peak memory is what the arm would need alone: what it holds and the most that one step adds, beside what "
            "PyTorch keeps for matrix products once a process (cuBLAS)."
        )
    return lines


def markdown(report: Report) -> str:
    lines = [
        "# A/B: " + " against ".join(label(report, arm) for arm in "AB"),
        "",
        f"**{report['verdict']['line']}**",
        "",
    ]
    lines += [f"> {note}\n" for note in report["notes"]]
    lines += ["## Figures", "", *_md(FIGURES, figures(report)), "", *(f"{line}\n" for line in how(report))]
    if report["verdict"]["checks"]:
        lines += ["## Checks", "", *_md(CHECKS, checks(report)), ""]
    lines += ["## Tables", "", TABLES_NOTE, "", *_md(TABLES, tables(report)), ""]
    lines += ["## Run", "", *_md(("", ""), facts(report)), ""]
    lines += ["```yaml", _yaml(report), "```"]
    return "\n".join(lines) + "\n"


def text(report: Report) -> str:
    """For the screen."""
    rows = [("", label(report, "A"), label(report, "B"), FIGURES[3]), *figures(report)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in rows]
    return "\n".join([*lines, "", *(f"note: {note}" for note in report["notes"]), report["verdict"]["line"]])


def page(report: Report) -> str:
    """One HTML page."""
    verdict, names = report["verdict"], [label(report, arm) for arm in "AB"]
    loss, times = report["curves"]["loss"], report["curves"]["step_ms"]
    first, last = report["timed"]
    timed = [times[arm][first:last] for arm in "AB"]
    apart = [[abs(a - b) for a, b in zip(loss["A"], loss["B"])]]
    phases = {phase: [report["arms"][arm]["phase_ms"][phase] for arm in "AB"] for phase in PHASES}
    keys = names if sum(map(len, names)) < 40 else ["A", "B"]  # no wider, beside the label of the y axis
    plots = [
        ("Training loss", curves(keys, [loss["A"], loss["B"]], "step", "log loss", smooth=True)),
        ("Difference of the losses", curves(["|A - B| where it is not 0"], apart, "step", "log loss", log=True)),
        ("Step time", distribution(keys, timed, "ms", "share of the steps that took no longer")),
        ("Step time along the run", curves(keys, timed, "timed step", "ms", first=first)),
        ("Where a step's time goes (medians)", bars(keys, phases, "ms")),
        (
            "Speed, A / B, with 95 % intervals",
            intervals({name.upper(): r for name, r in report["speed_ratio"].items()}),
        ),
    ]
    ratio = report["speed_ratio"]["p50"]
    b = report["arms"]["B"]
    tiles = [
        (
            "speed, A / B of the median step",
            f"{ratio['value']:.3f}",
            f"{ratio['interval'][0]:.3f} to {ratio['interval'][1]:.3f}",
        ),
        (
            "examples a second, B",
            f"{b['examples_per_second']:,.0f}",
            f"A {report['arms']['A']['examples_per_second']:,.0f}",
        ),
        ("largest loss difference", _number(report["loss_difference"]), "at one step"),
        ("AUC, B", f"{b['metrics']['auc']:.4f}", f"A {report['arms']['A']['metrics']['auc']:.4f}"),
    ]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report["notes"])
    body = [
        f"<h1>{escape(' against '.join(names))}</h1>",
        f'<p class="verdict {"pass" if verdict["passed"] else "fail"}">{escape(verdict["line"])}</p>{notes}',
        '<div class="tiles">',
        *(
            f"<div><b>{escape(big)}</b><span>{escape(what)}</span><i>{escape(small)}</i></div>"
            for what, big, small in tiles
        ),
        "</div>",
        '<div class="plots">',
        *(f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in plots),
        "</div>",
        "<h2>Figures</h2>",
        _html(("", *names, FIGURES[3]), figures(report)),
        *(f"<p>{escape(line)}</p>" for line in how(report)),
        *(("<h2>Checks</h2>", _html(CHECKS, checks(report))) if verdict["checks"] else ()),
        f"<h2>Tables</h2><p>{TABLES_NOTE}</p>",
        _html(TABLES, tables(report)),
        "<h2>Run</h2>",
        _html(("", ""), facts(report)),
        f"<details><summary>configuration</summary><pre>{escape(_yaml(report))}</pre></details>",
    ]
    return _PAGE.replace("TITLE", escape(f"{verdict['line'].partition(':')[0]}: {' against '.join(names)}")).replace(
        "BODY", "\n".join(body)
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>TITLE</title>
<style>
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6675; --line: #d9dee6; --card: #f6f8fa; --back: #fff;
  --a: #3568a8; --b: #d9661f; --good: #15703c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa4b2; --line: #343b46; --card: #1b2027;
  --back: #12161b; --a: #7fb0ee; --b: #f2965a; --good: #5cc98a; --bad: #f28b82; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .6rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.verdict { padding: .7rem 1rem; border-left: 5px solid; background: var(--card); font-weight: 600; }
.verdict.pass { border-color: var(--good); } .verdict.fail { border-color: var(--bad); }
.note { padding: .5rem 1rem; border-left: 5px solid var(--line); color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.tiles div { background: var(--card); padding: .8rem 1rem; border-radius: 6px; display: flex; flex-direction: column; }
.tiles b { font-size: 1.6rem; line-height: 1.2; }
.tiles span, .tiles i { color: var(--soft); font-style: normal; font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: 6px; padding: .7rem; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--line); } svg .a { stroke: var(--a); } svg .b { stroke: var(--b); }
svg rect.a, svg .key.a { fill: var(--a); } svg rect.b, svg .key.b, svg circle.b { fill: var(--b); }
svg path { fill: none; stroke-linecap: round; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; min-width: 60%; }
th, td { text-align: left; padding: .3rem 1.4rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: var(--card); padding: 1rem; overflow-x: auto; font-size: .85rem; }
</style></head><body>
BODY
</body></html>
"""


def _html(head: Sequence[str], rows: Rows) -> str:
    """A column is set to the right if its first cell that isn't empty begins like a number."""
    columns = [next((cell for cell in column if cell), "") for column in zip(*rows)]
    right = [cell[:1] in "+-0123456789" and cell[1:2] in ".,0123456789" and " x " not in cell for cell in columns]

    def line(tag: str, row: Sequence[str]) -> str:
        cells = (f"<{tag}{' class=n' if n else ''}>{escape(cell)}</{tag}>" for cell, n in zip(row, right))
        return f"<tr>{''.join(cells)}</tr>"

    lines = [line("th", head)] if any(head) else []
    return "\n".join(["<div class=scroll><table>", *lines, *(line("td", row) for row in rows), "</table></div>"])


def _md(head: Sequence[str], rows: Rows) -> list[str]:
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _yaml(report: Report) -> str:
    return yaml.safe_dump(plain(report["config"]), sort_keys=False).strip()


def _placement(arm: Report) -> str:
    return f"{arm['sharding']} on {ranges(arm['ranks'])}" if arm["ranks"] else str(arm["sharding"])


def _difference(difference: Report | None) -> str:
    if difference is None:
        return "-"
    return f"{difference['absolute']:.1e} ({difference['share']:.1e})" if difference["absolute"] else "0"


def _spread(arm: Report, phase: str) -> str:
    low, high = arm["phase_spread_ms"][phase]
    return f"{arm['phase_ms'][phase]:.3f} ({low:.3f} to {high:.3f})"


def _quotient(which: str, over: float, under: float) -> str:
    return f"{which} {over / under:.3f}" if under else ""


def _check(check: Report) -> str:
    return f"{check['name']} ({check['of']})" if check["of"] else str(check["name"])


def _signed(value: float) -> str:
    return f"A - B {value:+.1e}" if value else "A - B 0"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def plain(value: Any) -> Any:
    """What JSON and YAML can hold: tuples as lists, numbers that are infinite or none as text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
