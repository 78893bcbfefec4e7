"""The page at `/`: its files, its calculations in Node, and itself in headless Chromium over a scripted engine."""

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.http.page.files import PAGE_ROUTES
from cluster.transport.messages import EngineStats, SpeculationStats, TokenDelta
from tests.support import ROOT
from tests.support.clients.browser import CHROMIUM, Tab, browser_tab
from tests.support.edge_client import CHAT, HELLO, in_process, served
from tests.support.fake_engine import EOS, FakeEngine, Step, says, small_tokenizer
from workers.scheduling.plan import SamplingParams
from workers.scheduling.stats import SchedulerStats

PAGE = ROOT / "cluster" / "http" / "page"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)")
KEY = "sesame-open"


async def test_files_are_open_and_hold_browsers_to_a_strict_policy() -> None:
    async with in_process(FakeEngine(says("x")), api_keys=(KEY,)) as client:
        assert (await client.post(CHAT, json=HELLO)).status_code == 401
        for path in PAGE_ROUTES:
            reply = await client.get(path)
            assert reply.status_code == 200, path
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await client.get("/page/page.js")).headers["content-type"] == "text/javascript; charset=utf-8"
        assert (await client.get("/page/files.py")).status_code == 401


def test_every_file_is_served_and_nothing_comes_from_elsewhere() -> None:
    files = {str(path.relative_to(PAGE)) for path in PAGE.rglob("*") if path.suffix in (".html", ".css", ".js", ".svg")}
    assert files == {path.removeprefix("/page/") for path in PAGE_ROUTES if path != "/"} | {"page.html"}
    assert "MarkedJS. (MIT License)" in (PAGE / "vendor/marked.js").read_text()
    for name in files - {"vendor/marked.js"}:
        text = (PAGE / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text and "innerHTML" not in text, name


FIGURES = r"""
import assert from "node:assert/strict";
import { acceptanceLength, eventsOf, metric, parseMetrics, perPosition, Rounds } from "./figures.mjs";

const rounds = new Rounds(); // the prompt's token; rounds that accept 2, 0 and 1; one that a stop cut after a draft
for (const drafted of [0, 1, 1, 0, 0, 1, 0, 1]) rounds.push(Boolean(drafted));
assert.deepEqual([rounds.numTokens, rounds.numDrafted], [8, 4]);
assert.deepEqual(Array.from(rounds.histogram), [1, 1, 1]);
assert.equal(acceptanceLength([1, 1, 1]), 2);
assert.equal(acceptanceLength([]), null);
assert.deepEqual(perPosition([1, 0, 3]), [0.75, 0.75]);
assert.deepEqual(perPosition([2, , 2]), [0.5, 0.5]);

const lines = ["# HELP a b", 'a_total{model_name="x, \\"y\\"",position="0"} 3.0', 'a_total{position="1"} 4', "b 1e3"];
const samples = parseMetrics(lines.join("\n"));
assert.deepEqual(samples.map((sample) => sample.value), [3, 4, 1000]);
assert.equal(metric(samples, "a_total"), 7);
assert.equal(metric(samples, "a_total", { position: "1" }), 4);
assert.equal(metric(samples, "c"), null);

const whole = 'data: {"a":1}\n\ndata: {"b":"x"}\n\ndata: [DONE]\n\n';
for (let size = 1; size <= whole.length; size++) {
  const pieces = [];
  for (let at = 0; at < whole.length; at += size) pieces.push(whole.slice(at, at + size));
  const found = [];
  for await (const event of eventsOf(pieces)) found.push(event);
  assert.deepEqual(found, ['{"a":1}', '{"b":"x"}', "[DONE]"]);
}
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node")
def test_calculations(tmp_path: Path) -> None:
    shutil.copy(PAGE / "figures.js", tmp_path / "figures.mjs")
    (tmp_path / "test.mjs").write_text(FIGURES)
    done = subprocess.run(["node", "test.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def _script(prompt: list[int], sampling: SamplingParams) -> Iterable[Step]:
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
        yield 0.02
    yield TokenDelta("", (eos,), "stop", drafted=(False,))


def _engine() -> FakeEngine:
    stats = SchedulerStats(accepted_histogram=[1, 0, 1], accepted_by_branch={"dspark": 1, "suffix": 1})
    ranks = {"heartbeat_age_s": (0.2, 0.3), "rank_steps": (7, 7), "rank_step_s": (1.0, 1.0)}
    return FakeEngine(_script, engines=[EngineStats("engine-0", "ready", scheduler=stats, num_running=3, **ranks)])


async def _ask(tab: Tab, prompt: str, mode: str) -> None:
    await tab.until("document.getElementById('send') && !document.getElementById('send').disabled")
    before = await tab.evaluate("document.querySelectorAll('.answer').length")
    await tab.evaluate(f"document.getElementById('mode').value = {json.dumps(mode)}")
    await tab.evaluate(f"document.getElementById('prompt').value = {json.dumps(prompt)}")
    await tab.evaluate("document.getElementById('send').click()")
    await tab.until(f"document.querySelectorAll('.answer').length > {before}")
    await tab.until("!document.getElementById('send').disabled")


def _tokens(number: int) -> str:
    """JavaScript: text and class of each token of an answer."""
    spans = f"document.querySelectorAll('.answer')[{number}].querySelectorAll('.token')"
    return f"Array.from({spans}, (span) => [span.textContent, span.className])"


@needs_browser
async def test_page_shows_tokens_by_origin_side_by_side_and_the_engines() -> None:
    engine = _engine()
    async with served(engine, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await _ask(tab, "hi", "both")
        on: list[list[str]] = await tab.evaluate(_tokens(0))
        assert on[:4] == [
            ["hello", "token target"],
            [" world", "token drafted"],
            ["<", "token drafted"],
            ["b", "token target"],
        ]
        assert "".join(text for text, _ in on) == "hello world<b>"
        assert {kind for _, kind in await tab.evaluate(_tokens(1))} == {"token target"}
        figures = await tab.evaluate("Array.from(document.querySelectorAll('.figures'), (node) => node.textContent)")
        assert "2.00 tokens a round" in figures[0] and "accepted by position: 50 %, 50 %" in figures[0]
        assert "round" not in figures[1] and "tokens/s" in figures[1]
        same = await tab.evaluate("document.querySelector('.same').textContent")
        assert same.startswith("Both answers are the same.")
        # The history goes with the next turn.
        await _ask(tab, "again", "off")
        assert [call.sampling.speculative for call in engine.calls] == [True, False, False]
        asked = small_tokenizer().decode(engine.calls[-1].prompt, skip_special_tokens=False)
        assert "hi<|im_end|>" in asked and "hello world<b><|im_end|>" in asked and "again<|im_end|>" in asked
        # Engines, ranks and positions come from /health and /metrics.
        await tab.until("document.getElementById('engines').textContent.includes('engine-0: ready, 3 running')")
        assert await tab.evaluate("document.querySelectorAll('.engine tr').length") == 3
        assert await tab.evaluate("document.querySelectorAll('#positions .bar').length") == 2
        # Nothing was accepted since the page opened; then eight drafts in four rounds.
        branches = "document.getElementById('branches').textContent"
        assert await tab.evaluate(branches) == "dspark–suffix–"
        later = SchedulerStats(accepted_histogram=[2, 1, 1, 2], accepted_by_branch={"dspark": 4, "suffix": 5})
        engine.engines = [msgspec.structs.replace(engine.engines[0], scheduler=later)]
        await tab.until(f"{branches} === 'dspark0.75suffix1.00'")
        assert await tab.evaluate("document.getElementById('state').textContent") == "ready"
        assert not tab.messages, tab.messages


@needs_browser
async def test_key_is_asked_for_once_and_kept_for_the_tab() -> None:
    async with served(_engine(), max_model_len=2048, api_keys=(KEY,)) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await tab.until("document.getElementById('key-dialog')?.open")
        for key in ("wrong", KEY):
            await tab.until("document.getElementById('key-dialog').open")
            await tab.evaluate(f"document.getElementById('key').value = {json.dumps(key)}")
            await tab.evaluate("document.getElementById('key-form').requestSubmit()")
        await tab.until("document.getElementById('model').textContent !== ''")
        assert await tab.evaluate("sessionStorage.getItem('aerie-api-key')") == KEY
        await _ask(tab, "hi", "on")
        await tab.open(f"{url}/")
        await tab.until("document.getElementById('model').textContent !== ''")
        assert not await tab.evaluate("document.getElementById('key-dialog').open")


@needs_browser
async def test_failures_and_stops_are_shown_and_leave_the_history() -> None:
    failing = [TokenDelta("", (64,), drafted=(False,)), TokenDelta("", (), "error", error="rank 1 died")]
    scripts: list[Any] = [failing, [TokenDelta("", (64,), drafted=(False,)), 60.0]]
    engine = FakeEngine(lambda prompt, sampling: scripts.pop(0))
    async with served(engine, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await _ask(tab, "one", "on")
        assert "The engine failed" in await tab.evaluate("document.querySelector('.failed').textContent")
        await tab.evaluate("document.getElementById('prompt').value = 'two'")
        await tab.evaluate("document.getElementById('send').click()")
        await tab.until("document.querySelectorAll('.answer .token').length == 2")
        await tab.evaluate("document.getElementById('stop').click()")
        await tab.until("!document.getElementById('send').disabled")
        assert "(stopped)" in await tab.evaluate("document.querySelectorAll('.answer')[1].textContent")
    assert len(engine.closed) == 1 or engine.num_active == 0
    assert "one" not in small_tokenizer().decode(engine.calls[1].prompt)


MARKDOWN = """# Head

One *two* **three** `four & <five>` [six](https://example.org/a) [seven](javascript:alert(1)) ![eight](https://example.org/b.png)

<script>window.hurt = true</script><img src=x onerror="window.hurt = true">

- a
- b
  1. c

```python
print("<b>")
```

| x | y |
| - | -:|
| 1 | &lt; |
"""


def _written(text: str) -> Iterable[Step]:
    """`text` a few bytes at a time, each with its origin."""
    tokens = small_tokenizer().encode(text, add_special_tokens=False).ids
    for at in range(0, len(tokens), 7):
        piece = tuple(tokens[at : at + 7])
        yield TokenDelta("", piece, drafted=(False,) * len(piece))
    yield TokenDelta("", (small_tokenizer().token_to_id(EOS),), "stop", drafted=(False,))


@needs_browser
async def test_markdown_is_shown_and_nothing_of_an_answer_is_run_or_loaded() -> None:
    engine = FakeEngine(lambda prompt, sampling: _written(MARKDOWN))
    async with served(engine, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await tab.evaluate("document.getElementById('max-tokens').value = '1024'")
        await _ask(tab, "hi", "on")
        shown = "document.querySelector('.text > .markdown')"
        assert await tab.evaluate(f"{shown}.querySelector('h3').textContent") == "Head"
        assert await tab.evaluate(f"{shown}.querySelector('.code pre').textContent") == 'print("<b>")'
        assert await tab.evaluate(f"{shown}.querySelector('p > code').textContent") == "four & <five>"
        links = await tab.evaluate(f"Array.from({shown}.querySelectorAll('a'), (a) => a.textContent + a.href)")
        assert links == ["sixhttps://example.org/a", "eighthttps://example.org/b.png"]
        assert await tab.evaluate(f"{shown}.querySelectorAll('img, script').length") == 0
        assert "<script>" in await tab.evaluate(f"{shown}.textContent")
        assert await tab.evaluate(f"{shown}.querySelector('ul ol li').textContent") == "c"
        assert await tab.evaluate(f"{shown}.querySelector('td.align-right').textContent") == "<"
        assert await tab.evaluate("window.hurt === undefined")
        assert not tab.messages, tab.messages


@needs_browser
async def test_markdown_that_grows_ends_as_when_it_is_shown_at_once() -> None:
    async with served(_engine(), max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        script = """import("/page/markdown.js").then(({ MarkdownView }) => {
            const [grown, whole, text] = [new MarkdownView(), new MarkdownView(), TEXT];
            for (let end = 0; end <= text.length; end++) grown.show(text.slice(0, end));
            whole.show(text);
            return [grown.node.outerHTML, whole.node.outerHTML];
        })"""
        grown, whole = await tab.evaluate(script.replace("TEXT", json.dumps(MARKDOWN)))
        assert grown == whole


@needs_browser
async def test_settings_and_conversations_are_kept_in_the_browser() -> None:
    engine = _engine()
    async with served(engine, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        for field, value in {"system": "be brief", "top-p": "0.5", "seed": "7", "theme": "dark"}.items():
            await tab.evaluate(f"document.getElementById('{field}').value = {json.dumps(value)}")
            await tab.evaluate(f"document.getElementById('{field}').dispatchEvent(new Event('change'))")
        assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(28, 25, 23)"
        await _ask(tab, "hi", "on")
        await tab.open(f"{url}/")
        assert await tab.evaluate("document.getElementById('system').value") == "be brief"
        assert await tab.evaluate("document.documentElement.dataset.theme") == "dark"
        await tab.evaluate("document.querySelector('#conversations .open').click()")
        assert await tab.evaluate("document.querySelector('.text > .markdown').textContent") == "hello world<b>"
        await _ask(tab, "again", "on")
        first, second = engine.calls
        assert (second.sampling.top_p, second.sampling.seed) == (0.5, 7)
        asked = small_tokenizer().decode(second.prompt, skip_special_tokens=False)
        assert asked.startswith("<|im_start|>system\nbe brief<|im_end|>") and "hello world<b>" in asked
        # "Regenerate" asks the last question once more, after what came before it.
        await tab.evaluate("document.querySelector('.regenerate').click()")
        await tab.until("!document.getElementById('send').disabled")
        assert engine.calls[2].prompt == second.prompt
        assert await tab.evaluate("document.querySelectorAll('.turn').length") == 2
        await tab.evaluate("document.querySelector('#conversations [aria-label]').click()")
        assert await tab.evaluate("document.querySelectorAll('.turn, #conversations li').length") == 0
        assert not tab.messages, tab.messages


@needs_browser
async def test_reasoning_is_folded_and_kept_out_of_the_history() -> None:
    engine = FakeEngine(lambda prompt, sampling: _written("<think>hidden</think>shown"))
    async with served(engine, max_model_len=2048, output_parser="think") as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await _ask(tab, "hi", "on")
        assert await tab.evaluate("document.querySelector('.reasoning .markdown').textContent") == "hidden"
        assert not await tab.evaluate("document.querySelector('.reasoning').open")
        assert await tab.evaluate("document.querySelector('.text > .markdown').textContent") == "shown"
        await _ask(tab, "again", "on")
        assert "hidden" not in small_tokenizer().decode(engine.calls[1].prompt, skip_special_tokens=False)


@needs_browser
async def test_keyboard_alone_asks_and_stops() -> None:
    engine = FakeEngine(lambda prompt, sampling: [TokenDelta("", (64,), drafted=(False,)), 60.0])
    async with served(engine, max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await tab.until("!document.getElementById('send').disabled")
        assert await tab.evaluate("document.activeElement.id") == "prompt"
        await tab.command("Input.insertText", text="hi")
        await tab.key("Enter")
        await tab.until("document.querySelectorAll('.answer .token').length == 1")
        await tab.key("Escape")
        await tab.until("document.querySelector('.failed')?.textContent === '(stopped)'")


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
async def test_nothing_is_wider_than_the_window(width: int) -> None:
    wide = "```\n" + "x" * 500 + "\n```\n" + "y" * 500 + "\n\n| " + "z | " * 60 + "\n|" + "-|" * 60 + "\n"
    engine = FakeEngine(lambda prompt, sampling: _written(wide))
    async with served(engine, max_model_len=4096) as url, browser_tab(width) as tab:
        await tab.open(f"{url}/")
        await tab.evaluate("document.getElementById('max-tokens').value = '2048'")
        await _ask(tab, "w" * 300, "both")
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        send = "document.getElementById('send').getBoundingClientRect()"
        assert await tab.evaluate(f"{send}.right <= innerWidth && {send}.bottom <= innerHeight")
        side = "document.getElementById('side').getBoundingClientRect().width"
        assert (await tab.evaluate(f"{side} > 0")) == (width == 1280)
        await tab.evaluate("document.getElementById('menu').click()")
        assert await tab.evaluate(f"{side} > 0 && {side} < innerWidth")
