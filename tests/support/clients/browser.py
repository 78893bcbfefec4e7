"""A headless Chromium, driven by its own protocol (DevTools) over a WebSocket: what tests of the page need of one."""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

START_LIMIT_S = 60.0
LOAD_LIMIT_S = 30.0
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Tab:
    """One page. messages: what it wrote to its console, and errors of its scripts.

    address: of its protocol's WebSocket.
    """

    def __init__(self, socket: ClientConnection, address: str) -> None:
        self._socket = socket
        self.address = address
        self._numbers = itertools.count(1)
        self.messages: list[str] = []

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(await self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._noted(message)

    def _noted(self, event: dict[str, Any]) -> str | None:
        """The event's name; what it says is kept if a console would show it."""
        if event.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.messages.append(json.dumps(event["params"]))
        return event.get("method")

    async def open(self, url: str) -> None:
        """Navigate and return once the new document has loaded, so that nothing is read from the former one."""
        await self.command("Page.navigate", url=url)  # answered when the new document is there, before it has loaded
        async with asyncio.timeout(LOAD_LIMIT_S):
            while self._noted(json.loads(await self._socket.recv())) != "Page.loadEventFired":
                pass

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, a promise's included."""
        result = await self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> Any:
        """The value of an expression, once it is true."""
        end_s = time.monotonic() + timeout_s
        while not (value := await self.evaluate(expression)):
            if time.monotonic() > end_s:
                text = await self.evaluate("document.body?.innerText")
                raise TimeoutError(f"not within {timeout_s:g} s: {expression}\nthe page: {text}\n{self.messages}")
            await asyncio.sleep(0.05)
        return value

    async def key(self, name: str, modifiers: int = 0) -> None:
        """Press and release a key: "Enter", "Escape", "Tab". modifiers: 2 for Ctrl, 8 for Shift."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[name]
        text = {"text": "\r"} if name == "Enter" else {}
        key = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.command("Input.dispatchKeyEvent", type="keyDown", **key, **text)
        await self.command("Input.dispatchKeyEvent", type="keyUp", **key)

    async def screenshot(self, path: Path) -> None:
        shot = await self.command("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browser_tab(width: int = 1280, height: int = 800) -> AsyncIterator[Tab]:
    """A fresh Chromium with one empty page; `CHROMIUM` must not be None."""
    assert CHROMIUM is not None
    folder = Path(tempfile.mkdtemp(prefix="browser-"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    places = [f"--user-data-dir={folder}", "--remote-debugging-port=0", f"--window-size={width},{height}"]
    process = subprocess.Popen(
        [CHROMIUM, *options, *places, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(START_LIMIT_S):
            address = await _page_address(folder / "DevToolsActivePort")
        async with _connected(address) as tab:
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            await tab.command("Emulation.setDeviceMetricsOverride", **metrics)
            yield tab
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def another_tab(tab: Tab) -> AsyncIterator[Tab]:
    """A second page of the same browser, with the same storage."""
    made = await tab.command("Target.createTarget", url="about:blank", background=True)
    async with _connected(f"{tab.address.rpartition('/')[0]}/{made['targetId']}") as second:
        yield second


@contextlib.asynccontextmanager
async def _connected(address: str) -> AsyncIterator[Tab]:
    async with connect(address, max_size=None) as socket:
        tab = Tab(socket, address)
        for domain in ("Page", "Runtime", "Log"):
            await tab.command(f"{domain}.enable")
        yield tab


async def _page_address(port_file: Path) -> str:
    while not (port_file.exists() and port_file.read_text().strip()):
        await asyncio.sleep(0.05)
    port = port_file.read_text().split()[0]
    async with httpx.AsyncClient() as client:
        while True:
            targets = (await client.get(f"http://127.0.0.1:{port}/json/list")).json()
            pages = [target for target in targets if target["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
