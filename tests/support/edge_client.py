"""The HTTP edge over a scripted engine: in-process, or in a real server on a free port."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from aerie.cluster.http.app import build_app
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from tests.support.fake_engine import FakeEngine, chat_tokenizer

MODEL = "tiny/model"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": MODEL, "prompt": "hi"}
JSON = {"content-type": "application/json"}  # for bodies that are sent as they are
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def edge_config(**changes: Any) -> EdgeConfig:
    return EdgeConfig(**{"served_model_name": MODEL, "max_model_len": 256} | changes)


def in_process(engine: FakeEngine, tokenizer: ChatTokenizer | None = None, **changes: Any) -> httpx.AsyncClient:
    app = build_app(edge_config(**changes), tokenizer or chat_tokenizer(), engine)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge")


@contextlib.asynccontextmanager
async def served(
    engine: FakeEngine,
    tokenizer: ChatTokenizer | None = None,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    port: int = 0,
    **changes: Any,
) -> AsyncIterator[str]:
    """Base URL of a server that runs in this event loop. around: wraps the application."""
    async with serving(around(build_app(edge_config(**changes), tokenizer or chat_tokenizer(), engine)), port) as url:
        yield url


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, port: int = 0) -> AsyncIterator[str]:
    """Base URL of a server of `app` that runs in this event loop."""
    # With the protocol named, asyncio switches Nagle off on accepted connections; 40 ms per reply otherwise.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    settings: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none"}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=10, **settings))
    task = asyncio.ensure_future(server.serve([listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that must end with [DONE] or with an error."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    if payloads[-1] == "[DONE]":
        payloads.pop()
    else:
        assert "error" in json.loads(payloads[-1])
    return [json.loads(payload) for payload in payloads]


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait for what another task does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def streamed(engine: FakeEngine, route: str, body: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer. changes: of the configuration."""
    async with in_process(engine, **changes) as client:
        reply = await client.post(route, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(reply.text)


def streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of a choice in the events of a chat or a completion."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
