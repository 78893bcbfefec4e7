"""What the page keeps, in headless Chromium: settings, conversations, two tabs, undo, export, a server that goes and
returns. `make test-slow ROOM=tests/cluster/http/page`."""

import json

import pytest

from tests.support.clients.browser import CHROMIUM, another_tab, browser_tab
from tests.support.clients.chat_page import (
    ANSWER,
    IDLE,
    ask,
    begin,
    engine_with_drafts,
    press,
    set_field,
    texts,
    written,
)
from tests.support.edge_client import served
from tests.support.fake_engine import FakeEngine, small_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)"),
]
TITLES = "#conversations .open"


def _prompt(engine: FakeEngine, call: int = -1) -> str:
    return small_tokenizer().decode(engine.calls[call].prompt, skip_special_tokens=False)


async def test_settings_and_conversations_are_kept_in_the_browser() -> None:
    engine = engine_with_drafts()
    async with served(engine, max_model_len=2048, default_temperature=0.6) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await tab.until("document.getElementById('temperature')?.placeholder === '0.6'")
        for field, value in {"system": "be brief", "top-p": "0.5", "seed": "7", "theme": "dark"}.items():
            await set_field(tab, field, value)
        assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(28, 25, 23)"
        await ask(tab, "hi")
        await tab.open(f"{url}/")
        assert await tab.evaluate("document.getElementById('system').value") == "be brief"
        assert await tab.evaluate("document.documentElement.dataset.theme") == "dark"
        await tab.evaluate(f"document.querySelector('{TITLES}').click()")
        assert await tab.evaluate(f"{ANSWER}.textContent") == "hello world<b>"
        await ask(tab, "again")
        second = engine.calls[1]
        assert (second.sampling.top_p, second.sampling.seed, second.sampling.temperature) == (0.5, 7, 0.6)
        assert _prompt(engine).startswith("<|im_start|>system\nbe brief<|im_end|>")
        assert "hello world<b>" in _prompt(engine)
        # "Regenerate" asks the last question once more, after what came before it.
        await press(tab, "Regenerate")
        await tab.until(IDLE)
        assert engine.calls[2].prompt == second.prompt
        assert await texts(tab, ".asked") == ["hi", "again"]
        assert not tab.messages, tab.messages


async def test_an_edited_message_is_sent_from_where_it_stands_and_undone() -> None:
    engine = engine_with_drafts()
    async with served(engine, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        for question in ("one", "two", "three"):
            await ask(tab, question)
        await tab.evaluate("document.querySelectorAll('.edit')[1].click()")
        await tab.evaluate("document.querySelector('.editing textarea').value = 'deux'")
        await tab.evaluate("document.querySelector('.editing form').requestSubmit()")
        await tab.until(f"{IDLE} && document.querySelectorAll('.asked').length === 2")
        assert await texts(tab, ".asked") == ["one", "deux"]
        assert "one<|im_end|>" in _prompt(engine) and "two" not in _prompt(engine)
        await press(tab, "Undo")
        assert await texts(tab, ".asked") == ["one", "two", "three"]
        await tab.open(f"{url}/")
        await tab.evaluate(f"document.querySelector('{TITLES}').click()")
        assert await texts(tab, ".asked") == ["one", "two", "three"]


async def test_conversations_are_found_deleted_brought_back_and_exported() -> None:
    async with served(engine_with_drafts(), max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        for question in ("about falcons", "about owls"):
            await ask(tab, question)
            await tab.evaluate("document.getElementById('new').click()")
        assert await texts(tab, TITLES) == ["about owls", "about falcons"]
        await tab.evaluate("document.getElementById('search').value = 'FALCONS hello'")
        await tab.evaluate("document.getElementById('search').dispatchEvent(new Event('input'))")
        assert await texts(tab, TITLES) == ["about falconsabout falcons"]  # the title, and where it was found
        await tab.evaluate("document.querySelector('#conversations .remove').click()")
        assert await texts(tab, TITLES) == []
        await press(tab, "Undo")
        await tab.evaluate("document.getElementById('search').value = ''")
        await tab.evaluate("document.getElementById('search').dispatchEvent(new Event('input'))")
        assert await texts(tab, TITLES) == ["about owls", "about falcons"]
        # What a download would hold.
        await tab.evaluate(
            "window.files = []; URL.createObjectURL = (blob) => (window.files.push(blob), 'about:blank');"
            "HTMLAnchorElement.prototype.click = function () { window.files.push(this.download); }"
        )
        await tab.evaluate(f"document.querySelector('{TITLES}').click()")
        for kind in ("markdown", "json", "all"):
            await tab.evaluate(f"document.getElementById('export-{kind}').click()")
        read = "Promise.all(files.map((file) => file.text?.() ?? file))"
        files: list[str] = await tab.evaluate(read)
        assert files[1::2] == ["about-owls.md", "about-owls.json", "conversations.json"]
        assert files[0].startswith("# about owls\n\n## Question\n\nabout owls\n\n## Answer\n\nhello world<b>")
        roles = [message["role"] for message in json.loads(files[2])["conversations"][0]["messages"]]
        assert roles == ["user", "assistant"] and len(json.loads(files[4])["conversations"]) == 2


async def test_two_tabs_lose_nothing() -> None:
    engine = FakeEngine(lambda prompt, sampling: written("hello world, and more of it", sampling, 0.2))
    async with (
        served(engine, max_model_len=2048) as url,
        browser_tab() as tab,
        another_tab(tab) as other,
    ):
        await tab.open(f"{url}/")
        await ask(tab, "one")
        await other.open(f"{url}/")
        await other.evaluate(f"document.querySelector('{TITLES}').click()")
        # What one tab adds shows in the other, and a message being written stays.
        await other.evaluate("document.getElementById('prompt').value = 'a draft'")
        await ask(tab, "two")
        await other.until("document.querySelectorAll('.asked').length === 2")
        assert await other.evaluate("document.getElementById('prompt').value") == "a draft"
        # Both ask at once: each keeps its own.
        await begin(tab, "here")
        await begin(other, "there")
        await tab.until(IDLE)
        await other.until(IDLE)
        await tab.open(f"{url}/")
        asked = []
        for number in range(len(await texts(tab, TITLES))):
            await tab.evaluate(f"document.querySelectorAll('{TITLES}')[{number}].click()")
            asked += [(await texts(tab, ".asked"), len(await texts(tab, ".text > .markdown:not(:empty)")))]
        kept = {" ".join(questions): answers for questions, answers in asked}
        assert kept.get("one two here") == 3 and any("there" in questions for questions in kept), kept
        assert not tab.messages and not other.messages


async def test_a_closed_tab_keeps_the_question_and_what_was_answered() -> None:
    engine = FakeEngine(lambda prompt, sampling: written("hello world " * 50, sampling, 0.2))
    async with served(engine, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await begin(tab, "hi")
        await tab.until(f"{ANSWER}?.textContent.includes('world')")
        await tab.open(f"{url}/")
        await tab.evaluate(f"document.querySelector('{TITLES}').click()")
        assert await texts(tab, ".asked") == ["hi"]
        assert "world" in await tab.evaluate(f"{ANSWER}.textContent")
        assert await texts(tab, ".offered") == ["Go on", "Regenerate"]


async def test_a_server_that_goes_is_said_and_its_return_too() -> None:
    engine = FakeEngine(lambda prompt, sampling: [*list(written("hello world", sampling))[:1], 60.0])
    async with browser_tab() as tab:
        async with served(engine, max_model_len=2048) as url:
            port = int(url.rpartition(":")[2])
            await tab.open(f"{url}/")
            await begin(tab, "hi")
            await tab.until(f"{ANSWER}?.textContent.includes('hello')")
            engine.script = lambda prompt, sampling: written("back", sampling)
        await tab.until("document.getElementById('state').textContent === 'gone'")
        assert (await texts(tab, "#gone"))[0].startswith("The server has not answered since")
        await tab.until("document.querySelector('.ending').textContent.includes('broke off')")
        assert "hello" in await tab.evaluate(f"{ANSWER}.textContent")
        await tab.evaluate("document.getElementById('prompt').value = 'a message'")
        await tab.key("Enter")
        assert await tab.evaluate("document.getElementById('prompt').value") == "a message"
        async with served(engine, max_model_len=1024, port=port, served_model_name="other/model"):
            await tab.until("document.getElementById('gone').hidden")
            await tab.until("document.getElementById('model').textContent === 'other/model'")
            assert "The server is back." in (await texts(tab, "#toast"))[0]
            await press(tab, "Regenerate" if "Regenerate" in await texts(tab, ".offered") else "Try again")
            await tab.until(f"{ANSWER}?.textContent === 'back'")
            assert await tab.evaluate("document.getElementById('prompt').value") == "a message"
