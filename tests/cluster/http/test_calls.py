"""Calls without HTTP: the same replies, errors, counts and limits as over HTTP."""

import asyncio
import contextlib
import json
import pickle
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.cluster.http.app import build_app
from aerie.cluster.http.calls import Calls, Reply
from aerie.cluster.http.errors import RequestError
from aerie.cluster.http.keys import KeyConfig
from aerie.cluster.http.schema.request import ChatCompletionRequest
from tests.support.edge_client import CHAT, HELLO, PROMPT, RESPONSES, TEXT, edge_config, until
from tests.support.fake_engine import FakeEngine, Script, Step, chat_tokenizer, says

MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    TEXT: PROMPT,
    RESPONSES: {"input": "hi"},
    MESSAGES: {**HELLO, "max_tokens": 9},
    "/generate": {"text": "hi"},
}
KEYS = (KeyConfig("a", "secret-of-a"), KeyConfig("b", "secret-of-b"))


class Made:
    """An application, asked both ways."""

    def __init__(self, script: Script, **config: Any) -> None:
        self.engine = FakeEngine(script)
        app = build_app(edge_config(**config), chat_tokenizer(), self.engine)
        self.calls = Calls(app)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    async def stream(self, path: str, body: Any, **options: str) -> AsyncGenerator[Reply, None]:
        found = await self.calls.call(path, {**body, "stream": True}, **options)
        assert isinstance(found, AsyncGenerator)
        return found


def _without_chance(value: Any) -> Any:
    """Ids and times are random."""
    if isinstance(value, dict):
        random = {"id", "created", "created_at", "completed_at", "item_id", "response_id", "e2e_latency"}
        return {key: _without_chance(each) for key, each in value.items() if key not in random}
    return [_without_chance(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", BODIES)
async def test_replies_and_streams_are_those_of_http(path: str) -> None:
    made, body = Made(says("hel", "lo")), BODIES[path]
    whole = await made.calls.call(path, body)
    assert whole and _without_chance(whole) == _without_chance((await made.http.post(path, json=body)).json())
    chunks = [chunk async for chunk in await made.stream(path, body)]
    text = (await made.http.post(path, json={**body, "stream": True})).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert _without_chance(chunks) == [_without_chance(json.loads(line)) for line in lines if line != "[DONE]"]
    assert len(chunks) > 1 and not made.engine.closed


async def test_bodies_may_be_models_and_structs() -> None:
    class Body(msgspec.Struct, omit_defaults=True):
        model: str
        messages: list[dict[str, str]]
        stream: bool = False

    made = Made(says("hello"))
    expected = _without_chance(await made.calls.call(CHAT, HELLO))
    for body in (ChatCompletionRequest.model_validate(HELLO), Body(**HELLO)):  # type: ignore[arg-type]
        assert _without_chance(await made.calls.call(CHAT, body)) == expected
    assert isinstance(await made.calls.call(CHAT, Body(**HELLO, stream=True)), AsyncGenerator)  # type: ignore[arg-type]
    for wrong, reason in (
        ("hi", "is a str; give a dict"),
        ({"messages": object()}, "not valid JSON"),
        ({"prompt": "\ud800"}, "JSON"),
    ):
        with pytest.raises(RequestError, match=reason):
            await made.calls.call(TEXT, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", BODIES)
async def test_errors_are_exceptions_with_code_and_message(path: str) -> None:
    made = Made(says("x"))
    bad = {**BODIES[path], **({"sampling_params": {"temperature": -1}} if path == "/generate" else {"temperature": -1})}
    reply = await made.http.post(path, json=bad)
    for streams in (False, True):
        with pytest.raises(RequestError) as raised:
            found = await made.calls.call(path, {**bad, "stream": streams})
            assert isinstance(found, AsyncGenerator)
            await anext(found)
        error = pickle.loads(pickle.dumps(raised.value))
        assert isinstance(error, RequestError) and str(error) == error.message == reply.json()["error"]["message"]
        assert (error.status, error.code, error.param) == (400, "invalid_value", reply.json()["error"]["param"])
        assert error.kind == reply.json()["error"]["type"] and error.retry_after_s is None
    assert not made.engine.calls


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_fails_raises_after_its_first_chunks(path: str) -> None:
    def script(prompt: list[int], sampling: Any) -> Iterator[Step]:
        yield from list(says("hel", "lo")(prompt, sampling))[:1]
        raise RuntimeError("lost")

    made, chunks = Made(script), []
    with pytest.raises(RequestError, match="Internal server error") as raised:
        async for chunk in await made.stream(path, BODIES[path]):
            chunks.append(chunk)
    assert chunks and raised.value.status is None
    if path != MESSAGES:
        assert raised.value.code == "internal_error"


def _slowly(prompt: list[int], sampling: Any) -> Iterable[Step]:
    (delta,) = says("x", finish="length")(prompt, sampling)
    while True:
        yield msgspec.structs.replace(delta, finish=None)
        yield 0.001


@pytest.mark.parametrize("num_read", [0, 1, 200])
async def test_a_closed_stream_frees_its_request(num_read: int) -> None:
    made = Made(_slowly)
    stream = await made.stream(CHAT, HELLO)
    for _ in range(num_read):
        await anext(stream)
    await stream.aclose()
    assert made.engine.num_active == 0 and len(made.engine.closed) == min(num_read, 1)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_cancelled_call_frees_its_request(streams: bool) -> None:
    made = Made(_slowly)

    async def read() -> None:
        found = await made.calls.call(CHAT, {**HELLO, "stream": streams})
        async for _ in found:  # type: ignore[union-attr]
            await asyncio.sleep(0.05 if streams else 0)  # so that the queue is full

    task = asyncio.create_task(read())
    await until(lambda: made.engine.num_active == 1)
    await asyncio.sleep(0.2)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until(lambda: made.engine.num_active == 0)
    assert 'reason="client_left",route="/v1/chat/completions"' in (await made.http.get("/metrics")).text


async def test_limits_and_counts_are_those_of_http() -> None:
    made = Made(_slowly, max_concurrent_requests=1, max_choices=1, retry_after_s=3.0)
    stream = await made.stream(CHAT, HELLO)
    await anext(stream)
    assert (await made.http.post(CHAT, json=HELLO)).status_code == 429
    with pytest.raises(RequestError, match="The server is busy") as raised:
        await made.calls.call(CHAT, HELLO)
    assert (raised.value.status, raised.value.code, raised.value.retry_after_s) == (429, "server_overloaded", 3.0)
    await stream.aclose()
    counted = (await made.http.get("/metrics")).text
    assert 'reason="server_overloaded",route="/v1/chat/completions",status="429"} 2.0' in counted


async def test_calls_need_no_key_and_may_name_a_tenant() -> None:
    made = Made(says("x"), api_keys=KEYS)
    assert (await made.http.post(CHAT, json=HELLO)).status_code == 401
    assert await made.calls.call(CHAT, HELLO)
    salts = [made.engine.calls[-1].sampling.cache_salt]
    for name in ("a", "b"):
        assert await made.calls.call(CHAT, HELLO, tenant=name)
        salts.append(made.engine.calls[-1].sampling.cache_salt)
    assert len(set(salts)) == 3
    stored = await made.calls.call(RESPONSES, {"input": "hi"}, tenant="a")
    assert isinstance(stored, dict)
    for key, status in (("secret-of-a", 200), ("secret-of-b", 404)):
        found = await made.http.get(f"{RESPONSES}/{stored['id']}", headers={"authorization": f"Bearer {key}"})
        assert found.status_code == status
    with pytest.raises(RequestError, match=r"tenant=c: no entry of ingress.api_keys has this name; names: a, b"):
        await made.calls.call(CHAT, HELLO, tenant="c")
    forged = {"caller": "", "x-caller": "", "authorization": "Bearer "}
    assert (await made.http.post(CHAT, json=HELLO, headers=forged)).status_code == 401


async def test_request_ids_are_those_of_logs_and_replies() -> None:
    made = Made(says("x"))
    assert (await made.calls.call(CHAT, HELLO, request_id="mine-1"))["id"] == "chatcmpl-mine-1"  # type: ignore[index]
    with pytest.raises(RequestError, match="X-Request-Id must be"):
        await made.calls.call(CHAT, HELLO, request_id="not printable")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


_FIELDS = st.sampled_from(["stream", "n", "stop", "messages", "prompt", "text", "input", "max_tokens"])


@settings(max_examples=60, deadline=None)  # each builds an application, which a busy machine may take long for
@given(st.sampled_from(sorted(BODIES)), st.dictionaries(_FIELDS | st.text(max_size=5), _JSON, max_size=4))
def test_any_body_is_answered_or_refused(path: str, changes: dict[str, Any]) -> None:
    async def ask() -> None:
        made = Made(says("x"))
        try:
            found = await made.calls.call(path, {**BODIES[path], **changes})
            _ = found if isinstance(found, dict) else [chunk async for chunk in found]
        except RequestError as error:
            assert error.status is not None and 400 <= error.status < 500, error
        assert made.engine.num_active == 0

    asyncio.run(ask())
