"""Spans of requests, in memory and as a collector gets them."""

import asyncio
import http.server
import json
import threading
from collections.abc import Iterable, MutableMapping
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aerie.cluster.http.app import build_app
from aerie.cluster.http.config import TracingConfig
from aerie.cluster.http.tracing import Tracing, make_tracing
from aerie.cluster.transport.messages import RequestTimings, TokenDelta
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, TEXT, edge_config
from tests.support.fake_engine import FakeEngine, Step, chat_tokenizer, refuses, says

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def client(engine: FakeEngine, tracing: Tracing, **config: Any) -> httpx.AsyncClient:
    app = build_app(edge_config(**config), chat_tokenizer(), engine, tracing=tracing)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge")


async def spans_of(
    engine: FakeEngine, route: str, body: dict[str, Any], headers: dict[str, str] | None = None, ratio: float = 1.0
) -> list[ReadableSpan]:
    """In the order in which they began."""
    exporter = InMemorySpanExporter()
    async with client(engine, make_tracing(TracingConfig(sample_ratio=ratio), exporter)) as http:
        await http.post(route, json=body, headers=headers)
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def slowly(prompt: list[int], sampling: SamplingParams) -> Iterable[Step]:
    """0.05 s in the queue, 0.05 s of prefill, 0.1 s of decoding."""
    yield 0.1
    yield TokenDelta("", (72,))
    yield 0.1
    yield TokenDelta("", (73,), "stop", cached_tokens=1, timings=RequestTimings(0.05, 0))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_its_phases_below(stream: bool) -> None:
    root, queue, prefill, decode = await spans_of(FakeEngine(slowly), CHAT, HELLO | {"stream": stream})
    assert [span.name for span in (root, queue, prefill, decode)] == ["POST " + CHAT, "queue", "prefill", "decode"]
    assert root.parent is None
    for child in (queue, prefill, decode):
        assert child.parent is not None and child.parent.span_id == root.context.span_id  # type: ignore[union-attr]
    assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
    assert queue.end_time - queue.start_time == pytest.approx(0.05e9, rel=0.01)  # type: ignore[operator]
    assert root.start_time <= queue.start_time and decode.end_time <= root.end_time  # type: ignore[operator]
    assert decode.end_time - decode.start_time >= 0.09e9  # type: ignore[operator]
    found = dict(root.attributes or {})
    assert found["gen_ai.request.model"] == MODEL and found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.usage.output_tokens"] == 2 and found["gen_ai.response.finish_reasons"] == ("stop",)
    assert found["aerie.cached_tokens"] == 1 and found["aerie.streams"] is stream
    assert root.status.is_unset


async def test_w3c_traceparent_is_honoured() -> None:
    root, *_ = await spans_of(FakeEngine(says("x")), TEXT, PROMPT, {"traceparent": PARENT}, ratio=0.0)
    assert root.parent is not None and f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"  # type: ignore[union-attr]
    unsampled = await spans_of(FakeEngine(says("x")), TEXT, PROMPT, {"traceparent": PARENT[:-1] + "0"})
    assert unsampled == [], "whoever began the trace decides"
    assert await spans_of(FakeEngine(says("x")), TEXT, PROMPT, ratio=0.0) == []


async def test_resumptions_are_spans() -> None:
    def script(prompt: list[int], sampling: SamplingParams) -> Iterable[Step]:
        yield TokenDelta("", (72,))
        yield 0.02
        yield TokenDelta("", (73,), attempt=1)
        yield TokenDelta("", (74,), "stop", cached_tokens=0, timings=RequestTimings(0.0, 2), attempt=1)

    spans = await spans_of(FakeEngine(script), TEXT, PROMPT)
    resumptions = [span.attributes or {} for span in spans if span.name == "resumption"]
    assert [(found["aerie.where"], found["aerie.attempt"]) for found in resumptions] == [
        ("another engine", 1),
        ("new workers", 2),
    ]


async def test_what_fails_or_is_left_is_an_error_with_its_reason() -> None:
    root, *_ = await spans_of(FakeEngine(refuses("queue_full")), TEXT, PROMPT)
    assert root.status.description == "server_overloaded" and not root.status.is_ok
    exporter = InMemorySpanExporter()
    app = build_app(
        edge_config(),
        chat_tokenizer(),
        FakeEngine(says("a", "b", delay_s=5.0)),
        tracing=make_tracing(TracingConfig(), exporter),
    )
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(PROMPT).encode()}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        pass

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": TEXT, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    spans = exporter.get_finished_spans()
    assert [span.status.description for span in spans if span.parent is None] == ["client_left"]
    assert "decode" not in [span.name for span in spans], "it has no token"


async def test_each_choice_has_its_phases() -> None:
    spans = await spans_of(FakeEngine(slowly), TEXT, PROMPT | {"n": 2})
    assert sorted((span.attributes or {})["aerie.choice"] for span in spans if span.name == "decode") == [0, 1]


def test_a_collector_gets_them_by_otlp() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        tracing = make_tracing(TracingConfig(f"http://127.0.0.1:{server.server_port}", service_name="mine"))

        async def ask() -> None:
            async with client(FakeEngine(says("x")), tracing) as http:
                assert (await http.post(TEXT, json=PROMPT)).status_code == 200

        asyncio.run(ask())
        tracing.close()
    finally:
        server.shutdown()
        server.server_close()
    ((path, body),) = bodies
    (of_service,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert path == "/v1/traces"
    assert "POST " + TEXT in [span.name for span in of_service.scope_spans[0].spans]
    assert "mine" in [each.value.string_value for each in of_service.resource.attributes]


def test_bad_configurations_name_the_remedy() -> None:
    with pytest.raises(ValueError, match="must be a collector's URL, such as http://127.0.0.1:4318"):
        TracingConfig("collector:4317")
    with pytest.raises(ValueError, match="sample_ratio=2: must be between 0 and 1"):
        TracingConfig(sample_ratio=2)
    assert TracingConfig("http://c:4318/").url == "http://c:4318/v1/traces"
    assert TracingConfig("http://c/own/path").url == "http://c/own/path"


async def test_off_by_default() -> None:
    assert make_tracing(TracingConfig()).begin({}, None, "") is None  # type: ignore[arg-type]
