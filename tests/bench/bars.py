"""Bars in an SVG, in groups, without a plotting library."""

import html
from collections.abc import Mapping

from deploy.bench.plot import ticks

_COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7c3aed", "#be185d", "#57534e", "#0f766e", "#a16207")
_WIDTH, _LEFT, _RIGHT, _TOP = 720, 90, 170, 40
_BAR, _GAP = 12, 10  # pixels of a bar, and between groups


def bar_plot(title: str, x_label: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """Return the text of an SVG file: horizontal bars with their values, a group for each key of `groups`. A name has
    one colour in all groups."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    scale = ticks(max(value for bars in groups.values() for value in bars.values()))
    bottom = _TOP + sum(_BAR * len(bars) + _GAP for bars in groups.values())
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}

    def x(value: float) -> float:
        return round(_LEFT + value / scale[-1] * (_WIDTH - _LEFT - _RIGHT), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 46}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{_WIDTH}" height="{bottom + 46}" fill="white"/>',
        _text(_LEFT, 22, title, 'font-size="15"'),
        _text((_LEFT + x(scale[-1])) / 2, bottom + 36, x_label, 'text-anchor="middle"'),
    ]
    for tick in scale:
        out.append(f'<line x1="{x(tick)}" y1="{_TOP}" x2="{x(tick)}" y2="{bottom}" stroke="#d6d3d1"/>')
        out.append(_text(x(tick), bottom + 16, f"{tick:g}", 'text-anchor="middle"'))
    y = _TOP
    for group, bars in groups.items():
        out.append(_text(_LEFT - 6, y + _BAR * len(bars) / 2 + 4, group, 'text-anchor="end"'))
        for name, value in bars.items():
            fill = f'fill="{colours[name]}"'
            out.append(f'<rect x="{_LEFT}" y="{y}" width="{x(value) - _LEFT:g}" height="{_BAR - 2}" {fill}/>')
            out.append(_text(x(value) + 4, y + _BAR - 3, f"{value:g}", fill))
            y += _BAR
        y += _GAP
    for i, name in enumerate(names):
        out.append(_text(_WIDTH - _RIGHT + 24, _TOP + 16 * i + 10, name, f'fill="{colours[name]}"'))
    return "\n".join([*out, "</svg>", ""])


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(text)}</text>'
