"""Charts as SVG text, without any package: points or lines of a few series over a logarithmic axis with a rule at 1."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

Series = dict[str, list[tuple[float, float]]]
_COLOURS = ("#1f77b4", "#d62728", "#333333")
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 700, 40, 340


def chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Series,
    *,
    log_x: bool = False,
    x_ticks: Iterable[float] = (),
    spread: float = 0.0,
    joined: bool = False,
) -> str:
    """series: name -> (x, y) points, all y above 0. x_ticks: the axis holds them and, unless it is logarithmic, begins
    and ends with them. spread: moves series apart, a share of x. joined: as lines."""
    points = [point for values in series.values() for point in values]
    ticks = sorted(x_ticks)
    low, high = _range([*(y for _, y in points), 1.0])
    left, right = _range([*(x for x, _ in points), *ticks]) if log_x else (ticks[0], ticks[-1])

    def across(x: float) -> float:
        share = math.log(x / left) / math.log(right / left) if log_x else (x - left) / (right - left)
        return _LEFT + share * (_RIGHT - _LEFT)

    def up(y: float) -> float:
        return _BOTTOM - math.log(y / low) / math.log(high / low) * (_BOTTOM - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(14 {(_TOP + _BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}'
        "</text>",
    ]
    for y in _ticks(low, high):
        bold = ' stroke="#000" stroke-width="1.5"' if y == 1 else ' stroke="#ddd"'
        parts.append(f'<path d="M{_LEFT} {up(y):.1f}H{_RIGHT}"{bold}/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in ticks or _ticks(left, right):
        parts.append(f'<path d="M{across(x):.1f} {_BOTTOM}v5" stroke="#000"/>')
        parts.append(f'<text x="{across(x):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{_number(x)}</text>')
    for i, ((name, values), colour) in enumerate(zip(series.items(), _COLOURS)):
        moved = [(across(x * (1 + spread) ** (i - 1)), up(y)) for x, y in values]
        if joined:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in moved)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        else:
            dots = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in moved)
            parts.append(f'<g fill="{colour}" fill-opacity="0.55">{"".join(dots)}</g>')
        at = _RIGHT - 90 * (len(series) - i)
        parts.append(f'<rect x="{at}" y="12" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{at + 14}" y="22">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _range(values: list[float]) -> tuple[float, float]:
    """A little more than the range of the values, on a logarithmic axis."""
    low, high = min(values), max(values)
    room = (high / low) ** 0.05 * 1.05
    return low / room, high * room


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between the ends, more of them a decade where there are few decades."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 1.5, 2, 3, 5, 7) if high / low < 30 else (1, 2, 5) if high / low < 1000 else (1,)
    return [step * 10.0**k for k in decades for step in steps if low <= step * 10.0**k <= high]


def _number(x: float) -> str:
    return f"{x:g}" if x < 1000 else f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k"
