"""Latencies of an open loop by percentile, as a table and as a plot. Used by `aerie bench` and the benchmarks.

ttft  from a request's due time to its first event with a choice
itl   between two such events of one answer, over all answers; an event may hold several tokens
tpot  (last event - first event) / (tokens - 1) of each answer; tokens as counted by the server
e2e   from a request's due time to the end of its answer
cached  share of prompt tokens found in the prefix cache, as counted by the server
possible  share that an unlimited prefix cache would have found, in blocks of 16 tokens
seconds  from the first due time to the end of the last answer
late  delay of the client itself; above about 10 ms the figures measure the client
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aerie.deploy.bench.arrivals import Arrival, repeated_tokens
from aerie.deploy.bench.plot import Point, line_plot
from aerie.deploy.bench.stream_client import Answered
from aerie.deploy.bench.table import table

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
            f"{_of_prompts(rate, 'cached_tokens')} / {_of_prompts(rate, 'repeated_tokens')}",
            rate["late_ms"]["p99"] or 0.0,
        )
        for name, rates in results.items()
        for rate in rates
    ]
    return table(head, rows)


def _of_prompts(rate: Rate, name: str) -> str:
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
