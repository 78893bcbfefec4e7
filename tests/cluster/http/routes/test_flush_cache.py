"""The routes that empty the prefix cache, and the coordinator's part in it."""

import asyncio
from pathlib import Path

import pytest

from aerie.cluster.transport.messages import FlushOutcome
from tests.support.cluster import TestBed, until
from tests.support.edge_client import PROMPT, TEXT, in_process
from tests.support.edge_client import until as until_async
from tests.support.fake_engine import FakeEngine, says

BUSY = [FlushOutcome("a", num_pages=3), FlushOutcome("b", unfinished="2 requests run and 0 wait")]
DONE = [FlushOutcome("a", num_pages=0), FlushOutcome("b", num_pages=7)]
ROUTES = ("/flush_cache", "/reset_prefix_cache")


@pytest.mark.parametrize("route", ROUTES)
async def test_flush_says_what_every_engine_had(route: str) -> None:
    async with in_process(FakeEngine(says("a"), flushes=[DONE])) as client:
        reply = await client.post(route)
    assert reply.status_code == 200
    assert reply.json() == {
        "success": True,
        "engines": [
            {"engine_id": "a", "num_pages": 0},
            {"engine_id": "b", "num_pages": 7},
        ],
    }


@pytest.mark.parametrize("route", ROUTES)
async def test_flush_is_refused_while_requests_run(route: str) -> None:
    async with in_process(FakeEngine(says("a"), flushes=[BUSY])) as client:
        reply = await client.post(route)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "requests_unfinished")
    assert reply.json()["error"]["message"] == "The prefix cache was not emptied: on b, 2 requests run and 0 wait"
    assert reply.headers["retry-after"] == "1"


async def test_flush_with_a_timeout_waits_for_the_requests_and_disturbs_none() -> None:
    engine = FakeEngine(says("a", "b", "c", delay_s=0.1))
    async with in_process(engine) as client:
        running = asyncio.ensure_future(client.post(TEXT, json=PROMPT))
        await until_async(lambda: engine.num_active == 1)
        assert (await client.post("/flush_cache")).status_code == 409
        assert (await client.post("/flush_cache", params={"timeout": "0.01"})).status_code == 409
        assert (await client.post("/flush_cache", params={"timeout": "5"})).status_code == 200
        assert (await running).json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([], "No engine is known yet"),
        ([FlushOutcome("a", fault="no answer in 5 s"), *BUSY], "The prefix cache was not emptied: a: no answer in 5 s"),
    ],
)
async def test_engine_that_cannot_be_asked_is_503(outcomes: list[FlushOutcome], message: str) -> None:
    async with in_process(FakeEngine(says("a"), flushes=[outcomes])) as client:
        reply = await client.post("/flush_cache?timeout=5")
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, message)


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("timeout=-1", 400, "timeout"),
        ("timeout=nan", 400, "timeout"),
        ("timeout=soon", 400, "timeout"),
        ("timeout=601", 400, "timeout"),
        ("reset_running_requests=true", 400, "reset_running_requests"),
        ("reset_running_requests=false&timeout=1", 200, ""),
    ],
)
async def test_query_parameters_are_honoured_or_refused(query: str, status: int, param: str) -> None:
    async with in_process(FakeEngine(says("a"))) as client:
        reply = await client.post(f"/reset_prefix_cache?{query}")
    assert reply.status_code == status
    if status == 400:
        assert reply.json()["error"]["param"] == param


async def test_flush_wants_post_and_a_key() -> None:
    async with in_process(FakeEngine(says("a")), api_keys=("first-key",)) as client:
        assert (await client.post("/flush_cache")).status_code == 401
        headers = {"authorization": "Bearer first-key"}
        assert (await client.get("/flush_cache", headers=headers)).status_code == 405
        assert (await client.post("/flush_cache", headers=headers)).status_code == 200


def test_coordinator_flushes_between_requests_only(tmp_path: Path) -> None:
    bed = TestBed(tmp_path, delay_s=0.01)
    try:
        bed.attach()
        bed.generate("first", prompt_len=20, max_tokens=4)
        bed.ingress.read_end("first")
        bed.generate("second", prompt_len=20, max_tokens=60)
        until(lambda: bed.coordinator.stats().num_running == 1)
        assert bed.coordinator.flush_cache() == FlushOutcome("e1", unfinished="1 requests run and 0 wait")
        assert bed.ingress.read_end("second").cached_tokens == 16
        outcome = bed.coordinator.flush_cache()
        assert outcome.engine_id == "e1" and outcome.num_pages > 5 and not outcome.unfinished
        assert bed.coordinator.flush_cache() == FlushOutcome("e1")
        bed.generate("third", prompt_len=20, max_tokens=4)
        assert bed.ingress.read_end("third").cached_tokens == 0
    finally:
        bed.close()
