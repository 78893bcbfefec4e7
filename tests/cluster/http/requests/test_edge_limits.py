"""Limits of one client at the ingress: time for its body, memory for its prompt."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aerie.cluster.http.text.tokenizer import MAX_LONG_ENCODES, ChatTokenizer
from aerie.cluster.http.text.user_text import ChatText
from tests.support.edge_client import CHAT, HELLO, JSON, PROMPT, RESPONSES, TEXT, in_process
from tests.support.fake_engine import FakeEngine, chat_tokenizer, says


async def test_a_body_that_drips_is_refused_in_time() -> None:
    async def dripping() -> AsyncIterator[bytes]:
        yield b'{"model"'
        await asyncio.sleep(600)

    async with in_process(FakeEngine(says("x")), body_timeout_s=0.05) as client:
        request = client.build_request("POST", TEXT, content=b"{}", headers=JSON)
        app = client._transport.app  # type: ignore[attr-defined]
        sent: list[Any] = []
        parts = dripping()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": await anext(parts), "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": TEXT, "headers": request.headers.raw, "query_string": b""}
        await app(scope, receive, send)
    assert sent[0]["status"] == 408 and b"request_timeout" in sent[1]["body"]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (TEXT, PROMPT | {"prompt": "x" * 10**6}, "prompt"),
        (CHAT, HELLO | {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
        (RESPONSES, {"model": HELLO["model"], "input": "x" * 10**6}, "input"),
    ],
)
async def test_a_text_that_must_be_too_long_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any], param: str
) -> None:
    def no_work(*_: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(ChatTokenizer, "_encode", no_work)
    async with in_process(FakeEngine(says("x"))) as client:
        error = (await client.post(route, json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "more tokens in any case" in error["message"]


async def test_the_bound_refuses_nothing_that_fits() -> None:
    tokenizer = chat_tokenizer()
    text = " world" * 200
    assert tokenizer.longest_token_bytes >= len(" world") and len(tokenizer._encode(ChatText(text), False)) == 200
    async with in_process(FakeEngine(says("x"))) as client:
        assert (await client.post(TEXT, json=PROMPT | {"prompt": text})).status_code == 200


async def test_long_texts_are_encoded_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def encode(self: ChatTokenizer, chat: ChatText, add_special_tokens: bool) -> list[int]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.02)
        with lock:
            running -= 1
        return [1]

    monkeypatch.setattr(ChatTokenizer, "_encode", encode)
    tokenizer = chat_tokenizer()
    await asyncio.gather(*(tokenizer.encode("x" * 10_000, False) for _ in range(8)))
    assert most == MAX_LONG_ENCODES
