"""`aerie exact` and `aerie check-server`. Exit status: 1 if anything is wrong, 2 without a server."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress

from aerie.cluster.config import ConfigError
from aerie.deploy import check_cache
from aerie.deploy.arguments import parser as command_parser
from aerie.deploy.bench.figures import table
from aerie.deploy.check_server import contract
from aerie.deploy.check_server.ask import Asker
from aerie.deploy.check_server.exact import Comparison, Question, circumstances, questions, run
from aerie.deploy.client import CONNECT_TIMEOUT_S, AnswerError, Server, parse_server

LONGEST_WORDS, TOKENS_A_WORD = 4000, 2  # words of the longest prompt; maximum tokens per word in any tokenizer


@dataclass(frozen=True)
class Report:
    """The lines of a page, in Markdown, and whether anything was found."""

    lines: list[str]
    failed: bool


def exact(arguments: argparse.Namespace) -> int:
    """Run `aerie exact`. Raises ConfigError."""
    return asyncio.run(_checked(arguments, with_contract=False))


def check_server(arguments: argparse.Namespace) -> int:
    """Run `aerie check-server`. Raises ConfigError."""
    status = asyncio.run(_checked(arguments, with_contract=True))
    if arguments.cache:
        options = ["check-cache", arguments.url, "--key", arguments.key, "--model", arguments.model]
        return max(status, check_cache.run(command_parser().parse_args(options)))
    return status


async def _checked(arguments: argparse.Namespace, with_contract: bool) -> int:
    """Run the checks, print and save their report, and return the exit status."""
    server, console = parse_server(arguments), Console()
    card = server.model(arguments.model)
    longest = _longest(arguments, card.get("max_model_len") or 2**31)
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    started_s = time.monotonic()
    async with httpx.AsyncClient(timeout=timeout, limits=limits) as client:
        ask = Asker(server, card["id"], client)
        try:
            await ask.learn(str(card.get("owned_by", "")))
            reports = [await _contract(ask, arguments, console)] if with_contract else []
            reports.append(await _exact(ask, arguments, longest, console))
        except AnswerError as error:
            raise ConfigError(f"{server.url}: {error}") from None
    page = [*_head(server, card["id"], ask), *(line for report in reports for line in report.lines)]
    page += ["", f"{time.monotonic() - started_s:.0f} s."]
    console.print("\n".join(page), markup=False, highlight=False, soft_wrap=True)
    if arguments.report:
        Path(arguments.report).write_text("\n".join(page) + "\n")
    return int(any(report.failed for report in reports))


def _longest(arguments: argparse.Namespace, context: int) -> int:
    """Return the words of the longest prompt. Raises ConfigError if none fit."""
    room: int = (context - max(arguments.max_tokens, 1)) // TOKENS_A_WORD
    if room < 1:
        raise ConfigError(f"--max-tokens {arguments.max_tokens}: the model's context is {context} tokens; use fewer")
    wanted: int = arguments.words or LONGEST_WORDS
    return min(wanted, room)


def _head(server: Server, model: str, ask: Asker) -> list[str]:
    can = ask.abilities
    return [
        f"# {model} at {server.url}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Compared by {'token ids' if can.ids else 'texts of tokens'} and "
        "log-probabilities as printed. "
        + ("Each prompt has a `cache_salt` of its own. " if can.salt else "All prompts share the server's cache. ")
        + ("" if can.switch else "The server has no switch for speculation that a request can set."),
    ]


async def _exact(ask: Asker, arguments: argparse.Namespace, longest: int, console: Console) -> Report:
    listed = circumstances(arguments.loads, ask.abilities.switch)
    asked: list[Question] = questions(arguments.prompts, longest, arguments.max_tokens, arguments.seed)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        names = ("alone", *(comparison.name for comparison in listed))
        tasks = {name: bars.add_task(name, total=len(asked)) for name in names}
        comparisons = await run(ask, asked, listed, longest, lambda name: bars.advance(tasks[name]))
    failed = any(
        comparison.texts > 0 or (comparison.logprobs > 0 and not arguments.texts_only) for comparison in comparisons
    )
    return Report(["", "## The same answer under other circumstances", "", *_comparisons(comparisons)], failed)


def _comparisons(comparisons: Sequence[Comparison]) -> list[str]:
    rows = [
        (
            comparison.circumstance,
            comparison.answers,
            comparison.texts,
            str(min(comparison.first, default="")),
            comparison.logprobs,
            f"{comparison.nats:.2g}",
        )
        for comparison in comparisons
    ]
    head = ["circumstance", "answers", "other tokens", "first at", "other log-probabilities only", "nats at most"]
    return table(head, rows)


async def _contract(ask: Asker, arguments: argparse.Namespace, console: Console) -> Report:
    """Run the checks of `aerie.deploy.check_server.contract` one after another, and return their report."""
    setting = contract.Setting(
        max(2, arguments.prompts // 10), arguments.max_tokens, max(arguments.loads, default=8) - 1, arguments.seed
    )
    results = []
    for check in contract.CHECKS:
        with console.status(check.__name__.replace("_", " ")):
            results.append(await check(ask, setting))
    rows = [(result.name, result.checked or f"none: {result.skipped}", len(result.problems)) for result in results]
    lines = ["", "## What clients rely on", "", *table(["check", "answers", "problems"], rows)]
    for result in results:
        shown = list(dict.fromkeys(result.problems))
        lines += [f"- {result.name}: {problem}" for problem in shown[: arguments.show]]
        if len(shown) > arguments.show:
            lines.append(f"- {result.name}: {len(shown) - arguments.show} more (--show)")
    return Report(lines, any(result.problems for result in results))
