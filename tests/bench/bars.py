"""Bars in an SVG, in groups, without a plotting library."""

from collections.abc import Mapping

from aerie.deploy.bench.figures import COLOURS, line_element, text_element, ticks

_COLOURS = (*COLOURS, "#0f766e", "#a16207")
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
        text_element(_LEFT, 22, title, 'font-size="15"'),
        text_element((_LEFT + x(scale[-1])) / 2, bottom + 36, x_label, 'text-anchor="middle"'),
    ]
    for tick in scale:
        out.append(line_element(x(tick), _TOP, x(tick), bottom))
        out.append(text_element(x(tick), bottom + 16, f"{tick:g}", 'text-anchor="middle"'))
    y = _TOP
    for group, bars in groups.items():
        out.append(text_element(_LEFT - 6, y + _BAR * len(bars) / 2 + 4, group, 'text-anchor="end"'))
        for name, value in bars.items():
            fill = f'fill="{colours[name]}"'
            out.append(f'<rect x="{_LEFT}" y="{y}" width="{x(value) - _LEFT:g}" height="{_BAR - 2}" {fill}/>')
            out.append(text_element(x(value) + 4, y + _BAR - 3, f"{value:g}", fill))
            y += _BAR
        y += _GAP
    for i, name in enumerate(names):
        out.append(text_element(_WIDTH - _RIGHT + 24, _TOP + 16 * i + 10, name, f'fill="{colours[name]}"'))
    return "\n".join([*out, "</svg>", ""])
