"""A picture of the page of a server that runs, for `docs/`: of five races, the one with the median factor.

python -m tests.e2e.screenshots.page http://127.0.0.1:8000 docs/page.png
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.support.clients.browser import Tab, browser_tab
from tests.support.clients.chat_page import ask, press, set_field, texts

PROMPT = "Ann has 3 bags with 5 apples each. She gives 4 apples to Tom. How many apples does she have left?"
NUM_RACES = 5
_FACTOR = ".factor strong"


async def take(url: str, file: Path) -> None:
    pictures: list[tuple[float, bytes]] = []
    async with browser_tab(1280, 640) as tab:
        await tab.open(f"{url}/")
        await tab.until("document.getElementById('model')?.textContent")
        await set_field(tab, "theme", "light")
        await set_field(tab, "temperature", "0")
        await ask(tab, "Hello!", timeout_s=120)
        await tab.evaluate("document.getElementById('new').click()")
        await ask(tab, PROMPT, race=True, timeout_s=120)  # may wait for graphs and compilation
        for _ in range(NUM_RACES):
            await press(tab, "Race", within=".turn")
            await tab.until(f"document.querySelector('{_FACTOR}') === null")
            await tab.until(f"document.querySelector('{_FACTOR}') !== null", timeout_s=120)
            await tab.evaluate("document.getElementById('toast').hidden = true")
            await asyncio.sleep(2.5)  # the engines' figures come every two seconds
            pictures.append((float((await texts(tab, _FACTOR))[0].removesuffix("×")), await _picture(tab)))
        assert not tab.messages, tab.messages
    pictures.sort()
    print("factors:", *(factor for factor, _ in pictures))
    file.write_bytes(pictures[NUM_RACES // 2][1])


async def _picture(tab: Tab) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        await tab.screenshot(Path(file.name))
        return Path(file.name).read_bytes()


if __name__ == "__main__":
    asyncio.run(take(sys.argv[1].rstrip("/"), Path(sys.argv[2])))
