"""Markdown, formulas and code of answers in headless Chromium: `make test-slow ROOM=tests/cluster/http/page`."""

import json

import pytest

from tests.support.clients.browser import CHROMIUM, browser_tab
from tests.support.clients.chat_page import ANSWER, ask, engine_with_drafts, written
from tests.support.edge_client import served
from tests.support.fake_engine import FakeEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)"),
]

MARKDOWN = r"""# Head

One *two* **three** `four & <five>` [six](https://example.org/a) [seven](javascript:alert(1)) ![eight](https://example.org/b.png)

<script>window.hurt = true</script><img src=x onerror="window.hurt = true">

- a
- b
  1. c

```python
print("<b>")  # "</code><img src=x onerror='window.hurt = true'>"
```

```unknown
<b>
```

| x | y |
| - | -:|
| 1 | &lt; |

So \(x_1 < x_2\), $\href{javascript:window.hurt=1}{y}$ and $\undefined{$ cost $5 or $6:

\[
\sqrt{\frac{a^2}{b}} \cdot \widehat{abc} \cdot \underbrace{x + y}_{2}
\]
"""


async def test_texts_are_shown_and_nothing_of_an_answer_is_run_or_loaded() -> None:
    engine = FakeEngine(lambda prompt, sampling: written(MARKDOWN, sampling))
    async with served(engine, max_model_len=4096) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await ask(tab, "hi")
        assert await tab.evaluate(f"{ANSWER}.querySelector('h3').textContent") == "Head"
        code = 'print("<b>")  # "</code><img src=x onerror=\'window.hurt = true\'>"'
        await tab.until(f"{ANSWER}.querySelector('.hljs-string') !== null")
        assert await tab.evaluate(f"{ANSWER}.querySelector('.code pre').textContent") == code
        assert await tab.evaluate(f"{ANSWER}.querySelector('.hljs-string').textContent") == '"<b>"'
        assert await tab.evaluate(f"{ANSWER}.querySelectorAll('.code')[1].querySelector('pre').textContent") == "<b>"
        assert await tab.evaluate(f"{ANSWER}.querySelector('p > code').textContent") == "four & <five>"
        links = await tab.evaluate(f"Array.from({ANSWER}.querySelectorAll('a'), (a) => a.textContent + a.href)")
        assert links == ["sixhttps://example.org/a", "eighthttps://example.org/b.png"]
        assert await tab.evaluate(f"{ANSWER}.querySelectorAll('img, script').length") == 0
        assert "<script>" in await tab.evaluate(f"{ANSWER}.textContent")
        assert await tab.evaluate(f"{ANSWER}.querySelector('ul ol li').textContent") == "c"
        assert await tab.evaluate(f"{ANSWER}.querySelector('td.align-right').textContent") == "<"
        # Formulas, in KaTeX's own fonts; what is none stays as it was written.
        await tab.until(f"{ANSWER}.querySelectorAll('.katex').length >= 2")
        assert await tab.evaluate(f"{ANSWER}.querySelectorAll('.katex-display').length") == 1
        assert await tab.evaluate(f"{ANSWER}.querySelectorAll('annotation')[0].textContent") == "x_1 < x_2"
        assert "$5 or $6:" in await tab.evaluate(f"{ANSWER}.textContent")
        loaded = "Array.from(document.fonts).filter((font) => font.status === 'loaded').map((font) => font.family)"
        assert "KaTeX_Main" in await tab.until(f"document.fonts.ready.then(() => {loaded})")
        assert await tab.evaluate("window.hurt === undefined")
        # No style or script was refused, and nothing came from elsewhere.
        assert not tab.messages, tab.messages
        hosts = "performance.getEntriesByType('resource').every((entry) => entry.name.startsWith(location.origin))"
        assert await tab.evaluate(hosts)


async def test_texts_that_grow_end_as_when_they_are_shown_at_once() -> None:
    async with served(engine_with_drafts(), max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        script = """import("/page/markdown.js").then(async ({ MarkdownView }) => {
            const [grown, whole, text] = [new MarkdownView(), new MarkdownView(), TEXT];
            for (let end = 0; end <= text.length; end++) grown.show(text.slice(0, end));
            whole.show(text);
            while (!whole.node.querySelector(".katex-display, .hljs-string")) await new Promise(requestAnimationFrame);
            await new Promise((resolve) => setTimeout(resolve, 500));
            return [grown.node.outerHTML, whole.node.outerHTML];
        })"""
        grown, whole = await tab.evaluate(script.replace("TEXT", json.dumps(MARKDOWN)))
        assert grown == whole and "katex" in whole and "hljs-string" in whole


async def test_libraries_are_loaded_when_they_are_needed() -> None:
    async with served(engine_with_drafts(), max_model_len=2048) as url, browser_tab() as tab:
        await tab.open(f"{url}/")
        await ask(tab, "hi")
        names = "performance.getEntriesByType('resource').map((entry) => entry.name).join(' ')"
        loaded = await tab.evaluate(names)
        assert "marked" in loaded and "katex" not in loaded and "highlight" not in loaded
