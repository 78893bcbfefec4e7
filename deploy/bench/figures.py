"""Latencies of an open loop by percentile, as Markdown tables and as SVG plots without a plotting library. Used by
`aerie bench` and the benchmarks.

ttft  from a request's due time to its first event with a choice
itl   between two such events of one answer, over all answers; an event may hold several tokens
tpot  (last event - first event) / (tokens - 1) of each answer; tokens as counted by the server
e2e   from a request's due time to the end of its answer
cached  share of prompt tokens found in the prefix cache, as counted by the server
possible  share that an unlimited prefix cache would have found, in blocks of 16 tokens
seconds  from the first due time to the end of the last answer
late  delay of the client itself; above about 10 ms the figures measure the client
"""

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aerie.deploy.bench.arrivals import Arrival, repeated_tokens
from aerie.deploy.bench.stream_client import Answered


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table. Floats have three significant digits, or none after the point from 100 on."""
    texts = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (list(head), *texts)) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in (head, *texts)]
    return [lines[0], "| " + " | ".join("-" * w for w in widths) + " |", *lines[1:]]


def _cell(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"


WIDTH, HEIGHT = 720, 420  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 40, 50  # margins around the axes, pixels
COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7c3aed", "#be185d", "#57534e")


@dataclass(frozen=True)
class Point:
    """A point of a plot.

    label: text beside the point, "" for none.
    """

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


Rate = dict[str, Any]  # the figures of one rate


def rate_figures(rate: float, arrivals: Sequence[Arrival], answers: Sequence[Answered], begin_s: float) -> Rate:
    """Return the figures of the answers to `arrivals`, due after begin_s. Failed requests are only counted."""
    pairs = [(begin_s + arrival.due_s, arrival, answer) for arrival, answer in zip(arrivals, answers, strict=True)]
    whole = [pair for pair in pairs if not pair[2].fault and pair[2].event_s]
    tokens = [answer.num_tokens or arrival.num_tokens for _, arrival, answer in whole]
    spans = [answer.event_s[-1] - answer.event_s[0] for _, _, answer in whole]
    elapsed_s = max((answer.end_s for _, _, answer in whole), default=begin_s) - begin_s
    return {
        "rate": rate if math.isfinite(rate) else "inf",
        "sent": len(arrivals),
        "completed": len(whole),
        "errors": len(arrivals) - len(whole),
        "first_errors": sorted({answer.fault for answer in answers if answer.fault})[:3],
        "ttft_ms": _ms([answer.event_s[0] - due_s for due_s, _, answer in whole]),
        "itl_ms": _ms([b - a for _, _, answer in whole for a, b in itertools.pairwise(answer.event_s)]),
        "tpot_ms": _ms([span / (count - 1) for span, count in zip(spans, tokens, strict=True) if count > 1]),
        "e2e_ms": _ms([answer.end_s - due_s for due_s, _, answer in whole]),
        "late_ms": _ms([answer.sent_s - due_s for due_s, _, answer in pairs if answer.sent_s]),
        "prompt_tokens": sum(answer.num_prompt for _, _, answer in whole),
        "cached_tokens": sum(answer.num_cached for _, _, answer in whole),
        "repeated_tokens": repeated_tokens([arrival.prompt for _, arrival, _ in whole]),
        "output_tokens": sum(tokens),
        "seconds": round(elapsed_s, 3),
        "requests_per_s": round(len(whole) / elapsed_s, 3) if whole else 0.0,
        "tokens_per_s": round(sum(tokens) / elapsed_s, 1) if whole else 0.0,
        "wrong_length": sum(count != arrival.num_tokens for (_, arrival, _), count in zip(whole, tokens, strict=True)),
    }


def _ms(seconds: Sequence[float]) -> dict[str, float | None]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(percentile(seconds, q) * 1e3, 3) if seconds else None for name, q in shares.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, interpolated linearly. share: 0 to 1."""
    return float(np.quantile(values, share))


def markdown(results: Mapping[str, Sequence[Rate]]) -> list[str]:
    """Return a Markdown table with a row per server and rate."""
    kinds = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
    head = ["server", "req/s", "done", "failed"]
    head += [f"{kind.removesuffix('_ms').upper()} p50 / p90 / p99 ms" for kind in kinds]
    head += ["seconds", "tokens/s", "cached / possible", "late p99 ms"]
    rows = [
        (
            name,
            f"{float(rate['rate']):g}",
            rate["completed"],
            rate["errors"],
            *(_percentiles(rate[kind]) for kind in kinds),
            rate["seconds"],
            rate["tokens_per_s"],
            f"{_share_of_prompts(rate, 'cached_tokens')} / {_share_of_prompts(rate, 'repeated_tokens')}",
            rate["late_ms"]["p99"] or 0.0,
        )
        for name, rates in results.items()
        for rate in rates
    ]
    return table(head, rows)


def _share_of_prompts(rate: Rate, name: str) -> str:
    return f"{rate[name] / max(1, rate['prompt_tokens']):.0%}"


def _percentiles(figures: Mapping[str, float | None]) -> str:
    return " / ".join("-" if ms is None else f"{ms:.4g}" for ms in (figures[key] for key in ("p50", "p90", "p99")))


def latency_plot(name: str, rates: Sequence[Rate]) -> str:
    """Return an SVG of one server's latencies by rate."""
    rates = [rate for rate in rates if rate["rate"] != "inf"]
    kinds = (("TTFT p50", "ttft_ms", "p50"), ("TTFT p99", "ttft_ms", "p99"), ("ITL p99", "itl_ms", "p99"))
    lines = {
        title: [Point(rate["rate"], rate[kind][q]) for rate in rates if rate[kind][q] is not None]
        for title, kind, q in kinds
    }
    return line_plot(name, "requests per second", "ms", lines)
