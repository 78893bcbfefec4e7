"""Plain streams as a process of its own, whose stamps tell when tokens came and not when a busy client read them.

    python -m tests.load.hostile.plain_streams http://127.0.0.1:8000 target

One answer to each prompt, all at once; then a line of JSON (`Plain`); then the same again and again until a line comes
on stdin, and another line of JSON. The attacks of this folder run it in another process: in theirs, one garbage
collection with hypothesis and torch took 0.2 s of a core, and 1.3 s on a busy machine.
"""

import asyncio
import contextlib
import gc
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import httpx
import msgspec

from tests.load.cpu_lent import OwnWait
from tests.load.hostile.priority import STREAMS_NICENESS, outweigh
from tests.support import ROOT

PLAIN_TOKENS = 400
ANSWER_LIMIT_S = 180.0
PROMPTS = ("Count", "Once upon a time", "The weather", "A list of")
MIN_EVENTS = 12  # of an answer whose gaps count
_LINE_BYTES = 1 << 26  # of what the process says


class Plain(msgspec.Struct):
    """stamps: of the events of each answer, by the monotonic clock. waited_ms: at each stamp, how long this client has
    waited for a core so far. texts: by prompt, of its first answer. faults: what must not be."""

    stamps: list[list[float]] = []
    waited_ms: list[list[float]] = []
    texts: dict[str, str] = {}
    faults: list[str] = []

    def gaps_ms(self) -> list[list[float]]:
        """Between the events of each answer, without the wait for its first token."""
        return [[1000 * (later - earlier) for earlier, later in itertools.pairwise(each)] for each in self.stamps]


class _Streams:
    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model
        self._texts: dict[str, str] = {}
        self._own_wait = OwnWait()

    async def once(self) -> Plain:
        """All prompts at once."""
        found = Plain(texts=self._texts)
        await asyncio.gather(*(self._answer(prompt, found) for prompt in PROMPTS))
        return found

    async def until(self, ended: asyncio.Event) -> Plain:
        """The same, each prompt again as soon as it has been answered."""
        found = Plain(texts=self._texts)

        async def again(prompt: str) -> None:
            while not ended.is_set() and not found.faults:
                await self._answer(prompt, found)

        await asyncio.gather(*map(again, PROMPTS))
        return found

    async def _answer(self, prompt: str, found: Plain) -> None:
        body = {"prompt": prompt, "max_tokens": PLAIN_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        body["return_token_ids"] = True  # an event for tokens that end no character, too
        stamps, waited_ms, text = list[float](), list[float](), ""
        try:
            async with self._client.stream("POST", "/v1/completions", json={"model": self._model} | body) as answer:
                if answer.status_code != 200:
                    found.faults.append(f"a plain request got {answer.status_code}")
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        stamps.append(time.monotonic())
                        waited_ms.append(self._own_wait.ms())
                        event = msgspec.json.decode(line[6:])
                        if "error" in event:
                            found.faults.append(f"a plain stream ended with {event['error']}")
                            return
                        text += "".join(choice["text"] for choice in event["choices"])
        except httpx.HTTPError as error:
            found.faults.append(f"a plain stream ended with {type(error).__name__}: {error}")
            return
        if self._texts.setdefault(prompt, text) != text:
            found.faults.append(f"the plain text after {prompt!r} changed")
        if len(stamps) >= MIN_EVENTS:
            found.stamps.append(stamps)
            found.waited_ms.append(waited_ms)


async def _run(url: str, model: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_LIMIT_S) as client:
        streams = _Streams(client, model)
        _print(await streams.once())
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.remove_reader(sys.stdin.fileno())  # which is readable for ever: the loop would take a core
            ended.set()

        loop.add_reader(sys.stdin.fileno(), end)
        _print(await streams.until(ended))


@contextlib.asynccontextmanager
async def plain_streams(url: str, model: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Plain]]:
    """The process, and what it said of the answers alone; ends with the context."""
    program = [sys.executable, "-m", "tests.load.hostile.plain_streams", url, model]
    process = await asyncio.create_subprocess_exec(
        *program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=_LINE_BYTES, start_new_session=True
    )
    try:
        yield process, await _said(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process) -> Plain:
    """End the streams; what they saw beside other requests."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    return await _said(process)


async def _said(process: asyncio.subprocess.Process) -> Plain:
    assert process.stdout is not None
    return msgspec.json.decode(await process.stdout.readline(), type=Plain)


def _print(found: Plain) -> None:
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    gc.disable()  # a minute's garbage is little
    outweigh("self", STREAMS_NICENESS)  # clients do not share the server's cores
    asyncio.run(_run(*sys.argv[1:3]))
