"""Asks for the same answers under different circumstances, and compares tokens and log-probabilities.

Each prompt is first asked alone, with a cache that does not know it. Then again: beside neighbours, from the cache, and
without speculation, where the server lets a request say so. Half of the answers are greedy, half are drawn with a seed.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aerie.deploy.check_server.ask import Asker, Sample, neighbours, words_of

SHORTEST_WORDS = 4
ASKED_AT_ONCE = 4  # prompts under comparison; the rest of the batch are neighbours


@dataclass(frozen=True)
class Question:
    """A prompt with its sampling fields."""

    prompt: str
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Circumstance:
    """How the questions are asked once more.

    others: other requests at the same time.
    cached: the prompt is asked twice with the cache on, and the second answer counts.
    speculative: False: the request asks for no speculation.
    """

    name: str
    others: int = 0
    cached: bool = False
    speculative: bool = True


@dataclass(frozen=True)
class Comparison:
    """How answers under a circumstance differ from those alone.

    texts: answers with other tokens.
    first: position of the first other token in each of them.
    logprobs: answers with the same tokens but another log-probability.
    nats: the largest difference.
    """

    circumstance: str
    answers: int
    texts: int
    first: tuple[int, ...]
    logprobs: int
    nats: float


def questions(count: int, longest: int, max_tokens: int, seed: int) -> list[Question]:
    """Return prompts of SHORTEST_WORDS to `longest` words, as many short as long ones on a logarithmic scale."""
    made = []
    for number in range(count):
        rng = random.Random(f"{seed}-{number}")
        share = number / max(1, count - 1)
        words = round(SHORTEST_WORDS * (max(longest, SHORTEST_WORDS) / SHORTEST_WORDS) ** share)
        drawn = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
        made.append(Question(words_of(rng, words), {"max_tokens": max_tokens, **drawn}))
    return made


def circumstances(loads: Sequence[int], has_switch: bool) -> list[Circumstance]:
    """Return the circumstances to compare. loads: sizes of batches."""
    listed = [Circumstance("asked again")]
    listed += [Circumstance(f"{load} at once", others=load) for load in loads]
    listed.append(Circumstance("from the cache", cached=True))
    if loads:
        listed.append(Circumstance(f"from the cache, {loads[0]} at once", others=loads[0], cached=True))
    if has_switch:
        listed.append(Circumstance("without speculation", speculative=False))
        listed += [Circumstance(f"without speculation, {load} at once", load, speculative=False) for load in loads[:1]]
    return listed


async def run(
    ask: Asker,
    asked: Sequence[Question],
    listed: Sequence[Circumstance],
    longest: int,
    step: Callable[[str], None],
) -> list[Comparison]:
    """Ask all questions alone, and under every circumstance. step: told each circumstance's name after an answer."""
    alone = await _answers(asked, 1, partial(_once, ask, {}), partial(step, "alone"))
    comparisons = []
    for number, circumstance in enumerate(listed):
        more = {} if circumstance.speculative else {"speculative": False}
        at_once = min(ASKED_AT_ONCE, max(1, circumstance.others))
        how = partial(_cached if circumstance.cached else _once, ask, more)
        async with neighbours(ask, max(0, circumstance.others - at_once), longest, number):
            again = await _answers(asked, at_once, how, partial(step, circumstance.name))
        comparisons.append(compared(circumstance.name, alone, again))
    return comparisons


async def _once(ask: Asker, more: dict[str, Any], question: Question) -> Sample:
    """Ask with a cache that does not know the prompt, where the server can keep prompts apart."""
    salt = {"cache_salt": uuid.uuid4().hex} if ask.abilities.salt else {}
    return await ask.complete(question.prompt, **question.sampling, **salt, **more)


async def _cached(ask: Asker, more: dict[str, Any], question: Question) -> Sample:
    salt = {"cache_salt": uuid.uuid4().hex} if ask.abilities.salt else {}
    await ask.complete(question.prompt, **{**question.sampling, "max_tokens": 1}, **salt, **more)
    return await ask.complete(question.prompt, **question.sampling, **salt, **more)


async def _answers(
    asked: Sequence[Question], at_once: int, how: Callable[[Question], Awaitable[Sample]], step: Callable[[], None]
) -> list[Sample]:
    """Return the answers in the order of `asked`, with `at_once` requests at a time. step: called after each."""
    answers: dict[int, Sample] = {}
    left = iter(enumerate(asked))

    async def stream() -> None:
        for number, question in left:
            answers[number] = await how(question)
            step()

    await asyncio.gather(*(stream() for _ in range(at_once)))
    return [answers[number] for number in range(len(asked))]


def compared(name: str, alone: Sequence[Sample], again: Sequence[Sample]) -> Comparison:
    """Compare answers with those alone. Log-probabilities are compared up to the first other token."""
    first, others, nats = [], 0, 0.0
    for one, other in zip(alone, again, strict=True):
        pairs = list(zip(one.tokens, other.tokens, strict=False))
        start = next((index for index, (mine, its) in enumerate(pairs) if mine != its), len(pairs))
        differs = one.text != other.text or one.tokens != other.tokens
        if differs:
            first.append(start)
        numbers = zip(one.logprobs[:start], other.logprobs[:start], strict=False)
        gaps = [abs((mine or 0.0) - (its or 0.0)) for mine, its in numbers if mine != its]
        others += bool(gaps) and not differs
        nats = max([nats, *gaps])
    return Comparison(name, len(alone), texts=len(first), first=tuple(first), logprobs=others, nats=nats)
