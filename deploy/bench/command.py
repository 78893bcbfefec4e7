"""`aerie bench`: measures a running server at each of several rates."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aerie.cluster.config import ConfigError
from aerie.deploy.arguments import DEFAULT_VOCAB
from aerie.deploy.bench.arrivals import (
    MIXES,
    OWN_TOKENS,
    SIGMA,
    AnyLengths,
    Lengths,
    Mix,
    Prefixes,
    Traffic,
    UniformLengths,
)
from aerie.deploy.bench.figures import Rate, latency_plot, markdown
from aerie.deploy.bench.load import Target, measure_rate, warm_up
from aerie.deploy.client import AnswerError, Server, parse_server

LOWEST_ID = 300  # lower ids are special tokens and bytes in most tokenizers


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if a request failed, else 0. Raises ConfigError."""
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        raise ConfigError(f"--plot {arguments.plot}: must end in .svg")
    rates = _rates(arguments.rates)
    extra = _extra(arguments.extra)
    server = parse_server(arguments)
    card = server.model(arguments.model)
    traffic = traffic_for(arguments, card.get("max_model_len"), server)
    target = Target(server.url, card["id"], extra, server.key)
    name = arguments.name or server.url
    try:
        results = asyncio.run(measure(target, traffic, rates, arguments.drain_s, arguments.warm))
    except RuntimeError as error:  # the warm-up failed
        raise ConfigError(str(error)) from None
    print(*markdown({name: results}), sep="\n")
    for rate in results:
        if rate["errors"]:
            print(f"{rate['rate']}/s: {rate['errors']} failed: {'; '.join(rate['first_errors'])}", file=sys.stderr)
    if arguments.json is not None:
        lines = "".join(json.dumps({"name": name, "seed": arguments.seed, **rate}) + "\n" for rate in results)
        if str(arguments.json) == "-":
            print(lines, end="")
        else:
            arguments.json.write_text(lines)
    if arguments.plot is not None:
        arguments.plot.write_text(latency_plot(name, results))
    return 1 if any(rate["errors"] for rate in results) else 0


async def measure(
    target: Target, traffic: Traffic, rates: Sequence[float], drain_s: float, num_warm: int
) -> list[Rate]:
    """Measure all rates in order, after a warm-up. Shows a progress bar for each if standard error is a terminal.
    Raises RuntimeError if the warm-up fails."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    results = []
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        if num_warm > 0:
            bar = bars.add_task("warm-up", total=None, note="")
            await warm_up(target, traffic, drain_s, num_warm)
            bars.update(bar, total=1, completed=1)
        for rate in rates:
            bar = bars.add_task(f"{rate:g}/s", total=len(traffic.arrivals(rate)), note="")
            started_s = time.monotonic()

            def show(num_ended: int, num_failed: int, bar: Any = bar) -> None:
                note = f"[red]{num_failed} failed[/red]" if num_failed else ""
                bars.update(bar, completed=num_ended, note=note)

            results.append(await measure_rate(target, traffic, rate, drain_s, show))
            note = f"TTFT p50 {results[-1]['ttft_ms']['p50']} ms, {results[-1]['tokens_per_s']} tokens/s"
            bars.update(bar, note=f"{note}, {time.monotonic() - started_s:.0f} s")
    return results


def traffic_for(arguments: argparse.Namespace, max_model_len: int | None, server: Server) -> Traffic:
    """Return the traffic of the options; default lengths fit the model. Raises ConfigError."""
    mix = _mix(arguments, max_model_len)
    vocab = arguments.vocab or min(DEFAULT_VOCAB, _vocab_size(server))
    first = min(LOWEST_ID, vocab // 4)
    if arguments.secs <= 0 or arguments.max_requests < 1 or vocab < 2:
        raise ConfigError("--secs, --max-requests, --vocab: must be above 0, at least 1, at least 2")
    return Traffic(mix, arguments.secs, arguments.max_requests, first, vocab, arguments.seed)


def _mix(arguments: argparse.Namespace, max_model_len: int | None) -> Mix:
    """Return `--mix`, scaled to the model's length, with the values of other options. Raises ConfigError."""
    mix = MIXES[arguments.mix]
    whole = max_model_len or mix.prompts.cap + mix.answers.cap
    if mix.prompts.cap + mix.answers.cap > whole:
        mix = mix.scaled(whole * 3 // 4, whole // 4)
    mix = mix.scaled(arguments.in_cap or mix.prompts.cap, arguments.out_cap or mix.answers.cap)
    prompts, answers = _lengths("in", arguments, mix.prompts), _lengths("out", arguments, mix.answers)
    if prompts.cap + answers.cap > whole:
        raise ConfigError(
            f"--in-cap {prompts.cap} and --out-cap {answers.cap}: together at most {whole}, the model's length"
        )
    prefixes = _prefixes(arguments, mix)
    if prefixes is not None and prefixes.tokens + OWN_TOKENS > prompts.cap:
        raise ConfigError(
            f"--prefix-tokens {prefixes.tokens}: with {OWN_TOKENS} tokens of its own a prompt must be within --in-cap "
            f"{prompts.cap}"
        )
    return Mix(prompts, answers, prefixes)


def _lengths(side: str, arguments: argparse.Namespace, default: AnyLengths) -> AnyLengths:
    """Return the lengths that the options --in-* or --out-* (`side`) ask for."""
    mean, sigma = (getattr(arguments, f"{side}_{name}") for name in ("mean", "sigma"))
    if isinstance(default, UniformLengths):
        if mean is None and sigma is None and default.cap >= 1:
            return default
        default = Lengths(default.mean, SIGMA, default.cap)
    mean, sigma = default.mean if mean is None else mean, default.sigma if sigma is None else sigma
    if default.cap < 1 or mean <= 0 or sigma < 0:
        raise ConfigError(f"--{side}-cap, --{side}-mean, --{side}-sigma: must be at least 1, above 0, at least 0")
    return Lengths(max(1.0, mean), sigma, default.cap)


def _prefixes(arguments: argparse.Namespace, mix: Mix) -> Prefixes | None:
    """Return the shared prefixes; None without any."""
    default = mix.prefixes or MIXES["prompt-heavy"].scaled(mix.prompts.cap, mix.answers.cap).prefixes
    assert default is not None
    share = arguments.share if arguments.share is not None else default.share if mix.prefixes else 0.0
    count = default.count if arguments.prefixes is None else arguments.prefixes
    tokens = default.tokens if arguments.prefix_tokens is None else arguments.prefix_tokens
    if not 0 <= share <= 1 or count < 1 or tokens < 1:
        raise ConfigError("--share: must be from 0 to 1; --prefixes, --prefix-tokens: at least 1")
    return Prefixes(count, tokens, share) if share else None


def _vocab_size(server: Server) -> int:
    """Return the model's vocabulary size, if the server reports it."""
    try:
        return int(server.get("/tokenizer_info")["vocab_size"])
    except (AnswerError, KeyError, TypeError, ValueError):
        return DEFAULT_VOCAB


def _rates(text: str) -> list[float]:
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1e5 or math.isinf(rate) for rate in rates) or -math.inf in rates:
        raise ConfigError(f"--rates {text}: must be numbers above 0, such as 1,2.5,4, or inf")
    return rates


def _extra(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra {text}: must be a JSON object")
    return extra
