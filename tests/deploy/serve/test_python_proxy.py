"""What Serve's Python proxy gets: headers, which it decodes here as strictly as Ray 2.60's does, and bodies."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from aerie.cluster.start_log import REQUEST_ID
from aerie.deploy.serve.python_proxy import ENVIRONMENT, middlewares
from tests.support.edge_client import CHAT, HELLO, served
from tests.support.fake_engine import FakeEngine, says

_STEERING = (b"x-session-id", b"serve_multiplexed_model_id", b"serve-multiplexed-model-id")
STRICT = (b"x-request-id", *_STEERING, b"traceparent")
NAMES = (*STRICT, b"tracestate", b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"user-agent")
Headers = list[tuple[bytes, bytes]]


def passed_on(headers: Headers) -> Headers:
    """What the proxy is given."""
    seen: Headers = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    async def unused(*_: Any) -> Message:
        raise AssertionError("nothing is read or sent")

    (middleware,) = middlewares()
    asyncio.run(middleware.cls(proxy)({"type": "http", "headers": headers}, unused, unused))  # type: ignore[call-arg,arg-type]
    return seen


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=200)), max_size=5))
@example([(b"x-request-id", b"\xff")])
@example([(b"x-request-id", b"x" * 8192), (b"x-session-id", b"\x80")])
@example([(b"x-request-id", b"good-1"), (b"user-agent", b"\xff"), (b"traceparent", b"00-ab")])
def test_every_header_that_serve_reads_can_be_read(headers: Headers) -> None:
    seen = passed_on(headers)
    for name, value in seen:
        if name in STRICT:
            value.decode()
    given_ids, ids = ([value for name, value in each if name == b"x-request-id"] for each in (headers, seen))
    for before, after in zip(given_ids, ids, strict=True):
        is_good = REQUEST_ID.fullmatch(before.decode("latin-1")) is not None
        assert after == before if is_good else REQUEST_ID.fullmatch(after.decode()) is None, "an id changed its meaning"
    agents = [value for name, value in headers if name == b"user-agent"]
    assert [value for name, value in seen if name == b"user-agent"] == agents
    assert not {name for name, _ in seen} & set(_STEERING)


def test_serve_finds_it() -> None:
    from ray.serve._private.utils import call_function_from_import_path

    found = call_function_from_import_path(*ENVIRONMENT.values())
    assert [each.cls for each in found] == [each.cls for each in middlewares()]


@pytest.mark.parametrize("encoding", ["length", "chunked"])
@pytest.mark.parametrize("pieces", [1, 2], ids=["together", "body later"])
async def test_a_body_with_an_offer_of_http_2_is_read_or_its_loss_is_named(
    encoding: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Java's HttpClient sends it (Spring AI, langchain4j), twice on one connection."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["httptools"])  # as uvicorn chooses
    assert await _statuses(encoding, pieces, 1) == [(400, "request_body_lost")]
    middlewares()
    assert await _statuses(encoding, pieces, 2) == [(200, None)] * 2


async def _statuses(encoding: str, pieces: int, count: int) -> list[tuple[int, str | None]]:
    """Status and error code of each reply."""
    body = json.dumps(HELLO).encode()
    length = f"Content-Length: {len(body)}" if encoding == "length" else "Transfer-encoding: chunked"
    head = (
        f"POST {CHAT} HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n{length}\r\nHost: localhost\r\n"
        "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAABgAGAAA\r\nUpgrade: h2c\r\n"
        "User-Agent: Java-http-client/21\r\nContent-Type: application/json\r\n\r\n"
    ).encode()
    sent = body if encoding == "length" else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    found = []
    async with served(FakeEngine(says("x"))) as url, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(count):
            for piece in [head + sent] if pieces == 1 else [head, sent]:
                writer.write(piece)
                await asyncio.sleep(0.05)
            answer = await reader.readuntil(b"\r\n\r\n")
            size = next(line for line in answer.lower().splitlines() if line.startswith(b"content-length: "))
            reply = json.loads(await reader.readexactly(int(size.split()[1])))
            found.append((int(answer.split()[1]), reply.get("error", {}).get("code")))
        writer.close()
    return found
