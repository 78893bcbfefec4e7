"""Generations that are refused, fail, take too long or are too many, whole and streamed, over a scripted engine."""

import asyncio
from typing import Any

import httpx
import pytest

from aerie.cluster.http.app import build_app
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.engine_client import EngineRefused
from aerie.cluster.transport.messages import Refusal, TokenDelta
from aerie.workers.scheduling.plan import NOT_FINITE
from tests.support.edge_client import (
    CHAT,
    HELLO,
    MODEL,
    PROMPT,
    TEXT,
    events,
    in_process,
    streamed,
    streamed_text,
    until,
)
from tests.support.fake_engine import FakeEngine, Step, chat_tokenizer, refuses, says, small_tokens

REFUSALS = [
    ("too_large", 400, "context_length_exceeded", False),
    ("queue_full", 429, "server_overloaded", True),
    ("not_ready", 503, "service_unavailable", True),
]


@pytest.mark.parametrize(("kind", "status", "code", "retries"), REFUSALS)
@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
async def test_refusal_has_its_status_streaming_or_not(
    kind: str, status: int, code: str, retries: bool, extra: dict[str, Any]
) -> None:
    async with in_process(FakeEngine(refuses(kind, "because", 2.5))) as client:
        reply = await client.post(CHAT, json=HELLO | extra)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert "because" in reply.json()["error"]["message"]
    assert (reply.headers.get("retry-after"), reply.headers.get("retry-after-ms")) == (
        ("3", "2500") if retries else (None, None)
    )


FAILURES: list[Step] = [
    TokenDelta("", (), "error", error="rank 1 died at /secret"),
    TokenDelta("", (), "abort"),
    RuntimeError("/secret"),
    TimeoutError("/secret"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=["error", "abort", "exception", "timeout"])
async def test_engine_failure_is_500_before_and_an_error_event_after_the_first_token(failure: Step) -> None:
    async with in_process(FakeEngine(lambda p, s: [failure])) as client:
        for stream in (True, False):
            reply = await client.post(TEXT, json=PROMPT | {"stream": stream}, headers={"x-request-id": "mine"})
            assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
            assert "mine" in reply.text
            assert "secret" not in reply.text
    late = FakeEngine(lambda p, s: [TokenDelta("", small_tokens("ab")), failure])
    async with in_process(late) as client:
        assert (await client.post(TEXT, json=PROMPT)).status_code == 500
        reply = await client.post(TEXT, json=PROMPT | {"stream": True})
    chunks = events(reply.text)
    assert streamed_text(chunks[:-1]) == "ab"
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in reply.text


@pytest.mark.parametrize("stream", [True, False])
async def test_logits_that_are_nan_are_500_with_that_reason(stream: bool) -> None:
    nan = TokenDelta("", (), "error", error=NOT_FINITE.message)
    async with in_process(FakeEngine(lambda p, s: [nan])) as client:
        reply = await client.post(TEXT, json=PROMPT | {"stream": stream})
    assert reply.status_code == 500 and reply.json()["error"]["message"].endswith(f": {NOT_FINITE.message}")


async def test_stream_that_ends_without_a_last_delta_is_an_error() -> None:
    async with in_process(FakeEngine(lambda p, s: [TokenDelta("", (1,))])) as client:
        assert (await client.post(TEXT, json=PROMPT)).json()["error"]["code"] == "engine_error"


async def test_one_failing_choice_aborts_the_others() -> None:
    def script(prompt: list[int], sampling: Any) -> list[Step]:
        if sampling.seed == 5:  # the first choice
            return [0.05, EngineRefused(Refusal("queue_full", "full"))]
        return [TokenDelta("", (1,)), 60.0]

    engine = FakeEngine(script)
    async with in_process(engine) as client:
        assert (await client.post(TEXT, json=PROMPT | {"n": 3, "seed": 5})).status_code == 429
    assert len(engine.closed) == 2
    assert engine.num_active == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_deadline_is_504_that_clients_do_not_repeat(stream: bool) -> None:
    engine = FakeEngine(lambda p, s: [60.0])
    async with in_process(engine, request_timeout_s=0.05) as client:
        reply = await client.post(TEXT, json=PROMPT | {"stream": stream})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "request_timeout")
    assert reply.headers["x-should-retry"] == "false"
    assert (engine.num_active, len(engine.closed)) == (0, 1)


async def test_deadline_within_a_stream_is_an_error_event() -> None:
    engine = FakeEngine(lambda p, s: [TokenDelta("", small_tokens("ab")), 60.0])
    chunks = await streamed(engine, TEXT, PROMPT, request_timeout_s=0.05)
    assert chunks[-1]["error"]["code"] == "request_timeout"
    assert engine.num_active == 0


async def test_more_than_the_limit_is_429_and_places_come_back() -> None:
    engine = FakeEngine(says("a", "b", delay_s=0.05))
    async with in_process(engine, max_concurrent_requests=4, max_choices=4) as client:
        replies = await asyncio.gather(*(client.post(TEXT, json=PROMPT | {"n": 2}) for _ in range(5)))
        assert sorted(reply.status_code for reply in replies) == [200, 200, 429, 429, 429]
        busy = next(reply for reply in replies if reply.status_code == 429)
        assert busy.json()["error"]["message"] == "The server is busy: 4 of 4 generations are in flight"
        assert busy.headers["retry-after"] == "1"
        assert (await client.post(TEXT, json=PROMPT | {"n": 4})).status_code == 200
        assert (await client.post(TEXT, json=PROMPT | {"n": 99})).status_code == 400
    assert engine.max_active == 4


async def test_draining_refuses_new_work_and_ends_the_old() -> None:
    engine = FakeEngine(says("a", "b", delay_s=0.05))
    app = build_app(EdgeConfig(served_model_name=MODEL, max_model_len=256), chat_tokenizer(), engine)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client:
        running = asyncio.ensure_future(client.post(TEXT, json=PROMPT))
        await until(lambda: engine.num_active == 1)
        app.state.admission.draining = True
        refused = await client.post(TEXT, json=PROMPT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await running).status_code == 200


async def test_application_without_a_model_is_not_built() -> None:
    with pytest.raises(ValueError, match="must be filled in from the model"):
        build_app(EdgeConfig(), chat_tokenizer(), FakeEngine(says("x")))
