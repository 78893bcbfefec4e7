"""A picture of the page of a server that runs, after one turn with speculation on and off, for `docs/`:

python -m tests.e2e.screenshots.page http://127.0.0.1:8000 docs/page.png
"""

import asyncio
import json
import sys
from pathlib import Path

from tests.support.clients.browser import browser_tab

PROMPT = "Ann has 3 bags with 5 apples each. She gives 4 apples to Tom. How many apples does she have left?"


async def take(url: str, file: Path) -> None:
    async with browser_tab(1280, 640) as tab:
        await tab.open(f"{url}/")
        await tab.until("document.getElementById('model')?.textContent")
        await tab.evaluate("document.getElementById('mode').value = 'turns'")
        await tab.evaluate(f"document.getElementById('prompt').value = {json.dumps(PROMPT)}")
        await tab.evaluate("document.getElementById('send').click()")
        await tab.until("document.querySelector('.same') !== null", timeout_s=120)
        await asyncio.sleep(2.5)  # the engines' figures come every two seconds
        assert not tab.messages, tab.messages
        await tab.screenshot(file)


if __name__ == "__main__":
    asyncio.run(take(sys.argv[1].rstrip("/"), Path(sys.argv[2])))
