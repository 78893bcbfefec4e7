"""Access control: hosts and origins without API keys, content types, HEAD, HTTP/1.0 and web pages."""

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from aerie.cluster.http.app import build_app
from aerie.cluster.http.errors import ApiError
from aerie.cluster.http.middleware import Origins
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, TEXT, edge_config, in_process, served
from tests.support.fake_engine import FakeEngine, chat_tokenizer, says

KEY = "secret-key-1"


async def _posted(headers: dict[str, str], **config: Any) -> httpx.Response:
    engine = FakeEngine(says("x"))
    async with in_process(engine, **config) as client:
        reply = await client.post(CHAT, json=HELLO, headers=headers)
    assert (len(engine.calls) == 1) is (reply.status_code == 200), "who is refused costs nothing"
    return reply


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("10.1.2.3", True),
        ("aerie:8000", True),
        ("aerie.default.svc.cluster.local:8000", True),
        ("mine.local", True),
        ("evil.com", False),
        ("evil.com:8000", False),
        ("localhost.evil.com", False),
        ("127.0.0.1.nip.io", False),
        ("evil.com@localhost", False),
        ("evil.com#localhost", False),
        ("localhost.", False),
    ],
)
async def test_a_name_that_may_be_anothers_is_refused_without_keys(host: str, is_allowed: bool) -> None:
    reply = await _posted({"host": host})
    assert reply.status_code == (200 if is_allowed else 403)
    if not is_allowed:
        assert reply.json()["error"]["code"] == "host_not_allowed"
        assert "ingress.allowed_hosts" in reply.json()["error"]["message"]
        keyed = {"host": host, "authorization": f"Bearer {KEY}"}
        assert (await _posted(keyed, api_keys=(KEY,))).status_code == 200, "a key is enough"
        assert (await _posted({"host": "chat.example.com:443"}, allowed_hosts=("chat.example.com",))).status_code == 200
        assert (await _posted({"host": host}, allowed_hosts=("*",))).status_code == 200


@pytest.mark.parametrize(
    ("origin", "host", "is_allowed"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://localhost:3000", "localhost:8000", True),
        ("http://127.0.0.1:3000", "localhost:8000", True),
        ("https://box.local", "box.local:443", True),
        ("http://box.local:80", "box.local", True),
        ("https://evil.com", "localhost:8000", False),
        ("http://box.local:81", "box.local", False),
        ("null", "localhost:8000", False),
        ("https://localhost@evil.com", "localhost:8000", False),
    ],
)
async def test_a_page_from_elsewhere_is_refused_without_keys(origin: str, host: str, is_allowed: bool) -> None:
    reply = await _posted({"host": host, "origin": origin})
    assert reply.status_code == (200 if is_allowed else 403)
    if not is_allowed:
        assert reply.json()["error"]["code"] == "origin_not_allowed"
        allowed = await _posted({"host": host, "origin": origin}, allowed_origins=(origin,))
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)


@given(host=st.text(max_size=40), origin=st.text(max_size=40))
def test_any_host_and_origin_is_answered_or_refused(host: str, origin: str) -> None:
    raw = [(b"host", host.encode()), (b"origin", origin.encode())]
    try:
        Origins((), ()).check(Headers(raw=[(name, value) for name, value in raw]))
    except ApiError as error:
        assert error.status == 403


async def test_probes_need_no_host() -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        for path in ("/health", "/health/live", "/ping", "/health_generate", "/metrics"):
            assert (await client.get(path, headers={"host": "balancer.example.com"})).status_code == 200
        assert (await client.post("/ping")).status_code == 200
    async with in_process(FakeEngine(says("x")), api_keys=(KEY,)) as client:
        assert (await client.get("/ping")).status_code == (await client.get("/health_generate")).status_code == 200


async def test_pages_of_allowed_origins_may_ask_before_they_ask() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for config, origin in (((), "https://a.example"), (("https://a.example",), "https://a.example"), (("*",), "null")):
        async with in_process(FakeEngine(says("x")), allowed_origins=config, api_keys=(KEY,)) as client:
            reply = await client.options(CHAT, headers={"origin": origin, **asked})
            assert reply.status_code == (200 if config else 401)
            assert ("access-control-allow-origin" in reply.headers) is bool(config)
            if config:
                assert "authorization" in reply.headers["access-control-allow-headers"].lower()
                headers = {"origin": origin, "authorization": f"Bearer {KEY}"}
                answer = await client.post(CHAT, json=HELLO, headers=headers)
                assert answer.headers["access-control-allow-origin"] in (origin, "*")
                assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("text/plain; application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        (None, 415),
        ("", 415),
    ],
)
async def test_a_body_that_is_not_said_to_be_json_is_415(content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    async with in_process(FakeEngine(says("x"))) as client:
        for route in (CHAT, "/v1/responses", "/tokenize", "/v1/messages"):
            body = b'{"model": "%s", "prompt": "x"}' % MODEL.encode()
            reply = await client.post(route, content=body, headers=headers)
            assert (reply.status_code == 415) is (status == 415), route
            if status == 415:
                assert "content-type application/json" in reply.json()["error"]["message"]
                assert len(reply.json()["error"]) >= 2, "in the route's own form"


async def _raw(url: str, request: bytes) -> tuple[bytes, bytes]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await reader.read(-1)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_no_chunks(stream: bool) -> None:
    body = b'{"prompt": "hi", "stream": %s}' % (b"true" if stream else b"false")
    lines = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with served(FakeEngine(says("a", "b"))) as url:
        head, answer = await _raw(url, b"POST /v1/completions HTTP/1.0\r\n" + lines + body)
        assert b"transfer-encoding" not in head and b"content-length: %d" % len(answer) in head
        assert answer.endswith(b"data: [DONE]\n\n") if stream else b'"text":"ab"' in answer


async def test_head_is_answered_wherever_get_is() -> None:
    app = build_app(edge_config(), chat_tokenizer(), FakeEngine(says("x")))
    paths = sorted({route.path for route in app.routes if "GET" in route.methods and "{" not in route.path})  # type: ignore[attr-defined]
    assert {"/health", "/v1/models", "/metrics", "/", "/docs", "/openapi.json", "/ping"} <= set(paths)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client:
        for path in paths:
            got, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
        wrong = await client.head(TEXT)
        assert (wrong.status_code, wrong.headers["allow"], wrong.content) == (405, "POST", b"")
        assert (await client.get(TEXT)).headers["allow"] == "POST"
        assert (await client.post(TEXT, json=PROMPT)).status_code == 200
