"""A picture of the page of a server that runs, after a question and a race, for `docs/`:

python -m tests.e2e.screenshots.page http://127.0.0.1:8000 docs/page.png
"""

import asyncio
import sys
from pathlib import Path

from tests.support.clients.browser import browser_tab
from tests.support.clients.chat_page import ask, press, set_field

PROMPT = "Ann has 3 bags with 5 apples each. She gives 4 apples to Tom. How many apples does she have left?"


async def take(url: str, file: Path) -> None:
    async with browser_tab(1280, 640) as tab:
        await tab.open(f"{url}/")
        await tab.until("document.getElementById('model')?.textContent")
        await set_field(tab, "theme", "light")
        await set_field(tab, "temperature", "0")
        await ask(tab, "Hello!", timeout_s=120)
        await tab.evaluate("document.getElementById('new').click()")
        await ask(tab, PROMPT, race=True, timeout_s=120)
        await press(tab, "Race", within=".turn")  # the first one may wait for graphs and compilation
        await tab.until("document.querySelector('.factor strong') === null")
        await tab.until("document.querySelector('.factor strong') !== null", timeout_s=120)
        await tab.evaluate("document.getElementById('toast').hidden = true")
        await asyncio.sleep(2.5)  # the engines' figures come every two seconds
        assert not tab.messages, tab.messages
        await tab.screenshot(file)


if __name__ == "__main__":
    asyncio.run(take(sys.argv[1].rstrip("/"), Path(sys.argv[2])))
