"""The page at `/` in a browser, over a scripted engine: what its tests and screenshots share."""

import json
from collections.abc import Iterable
from typing import Any

from aerie.cluster.transport.messages import EngineStats, SpeculationStats, TokenDelta
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.stats import SchedulerStats
from tests.support.clients.browser import Tab
from tests.support.fake_engine import EOS, FakeEngine, Step, small_tokenizer

IDLE = "document.getElementById('send') && !document.getElementById('send').disabled"
ANSWER = "document.querySelector('.text > .markdown')"


def in_rounds(text: str, sampling: SamplingParams) -> Iterable[Step]:
    """`text` with speculation in rounds of three drafts, without a token at a time; a round takes 20 ms."""
    tokens = (*small_tokenizer().encode(text, add_special_tokens=False).ids, small_tokenizer().token_to_id(EOS))
    size = 4 if sampling.speculative else 1
    yield TokenDelta("", tokens[:1], drafted=(False,))
    for at in range(1, len(tokens), size):
        yield 0.02
        piece = tokens[at : at + size]
        finish = "stop" if at + size >= len(tokens) else None
        yield TokenDelta("", piece, finish, drafted=(True,) * (len(piece) - 1) + (False,))


def hello_world(prompt: list[int], sampling: SamplingParams) -> Iterable[Step]:
    """ "hello world<b>" with speculation in one round of two drafts, without a token at a time."""
    ids = small_tokenizer().encode("hello world<b>", add_special_tokens=False).ids
    eos = small_tokenizer().token_to_id(EOS)
    yield TokenDelta("", (ids[0],), drafted=(False,))
    yield 0.05
    if sampling.speculative:
        yield TokenDelta("", tuple(ids[1:4]), drafted=(True, True, False))
        yield 0.05
        stats = SpeculationStats(2, (1, 0, 1), 2, 4)
        last = (*ids[4:], eos)
        yield TokenDelta("", last, "stop", cached_tokens=0, speculation=stats, drafted=(False,) * len(last))
        return
    for token in ids[1:]:
        yield TokenDelta("", (token,), drafted=(False,))
        yield 0.05
    yield TokenDelta("", (eos,), "stop", drafted=(False,))


def written(text: str, sampling: SamplingParams, delay_s: float = 0.0) -> Iterable[Step]:
    """`text` a few tokens at a time, each with its origin, up to the request's limit."""
    tokens = small_tokenizer().encode(text, add_special_tokens=False).ids
    shown = tokens[: sampling.max_tokens]
    for at in range(0, len(shown), 7):
        if delay_s:
            yield delay_s
        piece = tuple(shown[at : at + 7])
        is_cut = len(shown) < len(tokens) and at + 7 >= len(shown)
        yield TokenDelta("", piece, "length" if is_cut else None, drafted=(False,) * len(piece))
    if len(shown) == len(tokens):
        yield TokenDelta("", (small_tokenizer().token_to_id(EOS),), "stop", drafted=(False,))


def engine_with_drafts(script: Any = hello_world) -> FakeEngine:
    stats = SchedulerStats(accepted_histogram=[1, 0, 1], accepted_by_branch={"dspark": 1, "suffix": 1})
    ranks = {"heartbeat_age_s": (0.2, 0.3), "rank_steps": (7, 7), "rank_step_s": (1.0, 1.0)}
    return FakeEngine(script, engines=[EngineStats("engine-0", "ready", scheduler=stats, num_running=3, **ranks)])


async def set_field(tab: Tab, field: str, value: str) -> None:
    await tab.evaluate(f"document.getElementById('{field}').value = {json.dumps(value)}")
    await tab.evaluate(f"document.getElementById('{field}').dispatchEvent(new Event('change'))")


async def begin(tab: Tab, prompt: str, race: bool = False) -> None:
    """Write the prompt and press Send or Race; return when its turn is there."""
    await tab.until(IDLE)
    button = "race" if race else "send"
    await tab.until(f"getComputedStyle(document.getElementById('{button}')).display !== 'none'")
    before = await tab.evaluate("document.querySelectorAll('.turn').length")
    await tab.evaluate(f"document.getElementById('prompt').value = {json.dumps(prompt)}")
    await tab.evaluate(f"document.getElementById('{button}').click()")
    await tab.until(f"document.querySelectorAll('.turn').length > {before}")


async def ask(tab: Tab, prompt: str, race: bool = False, timeout_s: float = 30.0) -> None:
    """Do `begin`, and return after the answer."""
    await begin(tab, prompt, race)
    await tab.until(IDLE, timeout_s)


async def press(tab: Tab, label: str, within: str = "body") -> None:
    """Press the last button with this label."""
    found = f"document.querySelectorAll({json.dumps(within + ' button')})"
    buttons = f"Array.from({found}).filter((b) => b.textContent === {json.dumps(label)})"
    await tab.until(f"{buttons}.length > 0 && !{buttons}.at(-1).disabled")
    await tab.evaluate(f"{buttons}.at(-1).click()")


async def texts(tab: Tab, selector: str) -> list[str]:
    found = f"document.querySelectorAll({json.dumps(selector)})"
    values: list[str] = await tab.evaluate(f"Array.from({found}, (node) => node.textContent)")
    return values
