"""A client that leaves, or a request that the server cancels, at every pass of the event loop: each stream that was
begun on an engine is closed, which aborts the request there, and nothing stays behind."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Scope

from aerie.cluster.http.app import build_app
from aerie.cluster.ingress.attempts import EngineFailed, RequestStream
from aerie.cluster.ingress.remote_engines import RemoteEngines
from aerie.cluster.ingress.routing import Prompt
from aerie.cluster.transport.messages import EngineStats, FlushOutcome, GenerateRequest, Probe, TokenDelta
from aerie.workers.scheduling.plan import unpack_i32
from tests.cluster.http.parsers.test_thinking_budget import THINKS, thinker
from tests.cluster.http.parsers.test_tools import tool_tokenizer
from tests.support.edge_client import CHAT, edge_config

Steps = list[TokenDelta | EngineFailed]
CASES: dict[str, tuple[dict[str, Any], bool]] = {  # a request's fields, and whether its first engine fails
    "one choice": ({}, False),
    "three choices": ({"n": 3, "temperature": 1.0}, False),
    "a stop string": ({"stop": ["s it"]}, False),
    "thinking budget": ({"thinking_token_budget": 2}, False),
    "resumed": ({}, True),
    "three resumed": ({"n": 3, "temperature": 1.0}, True),
    "scores of the prompt": ({"prompt_logprobs": 0}, False),
}
QUICK = ("one choice", "thinking budget", "resumed")
SOME, ALL = ("leaves, token", "cancelled, token"), ("leaves", "cancelled", "both", "twice")
LATE_PASSES = 200  # of the loop, within which all must have ended


class Engines:
    """Implements `remote_engines.Engines` and `EngineCalls`. Each pass of the loop gives every stream one delta.

    opened: streams that were begun. closed: those that their reader closed.
    """

    def __init__(self, is_failing: bool) -> None:
        self.is_failing = is_failing
        self.reset()

    def reset(self) -> None:
        self.opened: list[tuple[RequestStream, Steps]] = []
        self.closed: list[RequestStream] = []

    async def choose(self, prompt: Prompt, avoid: frozenset[str], wait_s: float) -> str | None:
        await asyncio.sleep(0)
        return next((name for name in ("a", "b") if name not in avoid), None)

    def start(self, name: str, message: GenerateRequest | Probe, prompt: Prompt) -> RequestStream:
        stream = RequestStream(self.closed.append)
        steps: Steps = [TokenDelta(message.request_id, (), "stop")]
        if isinstance(message, GenerateRequest):
            tokens = [*unpack_i32(message.prompt).tolist(), *unpack_i32(message.output).tolist()]
            steps = list(thinker(2)(tokens, message.sampling))
            if self.is_failing and not message.resumed:
                steps[2:] = [EngineFailed("it died", had_taken=True)]
        self.opened.append((stream, steps))
        return stream

    def give(self) -> None:
        for stream, steps in self.opened:
            if steps and stream not in self.closed:
                step = steps.pop(0)
                stream.fail(step) if isinstance(step, EngineFailed) else stream.put(step)

    def suspect(self, name: str) -> None: ...

    def is_stuck(self, name: str) -> bool:
        return False

    async def stats(self) -> list[EngineStats]:
        return [EngineStats(engine_id="a", status="ready")]

    async def flush_cache(self) -> list[FlushOutcome]:
        return []


class Client:
    """An ASGI client that reads one pass late, and leaves when `gone` is set."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._parts: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.gone = asyncio.Event()
        self.is_answered = False

    async def receive(self) -> Message:
        if self._parts:
            return self._parts.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.is_answered |= message["type"] == "http.response.body" and not message.get("more_body", False)


def scope() -> Scope:
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    return {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {}}  # fmt: skip


async def ended(request: "asyncio.Task[None]") -> None:
    """Wait for a request that was ended. Its engines say no more: a request that went on would wait for them."""
    for _ in range(LATE_PASSES):
        if request.done():
            return
        await asyncio.sleep(0)
    raise AssertionError("it goes on")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "name,ways",
    [
        pytest.param(name, ways, marks=() if name in QUICK and ways is SOME else pytest.mark.slow)
        for name in CASES
        for ways in (SOME, ALL)
    ],
)
async def test_whenever_a_client_leaves_its_engine_streams_are_closed(
    name: str, ways: tuple[str, ...], stream: bool
) -> None:
    fields, is_failing = CASES[name]
    if stream and "prompt_logprobs" in fields:
        pytest.skip("streams have no scores of prompts")
    engines = Engines(is_failing)
    app = build_app(edge_config(max_model_len=4096), tool_tokenizer(), RemoteEngines(engines, engines, resume=True))
    before, num_passes = asyncio.all_tasks(), 0
    for how in ways:
        at = 0
        while True:
            engines.reset()
            client = Client(THINKS | {"stream": stream} | fields)
            request = asyncio.ensure_future(app(scope(), client.receive, client.send))  # type: ignore[arg-type]
            for _ in range(at):
                engines.give()
                await asyncio.sleep(0)
            is_late = request.done()
            if "token" in how:
                engines.give()  # arrives in the same pass
            if how in ("leaves", "leaves, token", "both"):
                client.gone.set()
            else:
                request.cancel()
            if how in ("both", "twice"):
                await asyncio.sleep(0)
                request.cancel()
            await ended(request)
            assert [each[0] for each in engines.opened if each[0] not in engines.closed] == [], (how, at)
            if not request.cancelled():
                request.result()
            if is_late:
                assert client.is_answered and len(engines.opened) >= 1 + ("budget" in name)
                break
            at += 1
        num_passes += at
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    assert num_passes > 8 * len(ways), "the request is over before anything can be cancelled"
