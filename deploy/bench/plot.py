"""Lines in an SVG, without a plotting library."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 40, 50
COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7c3aed", "#be185d", "#57534e")


@dataclass(frozen=True)
class Point:
    """label: text beside the point, "" for none."""

    x: float
    y: float
    label: str = ""


def line_plot(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[Point]]) -> str:
    """Return an SVG with a line per series, through its points in order. Both axes start at 0."""
    points = [point for line in series.values() for point in line]
    x_ticks, y_ticks = ticks(max((p.x for p in points), default=1.0)), ticks(max((p.y for p in points), default=1.0))

    def x(value: float) -> float:
        return round(_LEFT + value / x_ticks[-1] * (WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - _BOTTOM - value / y_ticks[-1] * (HEIGHT - _TOP - _BOTTOM), 1)

    right, bottom = x(x_ticks[-1]), y(0)
    middle = (y(y_ticks[-1]) + bottom) / 2
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text_element(_LEFT, 22, title, 'font-size="15"'),
        text_element((_LEFT + right) / 2, HEIGHT - 12, x_label, 'text-anchor="middle"'),
        text_element(18, middle, y_label, f'text-anchor="middle" transform="rotate(-90 18 {middle:g})"'),
    ]
    for tick in x_ticks:
        out.append(line_element(x(tick), bottom, x(tick), y(y_ticks[-1])))
        out.append(text_element(x(tick), bottom + 16, f"{tick:g}", 'text-anchor="middle"'))
    for tick in y_ticks:
        out.append(line_element(_LEFT, y(tick), right, y(tick)))
        out.append(text_element(_LEFT - 6, y(tick) + 4, f"{tick:g}", 'text-anchor="end"'))
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(point.x)},{y(point.y)}" for point in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in line:
            out.append(f'<circle cx="{x(point.x)}" cy="{y(point.y)}" r="3.5" fill="{colour}"/>')
            if point.label:
                out.append(text_element(x(point.x) + 6, y(point.y) - 6, point.label, f'fill="{colour}"'))
        out.append(text_element(right + 14, _TOP + 18 * number + 10, name, f'fill="{colour}"'))
    return "\n".join([*out, "</svg>", ""])


def ticks(largest: float) -> list[float]:
    """Return about five round numbers from 0 to at least `largest`."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= rough * (1 - 1e-9))
    return [round(step * k, 12) for k in range(math.ceil(largest / step - 1e-9) + 1)]


def text_element(x: float, y: float, text: str, style: str = "") -> str:
    """Return an SVG text. style: more attributes."""
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(text)}</text>'


def line_element(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return an SVG line in grey, for a grid."""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#d6d3d1"/>'
