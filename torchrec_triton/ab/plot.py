"""Plots as inline SVG, coloured by the page's style sheet (classes a and b, for the two arms)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 28, 44


def curves(
    names: Sequence[str],
    series: Sequence[Sequence[float]],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    smooth: bool = False,
    first: int = 0,
) -> str:
    """Values by number, from `first`. smooth: also a moving mean, the values themselves faint."""
    xs = np.arange(first, first + len(series[0]))
    lines = []
    for at, values in enumerate(series):
        y = np.asarray(values, dtype=float)
        window = max(1, len(y) // 40) if smooth else 1
        if window > 1:
            lines.append((at, xs, y, 1.0, 0.25))
            y = np.convolve(np.pad(y, (window // 2, (window - 1) // 2), mode="edge"), np.ones(window) / window, "valid")
        lines.append((at, xs, y, 4.0 if at == 0 and len(series) > 1 else 1.6, 0.9 if len(series) == 1 or at else 0.45))
    return _axes(names, lines, x_label, y_label, log)


def distribution(names: Sequence[str], series: Sequence[Sequence[float]], x_label: str, y_label: str) -> str:
    """Share of the values that are no larger; the slowest hundredth is left out: a hiccup would squeeze the rest."""
    lines = []
    for at, values in enumerate(series):
        ordered = np.sort(np.asarray(values, dtype=float))
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        keep = share <= max(0.99, share[0])
        lines.append((at, ordered[keep], share[keep], 2.0, 1.0))
    return _axes(names, lines, x_label, y_label, False)


def bars(names: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str) -> str:
    """One bar an arm for each part."""
    largest = max(max(values) for values in parts.values()) or 1.0
    height = HEIGHT / (len(parts) + 0.5)
    shapes = []
    for row, (part, values) in enumerate(parts.items()):
        top = row * height + 24
        shapes.append(f'<text x="{_LEFT + 6}" y="{top + height * 0.42:.1f}" text-anchor="end">{escape(part)}</text>')
        for at, value in enumerate(values):
            y, wide = top + at * height * 0.36, (WIDTH - 220) * value / largest
            said = f"{value:,.{1 if value >= 100 else 3}f} {escape(unit)}"
            shapes.append(
                f'<rect class="{"ab"[at]}" x="{_LEFT + 12}" y="{y:.1f}" width="{wide:.1f}" height="{height / 3:.1f}"/>'
                f'<text x="{_LEFT + 18 + wide:.1f}" y="{y + height * 0.26:.1f}">{said}</text>'
            )
    return _svg(names, shapes)


def intervals(ratios: dict[str, dict[str, Any]]) -> str:
    """Each ratio as a point in its interval, beside the line at 1 where both arms are equal."""
    ends = [1.0, *(end for ratio in ratios.values() for end in (*ratio["interval"], ratio["value"]))]
    low, high = min(ends), max(ends)
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)

    def px(x: float) -> float:
        return _LEFT + (x - low) / (high - low) * (WIDTH - _LEFT - 2 * _RIGHT)

    shapes = []
    ticks = _ticks(low, high)
    for tick in ticks:
        shapes.append(
            f'<path class="grid" d="M{px(tick):.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>'
            f'<text x="{px(tick):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_say(tick, ticks)}</text>'
        )
    shapes.append(f'<path class="a" stroke-dasharray="4 3" d="M{px(1):.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
    for row, (name, ratio) in enumerate(ratios.items()):
        y = _TOP + (row + 0.5) * (HEIGHT - _TOP - _BOTTOM) / len(ratios)
        one, two = (px(end) for end in ratio["interval"])
        shapes.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<path class="b" stroke-width="3" d="M{one:.1f} {y - 6:.1f}v12v-6H{two:.1f}v-6v12"/>'
            f'<circle class="b" cx="{px(ratio["value"]):.1f}" cy="{y:.1f}" r="5"/>'
        )
    shapes.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 8}" text-anchor="end">right of 1: B is faster</text>')
    return _svg([], shapes)


def _axes(
    names: Sequence[str],
    lines: list[tuple[int, np.ndarray, np.ndarray, float, float]],
    x_label: str,
    y_label: str,
    log: bool,
) -> str:
    if log:
        lines = [(at, x[y > 0], np.log10(y[y > 0]), wide, alpha) for at, x, y, wide, alpha in lines]
    lines = [(at, x[np.isfinite(y)], y[np.isfinite(y)], wide, alpha) for at, x, y, wide, alpha in lines]
    if not any(len(y) for _, _, y, _, _ in lines):
        message = "no difference at any step" if log else "no finite value"
        return _svg(names, [f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">{message}</text>'])
    x_low, x_high = (f(f(x) for _, x, _, _, _ in lines if len(x)) for f in (min, max))
    y_low, y_high = (f(f(y) for _, _, y, _, _ in lines if len(y)) for f in (min, max))
    x_high, y_high = (high if high > low else low + 1 for low, high in ((x_low, x_high), (y_low, y_high)))
    pad = 0.04 * (y_high - y_low)
    y_low, y_high = y_low - pad, y_high + pad

    def px(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)

    shapes = []
    y_ticks = [tick for tick in _ticks(y_low, y_high) if not log or tick == int(tick)]
    y_ticks = y_ticks if len(y_ticks) > 1 else [y_low + pad, y_high - pad]
    for tick in y_ticks:
        said = f"{10**tick:.0e}" if log else _say(tick, y_ticks)
        shapes.append(
            f'<path class="grid" d="M{_LEFT} {py(tick):.1f}H{WIDTH - _RIGHT}"/>'
            f'<text x="{_LEFT - 6}" y="{py(tick) + 4:.1f}" text-anchor="end">{said}</text>'
        )
    x_ticks = _ticks(x_low, x_high)
    for tick in x_ticks:
        shapes.append(
            f'<text x="{px(tick):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_say(tick, x_ticks)}</text>'
        )
    shapes.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(x_label)}</text>')
    shapes.append(f'<text x="8" y="14">{escape(y_label)}</text>')
    for at, x, y, wide, alpha in lines:
        # A difference of 0 has no logarithm: points, which do not pretend to know what is between them.
        points = [f"{px(a):.1f} {py(b):.1f}" for a, b in zip(x, y)]
        path = "".join(f"M{point}h0" for point in points) if log else "M" + "L".join(points)
        shapes.append(f'<path class="{"ab"[at]}" stroke-width="{wide + 3 * log}" stroke-opacity="{alpha}" d="{path}"/>')
    return _svg(names, shapes)


def _svg(names: Sequence[str], shapes: list[str]) -> str:
    key, x = [], WIDTH - _RIGHT
    for at in reversed(range(len(names))):
        x -= 7 * len(names[at]) + 22
        key.append(
            f'<rect class="key {"ab"[at]}" x="{x}" y="5" width="10" height="10"/>'
            f'<text x="{x + 14}" y="14">{escape(names[at])}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join([*shapes, *key])}</svg>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between, four to eight of them."""
    unit = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(unit * m for m in (1, 2, 5, 10) if (high - low) / (unit * m) <= 7)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _say(value: float, ticks: Sequence[float]) -> str:
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
