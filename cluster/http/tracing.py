"""OpenTelemetry spans: one per generation request, with child spans for its phases. Off by default. Spans are created
when a request ends, from recorded times, and sent by OpenTelemetry's thread. Used by `aerie.cluster.http.serving`."""

import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from aerie.cluster.http.answer import Answer
from aerie.cluster.http.config import TracingConfig
from aerie.cluster.http.endpoint import route_path
from aerie.cluster.http.requests.edge_request import EdgeRequest
from aerie.cluster.transport.messages import TokenDelta

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

ARRIVED = "arrived_ns"  # key in a scope's state: arrival of the request


class _Times:
    """Times of one choice, in nanoseconds of the wall clock; 0: not yet. queue_s, num_resumed: as reported by the
    engine."""

    __slots__ = ("began_ns", "first_token", "ended", "queue_s", "resumptions", "num_resumed")

    def __init__(self) -> None:
        self.began_ns = time.time_ns()
        self.first_token = self.ended = 0
        self.queue_s = 0.0
        self.resumptions: list[int] = []
        self.num_resumed = 0


class RequestTrace:
    """Recorded times of one request; `end` creates its spans."""

    def __init__(self, tracer: Any, scope: Scope, request: EdgeRequest, request_id: str) -> None:
        self._tracer = tracer
        self._scope = scope
        self._request = request
        self._request_id = request_id
        self._choices: dict[int, _Times] = {}

    def begin(self, index: int) -> None:
        """Record that choice `index` is sent to an engine."""
        self._choices[index] = _Times()

    def push(self, index: int, delta: TokenDelta) -> None:
        """Record a delta of a choice."""
        times = self._choices[index]
        if delta.tokens and not times.first_token:
            times.first_token = time.time_ns()
        if delta.attempt > len(times.resumptions):
            times.resumptions.append(time.time_ns())
        if delta.timings is not None:
            times.queue_s, times.num_resumed = delta.timings.queue_s, delta.timings.num_resumes
        if delta.finish is not None:
            times.ended = time.time_ns()

    def end(self, answers: list[Answer], model: str, reason: str) -> None:
        """Create the spans. reason: as in `aerie.cluster.http.metrics`; "" for success."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended = time.time_ns()
        headers = Headers(scope=self._scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = TraceContextTextMapPropagator().extract(carrier)
        path = route_path(self._scope)
        span = self._tracer.start_span(
            f"POST {path}",
            parent,
            trace.SpanKind.SERVER,
            self._attributes(answers, model, path),
            start_time=self._scope["state"].get(ARRIVED, ended),
        )
        if reason:
            span.set_attribute("error.type", reason)
            span.set_status(trace.Status(trace.StatusCode.ERROR, reason))
        if span.is_recording():
            below = trace.set_span_in_context(span, parent)
            for index, times in self._choices.items():
                self._phases(below, index, times, ended)
        span.end(ended)

    def _attributes(self, answers: list[Answer], model: str, path: str) -> dict[str, Any]:
        """Attributes by OpenTelemetry's conventions for generative models, where they exist."""
        cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
        return {
            "http.request.method": "POST",
            "http.route": path,
            "gen_ai.operation.name": "chat" if self._request.chat else "text_completion",
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": sum(map(len, self._request.prompts)),
            "gen_ai.usage.output_tokens": sum(answer.num_tokens for answer in answers),
            "gen_ai.response.finish_reasons": [answer.finish or "none" for answer in answers],
            "aerie.request_id": self._request_id,
            "aerie.cached_tokens": sum(cached),
            "aerie.streams": self._request.stream,
        }

    def _phases(self, parent: Any, index: int, times: _Times, ended: int) -> None:
        """Create the spans of one choice: queue, prefill, decode. A choice that ended early ends in its last phase."""
        last = times.ended or ended
        first = times.first_token or last
        sent = max([times.began_ns, *(came for came in times.resumptions if came < first)])  # to the last engine
        admitted = min(first, sent + int(times.queue_s * 1e9)) if times.first_token else last
        phases = [("queue", times.began_ns, admitted), ("prefill", admitted, first), ("decode", first, last)]
        for name, begin, end in phases:
            if end > begin:
                self._tracer.start_span(name, parent, attributes={"aerie.choice": index}, start_time=begin).end(end)
        for number, came in enumerate(times.resumptions, 1):
            attributes = {"aerie.choice": index, "aerie.attempt": number, "aerie.where": "another engine"}
            self._tracer.start_span("resumption", parent, attributes=attributes, start_time=came).end(came)
        if times.num_resumed:
            attributes = {"aerie.choice": index, "aerie.attempt": times.num_resumed, "aerie.where": "new workers"}
            self._tracer.start_span("resumption", parent, attributes=attributes, start_time=last).end(last)


class Tracing:
    """Sends a span for each request, by OpenTelemetry.

    provider: creates spans; None: tracing is off.
    """

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("aerie")

    def begin(self, scope: Scope, request: EdgeRequest, request_id: str) -> RequestTrace | None:
        """Return the trace of a new request; None if tracing is off."""
        return None if self._tracer is None else RequestTrace(self._tracer, scope, request, request_id)

    def close(self) -> None:
        """Send remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()


def make_tracing(config: TracingConfig, exporter: "SpanExporter | None" = None) -> Tracing:
    """Return tracing as configured. exporter: replaces OTLP's, and receives spans at once."""
    if not config.endpoint and exporter is None:
        return Tracing()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create({"service.name": config.service_name})
    provider = TracerProvider(ParentBased(TraceIdRatioBased(config.sample_ratio)), resource, shutdown_on_exit=False)
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=config.url)))
    return Tracing(provider)
