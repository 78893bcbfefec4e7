"""JSON log lines: what they hold, and that a request's lines carry its id."""

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from aerie.cluster.http.engine_client import EngineRefused
from aerie.cluster.start_log import OURS, fields, request_id, use_logs
from aerie.cluster.transport.messages import Refusal, TokenDelta
from tests.support.edge_client import CHAT, HELLO, MODEL, in_process
from tests.support.fake_engine import FakeEngine, says

TEXT = "/v1/completions"
PROMPT = {"model": MODEL, "prompt": "hi"}


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Return what this process logs as JSON; its loggers are as before afterwards."""
    loggers = [logging.getLogger(OURS)]
    former = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    stream = io.StringIO()
    use_logs("json", "rank 3", stream)
    yield stream
    for logger, (handlers, level, propagate) in zip(loggers, former, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_line_has_time_level_process_fields_and_traceback(written: io.StringIO) -> None:
    logger = logging.getLogger("aerie.workers.runner.worker")
    logger.info("took %d ms", 7, extra=fields(step=5, shape=("a", object)))
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        logger.exception("failed")
    logger.debug("not written")
    first, second = _lines(written)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info",
        "logger": "aerie.workers.runner.worker",
        "process": "rank 3",
        "message": "took 7 ms",
        "step": 5,
        "shape": ["a", "<class 'object'>"],
    }
    assert second["level"] == "error" and "RuntimeError: two\nlines" in second["traceback"]


async def test_lines_of_a_request_carry_its_id_and_its_end_is_told(written: io.StringIO) -> None:
    def script(prompt: list[int], sampling: object) -> list[Any]:
        if len(engine.calls) == 1:
            return [TokenDelta("", (), "error", error="rank 1 died")]
        return [EngineRefused(Refusal("queue_full", "full"))]

    engine = FakeEngine(script)
    async with in_process(engine) as client:
        await client.post(TEXT, json=PROMPT, headers={"x-request-id": "mine"})
        await client.post(CHAT, json=HELLO | {"request_id": "body's"}, headers={"x-request-id": "header's"})
        await client.get("/health")
        await client.get("/metrics")
    failed, first, second = _lines(written)
    assert failed["request_id"] == "mine" and "rank 1 died" in failed["message"]
    ends = [
        {key: line[key] for key in ("request_id", "path", "status", "reason", "message")} for line in (first, second)
    ]
    assert ends == [
        {
            "request_id": "mine",
            "path": TEXT,
            "status": 500,
            "reason": "engine_error",
            "message": "request mine ended",
        },
        {
            "request_id": "body's",
            "path": CHAT,
            "status": 429,
            "reason": "server_overloaded",
            "message": "request body's ended",
        },
    ]
    assert first["seconds"] >= 0


async def test_text_is_the_default_and_needs_no_set_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="aerie.cluster"):
        async with in_process(FakeEngine(says("a"))) as client:
            await client.post(TEXT, json=PROMPT, headers={"x-request-id": "mine"})
    assert "request mine ended" in caplog.messages
    assert request_id.get() == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO | {"request_id": "mine"}),
        ("/v1/completions", {"prompt": "hi", "request_id": "mine"}),
        ("/v1/responses", {"input": "hi", "request_id": "mine"}),
        ("/v1/messages", HELLO | {"max_tokens": 2, "request_id": "mine"}),
        ("/generate", {"text": "hi", "rid": "mine"}),
    ],
)
async def test_an_id_in_the_body_is_that_of_the_lines(written: io.StringIO, path: str, body: dict[str, Any]) -> None:
    use_logs("json", "ingress", written)
    failed = TokenDelta("", (), finish="error", error="broken")
    async with in_process(FakeEngine(lambda prompt, sampling: [failed])) as client:
        assert (await client.post(path, json=body)).status_code == 500
    assert {line["request_id"] for line in _lines(written)} == {"mine"}
