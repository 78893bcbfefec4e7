"""The page in headless Chromium over a scripted engine: answers, races, keys, failures. `make test` runs the first test
only; the others: `make test-slow ROOM=tests/cluster/http/page`."""

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from aerie.cluster.http.text.chat_template import ChatTemplate
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.stats import SchedulerStats
from tests.support.clients.browser import CHROMIUM, Tab, browser_tab
from tests.support.clients.chat_page import (
    ANSWER,
    IDLE,
    ask,
    begin,
    engine_with_drafts,
    in_rounds,
    press,
    set_field,
    texts,
    written,
)
from tests.support.edge_client import served, until
from tests.support.fake_engine import CHATML, EOS, FakeEngine, Step, small_tokenizer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)")
KEY = "sesame-open"
LONG = "The quick brown fox jumps over the lazy dog, and then over the next one, and so on."


def _tokens(number: int) -> str:
    """JavaScript: text and class of each token of an answer."""
    spans = f"document.querySelectorAll('.answer')[{number}].querySelectorAll('.token')"
    return f"Array.from({spans}, (span) => [span.textContent, span.className])"


def _prompt(engine: FakeEngine, call: int = -1) -> str:
    return small_tokenizer().decode(engine.calls[call].prompt, skip_special_tokens=False)


async def test_race_shows_both_answers_by_origin_both_speeds_and_their_factor() -> None:
    engine = engine_with_drafts()
    async with served(engine, max_model_len=2048, default_temperature=0.7) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await ask(tab, "hi", race=True)
        on: list[list[str]] = await tab.evaluate(_tokens(0))
        assert on[:4] == [
            ["hello", "token target"],
            [" world", "token drafted"],
            ["<", "token drafted"],
            ["b", "token target"],
        ]
        assert "".join(text for text, _ in on) == "hello world<b>"
        assert {kind for _, kind in await tab.evaluate(_tokens(1))} == {"token target"}
        figures = await texts(tab, ".figures")
        assert "2.00 tokens a round" in figures[0] and "accepted by position: 50 %, 50 %" in figures[0]
        assert "round" not in figures[1] and "tokens/s" in figures[1]
        # The same prompt, seed and sampling, which is the server's own; one after the other.
        first, second = engine.calls
        assert msgspec.structs.replace(first.sampling, speculative=False) == second.sampling
        assert first.sampling.speculative and first.prompt == second.prompt and first.sampling.temperature == 0.7
        assert engine.max_active == 1
        assert await texts(tab, ".factor strong") == []
        assert "too short to compare" in (await texts(tab, ".board .note"))[0]
        engine.script = lambda prompt, sampling: in_rounds(LONG, sampling)
        await press(tab, "Race", within=".turn")
        await tab.until("document.querySelector('.factor strong') !== null")
        speeds = [float(text.removesuffix(" tokens/s")) for text in await texts(tab, ".speed")]
        factor = float((await texts(tab, ".factor strong"))[0].removesuffix("×"))
        assert abs(factor - speeds[0] / speeds[1]) < 0.1 and factor > 1
        assert (await texts(tab, ".board .note"))[0].startswith("Both answers are the same.")
        await press(tab, "Replay side by side")
        await tab.until("document.querySelectorAll('.to-come').length > 0")
        await tab.until("document.querySelectorAll('.to-come').length === 0")
        # The conversation goes on with the first answer.
        await ask(tab, "again")
        assert "hi<|im_end|>" in _prompt(engine) and f"{LONG}<|im_end|>" in _prompt(engine)
        assert "again<|im_end|>" in _prompt(engine)
        assert engine.calls[2].sampling.seed != first.sampling.seed
        assert not tab.messages, tab.messages


@pytest.mark.slow
async def test_engines_ranks_and_accepted_drafts_are_shown() -> None:
    engine = engine_with_drafts()
    async with served(engine, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await tab.until("document.getElementById('engines')?.textContent.includes('engine-0: ready, 3 running')")
        assert await tab.evaluate("document.querySelectorAll('.engine tr').length") == 3
        assert await tab.evaluate("document.querySelectorAll('#positions .bar').length") == 2
        # Nothing was accepted since the page opened; then eight drafts in four rounds.
        branches = "document.getElementById('branches').textContent"
        assert await tab.evaluate(branches) == "dspark–suffix–"
        later = SchedulerStats(accepted_histogram=[2, 1, 1, 2], accepted_by_branch={"dspark": 4, "suffix": 5})
        engine.engines = [msgspec.structs.replace(engine.engines[0], scheduler=later)]
        await tab.until(f"{branches} === 'dspark0.75suffix1.00'")
        assert await tab.evaluate("document.getElementById('state').textContent") == "ready"
        # A server without drafts has nothing to race.
        engine.engines = [msgspec.structs.replace(engine.engines[0], scheduler=SchedulerStats())]
        await tab.until("getComputedStyle(document.getElementById('race')).display === 'none'")
        assert not tab.messages, tab.messages


@pytest.mark.slow
async def test_key_is_asked_for_once_and_kept_for_the_tab() -> None:
    async with served(engine_with_drafts(), max_model_len=2048, api_keys=(KEY,)) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await tab.until("document.getElementById('key-dialog')?.open")
        for key in ("wrong", KEY):
            await tab.until("document.getElementById('key-dialog').open")
            await tab.evaluate(f"document.getElementById('key').value = {json.dumps(key)}")
            await tab.evaluate("document.getElementById('key-form').requestSubmit()")
        await tab.until("document.getElementById('model').textContent !== ''")
        assert await tab.evaluate("sessionStorage.getItem('aerie-api-key')") == KEY
        await ask(tab, "hi")
        await tab.open(f"{url}/")
        await tab.until("document.getElementById('model').textContent !== ''")
        assert not await tab.evaluate("document.getElementById('key-dialog').open")


@pytest.mark.slow
async def test_failures_and_stops_are_shown_and_unanswered_questions_leave_the_prompt() -> None:
    failing = [TokenDelta("", (), "error", error="rank 1 died")]
    scripts: list[Any] = [failing, [TokenDelta("", (64,), drafted=(False,)), 60.0]]
    engine = FakeEngine(lambda prompt, sampling: scripts.pop(0))
    async with served(engine, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await ask(tab, "one")
        assert "The engine failed" in (await texts(tab, ".ending"))[0]
        assert "Try again" in await texts(tab, ".offered")
        await begin(tab, "two")
        await tab.until("document.querySelectorAll('.answer .token').length == 1")
        await tab.evaluate("document.getElementById('stop').click()")
        await tab.until(IDLE)
        assert (await texts(tab, ".ending"))[1] == "Stopped."
        assert await texts(tab, ".offered") == ["Go on", "Regenerate"]
        await until(lambda: engine.num_active == 0)
    assert "one" not in _prompt(engine, 1)


@pytest.mark.slow
async def test_an_answer_cut_at_its_limit_says_so_and_goes_on() -> None:
    def script(prompt: list[int], sampling: SamplingParams) -> Iterable[Step]:
        """LONG, or what is missing of it."""
        last = small_tokenizer().decode(prompt, skip_special_tokens=False).rpartition("assistant\n")[2]
        return written(LONG.removeprefix(last), sampling)

    engine = FakeEngine(script)
    async with served(engine, max_model_len=512) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await ask(tab, "hi")
        # Without a limit of the reader's, the answer may take what the context leaves.
        assert engine.calls[0].sampling.max_tokens == 512 - len(engine.calls[0].prompt)
        assert await tab.evaluate(f"{ANSWER}.textContent") == LONG
        assert await texts(tab, ".ending") == [""] and "Go on" not in await texts(tab, ".offered")
        await set_field(tab, "max-tokens", "40")
        await press(tab, "Regenerate")
        await tab.until("document.querySelector('.ending')?.textContent === 'Stopped at the limit of 40 tokens.'")
        await tab.until(IDLE)
        shown = await tab.evaluate(f"{ANSWER}.textContent")
        assert LONG.startswith(shown) and len(shown) < len(LONG)
        await tab.open(f"{url}/")  # also after the page was closed
        await tab.evaluate("document.querySelector('#conversations .open').click()")
        await set_field(tab, "max-tokens", "")
        await press(tab, "Go on")
        await tab.until(f"{ANSWER}.textContent === {json.dumps(LONG)}")
        await tab.until(IDLE)
        assert _prompt(engine).endswith(f"assistant\n{shown}")
        assert "Go on" not in await texts(tab, ".offered")
        await ask(tab, "again")
        assert f"{LONG}<|im_end|>" in _prompt(engine)
        assert not tab.messages, tab.messages


@pytest.mark.slow
async def test_context_in_use_is_shown_and_a_full_one_is_said() -> None:
    engine = FakeEngine(lambda prompt, sampling: written("x" * 500, sampling))
    async with served(engine, max_model_len=128) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await ask(tab, "hi")
        assert (await texts(tab, "#context-text")) == ["128 of 128 tokens"]
        assert await tab.evaluate("document.getElementById('context').dataset.nearlyFull") == "yes"
        assert (await texts(tab, ".ending"))[0].startswith("The context of 128 tokens is full.")
        assert await texts(tab, ".offered") == ["Regenerate"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["on", "off", ""])
async def test_thinking_is_switched_where_the_template_can(choice: str) -> None:
    source = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<off>{% endif %}"
    eos = small_tokenizer().token_to_id(EOS)
    tokenizer = ChatTokenizer(small_tokenizer(), ChatTemplate(source, {"eos_token": EOS}), (eos,))
    engine = engine_with_drafts()
    async with served(engine, tokenizer, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await tab.until("!document.getElementById('thinking-label')?.hidden")
        assert (await texts(tab, "#thinking-default")) == ["default (on)"]
        await set_field(tab, "thinking", choice)
        await ask(tab, "hi")
        assert _prompt(engine).endswith("<off>") == (choice == "off")


@pytest.mark.slow
async def test_reasoning_is_folded_and_kept_out_of_the_history() -> None:
    engine = FakeEngine(lambda prompt, sampling: written("<think>hidden</think>shown", sampling))
    async with served(engine, max_model_len=2048, output_parser="think") as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await ask(tab, "hi")
        assert await tab.evaluate("document.querySelector('.reasoning .markdown').textContent") == "hidden"
        assert not await tab.evaluate("document.querySelector('.reasoning').open")
        assert await tab.evaluate(f"{ANSWER}.textContent") == "shown"
        assert await tab.evaluate("document.getElementById('thinking-label').hidden")
        await ask(tab, "again")
        assert "hidden" not in _prompt(engine)


@pytest.mark.slow
async def test_keyboard_alone_asks_races_stops_edits_and_undoes() -> None:
    engine = engine_with_drafts()
    async with served(engine, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await tab.until(f"{IDLE} && document.body.dataset.drafts === 'yes'")
        assert await tab.evaluate("document.activeElement.id") == "prompt"
        await tab.command("Input.insertText", text="hi")
        await tab.key("Enter", modifiers=2)
        await tab.until("document.querySelector('.board button') !== null")
        await tab.until(f"{IDLE} && document.activeElement.id === 'prompt'")
        await _tab_to(tab, ".edit", modifiers=8)
        await tab.key("Enter")
        assert await tab.evaluate("document.activeElement.value") == "hi"
        await tab.key("Escape")
        assert await tab.evaluate("document.activeElement.className") == "small edit"
        await tab.key("Enter")
        await tab.command("Input.insertText", text=" there")
        engine.script = lambda prompt, sampling: [TokenDelta("", (64,), drafted=(False,)), 60.0]
        await tab.key("Enter")
        await tab.until("document.querySelectorAll('.answer .token').length === 1")
        assert "hi there<|im_end|>" in _prompt(engine)
        await tab.key("Escape")
        await tab.until("document.querySelector('.ending')?.textContent === 'Stopped.'")
        await tab.until("document.activeElement.id === 'prompt'")
        await _tab_to(tab, "#toast button", modifiers=8)
        await tab.key("Enter")
        assert await texts(tab, ".asked") == ["hi"]
        assert await tab.evaluate(f"{ANSWER}.textContent") == "hello world<b>"


async def _tab_to(tab: Tab, selector: str, modifiers: int) -> None:
    for _ in range(40):
        await tab.key("Tab", modifiers)
        if await tab.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
            return
    raise AssertionError(f"{selector} is not reached with the Tab key")


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_nothing_is_wider_than_the_window(width: int, theme: str) -> None:
    wide = "```\n" + "x" * 500 + "\n```\n" + "y" * 500 + "\n\n| " + "z | " * 60 + "\n|" + "-|" * 60 + "\n\n"
    wide += "$$" + "a + " * 100 + "b$$\n"
    engine = engine_with_drafts(lambda prompt, sampling: written(wide, sampling))
    async with served(engine, max_model_len=8192) as url, browser_tab(width) as tab:
        await tab.open(f"{url}/")
        await set_field(tab, "theme", theme)
        await ask(tab, "w" * 300, race=True)
        await ask(tab, "w" * 300)
        await tab.until("document.querySelectorAll('.katex-display').length >= 1")
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        assert await tab.evaluate(
            "document.getElementById('chat').scrollWidth <= document.getElementById('chat').clientWidth"
        )
        send = "document.getElementById('send').getBoundingClientRect()"
        assert await tab.evaluate(f"{send}.right <= innerWidth && {send}.bottom <= innerHeight")
        side = "document.getElementById('side').getBoundingClientRect().width"
        assert (await tab.evaluate(f"{side} > 0")) == (width == 1280)
        await tab.evaluate("document.getElementById('menu').click()")
        assert await tab.evaluate(f"{side} > 0 && {side} < innerWidth")
