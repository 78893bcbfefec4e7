"""`aerie check-cache`: tests whether a server's prefix cache changes its answers. Works with any server with OpenAI's
completions.

Each conversation sends prompts A, B and A again, continues after A's answer, branches off A's text at several
positions, and returns to A. All run with the cache on, several at a time, greedy. Then every prompt is sent again with
the cache off, and the texts are compared. The cache is off in one of two ways:

salt    every request has its own `cache_salt`, so that it finds no cached tokens (Aerie, vLLM)
flush   the cache is emptied before every request, which then runs alone (SGLang: /flush_cache, vLLM's development mode:
        /reset_prefix_cache)
"""

from __future__ import annotations

import argparse
import asyncio
import random
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from aerie.cluster.config import ConfigError
from aerie.deploy.client import CONNECT_TIMEOUT_S, Server, message_of, parse_server

_TEXT = (
    "the a river stone green walks under light morning and seven birds carry old letters to town where people count "
    "clouds before winter comes again with rain over small boats near hills while children draw maps of islands that "
    "nobody has seen because every road ends at water but some bridges hold"
)
WORDS = _TEXT.split()
DEFAULT_WORDS, TOKENS_A_WORD = 600, 2  # words of a prompt; maximum tokens per word in any tokenizer
FLUSH_ROUTES = ("/flush_cache", "/reset_prefix_cache")
TOP_LOGPROBS = 5  # maximum of OpenAI's completions


@dataclass(frozen=True)
class Answer:
    """One answer.

    num_prompt, num_cached: number of prompt tokens, and of cached ones; -1 if the server does not report them.
    tops: text of each token and log-probabilities of the most likely ones, if requested.
    """

    text: str
    num_prompt: int
    num_cached: int
    tops: tuple[tuple[str, dict[str, float]], ...] = ()


@dataclass(frozen=True)
class CacheTurn:
    """One request with the cache on. kind: how its prompt was derived from earlier ones."""

    kind: str
    prompt: str
    answer: Answer


@dataclass(frozen=True)
class Difference:
    """An answer that differs with and without the cache.

    turn: request with the cache.
    expected: answer without the cache.
    nats: log-probability of the best token minus that of the first different one, without the cache; None if unknown.
    """

    turn: CacheTurn
    expected: str
    nats: float | None

    @property
    def start(self) -> int:
        """The first character that differs."""
        pairs = zip(self.turn.answer.text, self.expected, strict=False)
        shorter = min(len(self.turn.answer.text), len(self.expected))
        return next((i for i, (mine, other) in enumerate(pairs) if mine != other), shorter)


class Completions:
    """Requests greedy answers of one server."""

    def __init__(self, server: Server, model: str, max_tokens: int, client: httpx.AsyncClient) -> None:
        self._server = server
        self._model = model
        self._max_tokens = max_tokens
        self._client = client

    async def ask(self, prompt: str, **more: Any) -> Answer:
        """Return an answer. Raises ConfigError if the server does not answer, or with an error."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0, **more}
        reply = await self._post("/v1/completions", body)
        if reply.status_code != 200:
            raise ConfigError(f"{self._server.url}: {message_of(reply)}")
        document = reply.json()
        choice, usage = document["choices"][0], document.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        logprobs = choice.get("logprobs") or {}
        tops = tuple(zip(logprobs.get("tokens") or (), logprobs.get("top_logprobs") or (), strict=False))
        return Answer(choice["text"], usage.get("prompt_tokens", -1), -1 if cached is None else cached, tops)

    async def flush(self) -> bool:
        """Empty the cache; return whether the server has a route for that."""
        for route in FLUSH_ROUTES:
            if (await self._post(route, None)).status_code == 200:
                return True
        return False

    async def _post(self, path: str, body: Any) -> httpx.Response:
        try:
            return await self._client.post(f"{self._server.url}{path}", json=body, headers=self._server.headers)
        except httpx.HTTPError as error:
            raise ConfigError(f"{self._server.url}{path}: {type(error).__name__}: {error}") from None


def conversation(rng: random.Random, shared: str, num_words: int) -> Generator[tuple[str, str], str, None]:
    """Yield the turns of one conversation: kind and prompt. Receives the answer to each."""
    parts: list[str] = []
    for _ in range(2):
        parts.append(f"{shared} {_text(rng, num_words)}")
    a, b = parts
    answer = yield "A", a
    yield "B", b
    yield "A again", a
    longer = f"{a}{answer} {_text(rng, 12)}"
    answer = yield "A continued", longer
    yield "A continued again", longer
    yield "A continued twice", f"{longer}{answer} {_text(rng, 12)}"
    yield "fork of the answer", f"{a}{answer[: len(answer) // 2]} {_text(rng, 12)}"
    yield "fork of A", f"{a[: rng.randrange(len(a) // 4, len(a))]} {_text(rng, 12)}"
    yield "fork of the shared text", f"{shared[: rng.randrange(len(shared) // 2, len(shared))]} {_text(rng, 12)}"
    yield "B again", b
    yield "A at the end", a


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


async def run_turns(ask: Completions, arguments: argparse.Namespace, step: Callable[[], None]) -> list[CacheTurn]:
    """Run all conversations with the cache on, `concurrency` at a time."""
    turns: list[CacheTurn] = []
    shared = _text(random.Random(arguments.seed), arguments.words // 2)
    numbers = iter(range(arguments.conversations))

    async def run_some() -> None:
        """Run conversations one after another, as long as there are numbers, which all calls share."""
        for number in numbers:
            talk = conversation(random.Random(f"{arguments.seed}-{number}"), shared, arguments.words // 2)
            kind, prompt = next(talk)
            while True:
                turn = CacheTurn(kind, prompt, await ask.ask(prompt))
                turns.append(turn)
                step()
                try:
                    kind, prompt = talk.send(turn.answer.text)
                except StopIteration:
                    break

    await asyncio.gather(*(run_some() for _ in range(arguments.concurrency)))
    return turns


async def without_cache(
    ask: Completions, prompts: Sequence[str], off: str, concurrency: int, more: dict[str, Any], step: Callable[[], None]
) -> dict[str, Answer]:
    """Return the answer to each prompt with the cache off.

    off: "salt" or "flush", see above.
    more: further fields of each request.
    step: called after each answer.
    """
    answers: dict[str, Answer] = {}
    remaining = iter(prompts)

    async def ask_some() -> None:
        """Ask prompts one after another, as long as there are any; all calls share them."""
        for prompt in remaining:
            if off == "flush":
                await ask.flush()
                answers[prompt] = await ask.ask(prompt, **more)
            else:
                answers[prompt] = await ask.ask(prompt, cache_salt=uuid.uuid4().hex, **more)
            step()

    await asyncio.gather(*(ask_some() for _ in range(1 if off == "flush" else concurrency)))
    return answers


def compared(turns: Sequence[CacheTurn], answers: dict[str, Answer]) -> list[Difference]:
    """Return the turns whose texts differ from those without the cache."""
    scored = []
    for turn in turns:
        expected = answers[turn.prompt]
        if turn.answer.text != expected.text:
            difference = Difference(turn, expected.text, None)
            scored.append(replace(difference, nats=_nats(difference, expected)))
    return scored


def _nats(difference: Difference, expected: Answer) -> float | None:
    """Return the cost in nats of the first different token, from the log-probabilities without the cache. A token that
    is not among the most likely ones costs more than the last of them."""
    end = 0
    for token, tops in expected.tops:
        if end + len(token) > difference.start and tops:
            rest = difference.turn.answer.text[end:]
            likely = [logprob for text, logprob in tops.items() if text != token and text and rest.startswith(text)]
            return max(tops.values()) - max(likely) if likely else float("inf")
        end += len(token)
    return None


async def check(server: Server, model: str, arguments: argparse.Namespace, console: Console) -> int:
    """Run the test, print the differences, and return the exit code. Raises ConfigError."""
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=arguments.concurrency + 1)
    async with httpx.AsyncClient(timeout=timeout, limits=limits) as client:
        ask = Completions(server, model, arguments.max_tokens, client)
        off = arguments.off
        if off == "flush" and not await ask.flush():
            raise ConfigError(f"--off flush: {server.url} has none of {', '.join(FLUSH_ROUTES)}; use --off salt")
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
            bar = bars.add_task("with the cache", total=11 * arguments.conversations)
            turns = await run_turns(ask, arguments, lambda: bars.advance(bar))
            prompts = list(dict.fromkeys(turn.prompt for turn in turns))
            bar = bars.add_task("without", total=len(prompts))
            more = {"logprobs": TOP_LOGPROBS} if arguments.ties > 0 else {}
            answers = await without_cache(ask, prompts, off, arguments.concurrency, more, lambda: bars.advance(bar))
    hits = [turn.answer.num_cached for turn in turns]
    if off == "salt" and any(answer.num_cached > 0 for answer in answers.values()):
        raise ConfigError(
            f"--off salt: {server.url} finds tokens of other salts; it ignores cache_salt: use --off flush"
        )
    if max(hits) == 0:
        raise ConfigError(f"{server.url}: the cache was never hit, so nothing was checked; is it on? try more --words")
    differences = compared(turns, answers)
    ties = [
        difference for difference in differences if difference.nats is not None and difference.nats <= arguments.ties
    ]
    console.print(_table(turns, differences))
    if max(hits) < 0:
        console.print("The server does not say how many tokens its cache had (vLLM: --enable-prompt-tokens-details).")
    for difference in differences[: arguments.show]:
        _print_difference(console, difference)
    real = len(differences) - len(ties)
    console.print(
        f"{len(differences)} of {len(turns)} answers differ from those without the cache (off by {off})"
        + (f"; {len(ties)} of them begin with a tie of {arguments.ties:g} nats at most" if arguments.ties > 0 else "")
    )
    return 1 if real else 0


def _table(turns: Sequence[CacheTurn], differences: Sequence[Difference]) -> Table:
    table = Table("turn", "answers", "different", "prompt tokens", "of the cache")
    for kind in dict.fromkeys(turn.kind for turn in turns):
        own = [turn for turn in turns if turn.kind == kind]
        different = sum(difference.turn.kind == kind for difference in differences)
        prompt = sum(max(0, turn.answer.num_prompt) for turn in own)
        cached = sum(max(0, turn.answer.num_cached) for turn in own)
        share = f"{cached} ({cached / prompt:.0%})" if prompt else "-"
        table.add_row(kind, str(len(own)), str(different), str(prompt), share)
    return table


def _print_difference(console: Console, difference: Difference) -> None:
    turn, start = difference.turn, difference.start
    cost = "" if difference.nats is None else f", {difference.nats:.3g} nats below the likeliest token"
    console.print(
        f"{turn.kind}: from character {start} on, {turn.answer.num_cached} of {turn.answer.num_prompt} prompt tokens "
        f"cached{cost}\n  with     {turn.answer.text[start : start + 60]!r}\n"
        f"  without  {difference.expected[start : start + 60]!r}",
        markup=False,
        highlight=False,
    )


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if all answers are equal, else 1. Raises ConfigError."""
    server = parse_server(arguments)
    card = server.model(arguments.model)
    if arguments.off == "auto":
        arguments.off = "flush" if card.get("owned_by") == "sglang" else "salt"
    if arguments.words is None:
        limit = card.get("max_model_len") or 2**31
        arguments.words = max(8, min(DEFAULT_WORDS, (limit - 3 * arguments.max_tokens) // (2 * TOKENS_A_WORD)))
    return asyncio.run(check(server, card["id"], arguments, Console()))
