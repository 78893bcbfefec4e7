"""The report of a run: a timeline by seconds, a plot, a row of the table."""

import dataclasses
import html
import math
from collections.abc import Iterator, Sequence
from typing import Any

from aerie.deploy.bench.figures import ticks
from tests.load.client import GOOD
from tests.load.scenario import Scenario
from tests.load.verdict import Figures, Observed, growth

_WIDTH, _LEFT, _RIGHT, _PANEL, _GAP = 860, 70, 30, 110, 34


def timeline(observed: Observed) -> str:
    """A line for each second, or some of a long run: requests sent, done, failed; tokens; /health; what was done."""
    step = max(1, round(observed.until_s / 120))
    lines = [f"{'s':>4} {'sent':>5} {'done':>5} {'errors':>6} {'tokens':>6} {'health':>10}"]
    for second in range(0, math.ceil(observed.until_s) + 1, step):
        sent = sum(_within(each.sent_s, second, step) for each in observed.sent)
        ends = [each for each in observed.sent if each.end_s is not None and _within(each.end_s, second, step)]
        errors = [each.kind for each in ends if each.kind not in GOOD]
        tokens = sum(_within(at_s, second, step) for each in observed.sent for at_s in each.token_s)
        statuses = sorted({each.status for each in observed.health if _within(each.at_s, second, step)})
        done = [text for at_s, text in observed.faults if _within(at_s, second, step)]
        notes = "; ".join([*done, *sorted(set(errors))])
        health = "/".join("none" if status == 0 else str(status) for status in statuses)
        lines.append(
            f"{second:>4} {sent:>5} {len(ends) - len(errors):>5} {len(errors):>6} {tokens:>6} {health:>10}  {notes}"
        )
    return "\n".join([*lines, *_usage_lines(observed)])


def _within(at_s: float, second: int, step: int) -> bool:
    return second <= at_s < second + step


def _usage_lines(observed: Observed) -> Iterator[str]:
    if observed.usage:
        yield f"{'part':20} {'MB then':>8} {'MB now':>8} {'files then':>10} {'files now':>10}"
    for part, (settled, last) in (growth(observed) if observed.usage else {}).items():
        yield f"{part:20} {settled.memory_mb:8.0f} {last.memory_mb:8.0f} {settled.num_fds:10} {last.num_fds:10}"


def as_json(scenario: Scenario, observed: Observed, found: Figures, machine: str) -> dict[str, Any]:
    """Everything about a run as plain values."""
    return {
        "scenario": dataclasses.asdict(scenario) | {"expect": _plain(scenario.expect)},
        "machine": machine,
        "figures": dataclasses.asdict(found),
        "faults": list(observed.faults),
        "ended": dataclasses.asdict(observed.ended) if observed.ended else None,
        "requests": [{k: v for k, v in dataclasses.asdict(s).items() if k != "tokens"} for s in observed.sent],
        "health": [dataclasses.astuple(sample) for sample in observed.health],
        "usage": [(at_s, {part: dataclasses.asdict(one) for part, one in by.items()}) for at_s, by in observed.usage],
    }


def _plain(value: Any) -> dict[str, Any]:
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in dataclasses.asdict(value).items()}


HEAD = (
    "| scenario | nodes | done / errors | tokens/s | TTFT p50 / p99, s | longest stall, s | /health untrue, s "
    "| /health slowest, s | verdict |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def row(scenario: Scenario, found: Figures, observed: Observed) -> str:
    """Return a row of the table under `HEAD`."""
    errors = {kind: count for kind, count in found.kinds.items() if kind != "done"}
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(errors.items())) or "0"
    verdict = "; ".join(found.missed) or "as expected"
    if observed.ended is not None:
        verdict += f" (`aerie serve` ended with {observed.ended.code} after {observed.ended.after_s:.1f} s)"
    return (
        f"| {scenario.name} | {len(scenario.hosts.cpus or (1,))} | {found.kinds.get('done', 0)} / {said} "
        f"| {found.tokens_per_s:.0f} | {found.ttft_s[0]:.2f} / {found.ttft_s[1]:.2f} | {found.stall_s:.1f} "
        f"| {found.untrue_s:.1f} | {found.health_max_s:.2f} | {verdict} |"
    )


def plot(scenario: Scenario, observed: Observed) -> str:
    """An SVG: tokens per second, TTFT, errors and /health over time, faults as red lines."""
    seconds = range(math.ceil(observed.until_s) + 1)
    tokens = [at_s for each in observed.sent for at_s in each.token_s]
    errors = [each.end_s or each.sent_s for each in observed.sent if each.kind not in GOOD]
    firsts = [(each.sent_s, each.first_s - each.sent_s) for each in observed.sent if each.first_s is not None]
    panels: Sequence[tuple[str, list[tuple[float, float]], str]] = (
        ("tokens/s", [(s + 0.5, sum(int(t) == s for t in tokens)) for s in seconds], "line"),
        ("TTFT, s, by time sent", firsts, "dots"),
        ("errors/s", [(s + 0.5, sum(int(t) == s for t in errors)) for s in seconds], "bars"),
        ("/health: 200 is 1", [(each.at_s, float(each.status == 200)) for each in observed.health], "dots"),
    )
    height = 40 + len(panels) * (_PANEL + _GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{html.escape(scenario.name)}: {html.escape(scenario.says)}</text>',
    ]
    for number, (title, points, form) in enumerate(panels):
        out += _panel(title, points, form, 40 + number * (_PANEL + _GAP), observed)
    return "\n".join([*out, "</svg>", ""])


def _panel(title: str, points: Sequence[tuple[float, float]], form: str, top: int, observed: Observed) -> list[str]:
    marks = ticks(max((y for _, y in points), default=1.0))
    bottom = top + _PANEL

    def x(at_s: float) -> float:
        return round(_LEFT + at_s / max(1.0, observed.until_s) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(bottom - value / marks[-1] * (_PANEL - 16), 1)

    out = [f'<text x="{_LEFT}" y="{top + 8}" fill="#57534e">{title}</text>']
    for mark in (marks[0], marks[-1]):
        out.append(f'<line x1="{_LEFT}" y1="{y(mark)}" x2="{_WIDTH - _RIGHT}" y2="{y(mark)}" stroke="#d6d3d1"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{y(mark) + 4}" text-anchor="end">{mark:g}</text>')
    for second in ticks(observed.until_s)[:-1]:
        out.append(f'<text x="{x(second)}" y="{bottom + 14}" text-anchor="middle" fill="#57534e">{second:g}</text>')
    for at_s, text in observed.faults:
        out.append(f'<line x1="{x(at_s)}" y1="{top}" x2="{x(at_s)}" y2="{bottom}" stroke="#dc2626"/>')
        out.append(f'<text x="{x(at_s) + 4}" y="{top + 8}" fill="#dc2626">{html.escape(text[:60])}</text>')
    if form == "line":
        path = " ".join(f"{x(a)},{y(b)}" for a, b in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="#0b6e99" stroke-width="1.5"/>')
    elif form == "bars":
        out += [
            f'<rect x="{x(a) - 3}" y="{y(b)}" width="6" height="{bottom - y(b)}" fill="#c2410c"/>'
            for a, b in points
            if b
        ]
    else:
        out += [f'<circle cx="{x(a)}" cy="{y(b)}" r="2" fill="#0b6e99"/>' for a, b in points]
    return out
