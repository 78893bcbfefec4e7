"""The coordinator's side towards clients, in the thread of `aerie.cluster.coordinator.loop`: requests in from
ingresses, tokens and ends out. What is put into a request's stream goes with the connection's next message, one per
ingress and step."""

import logging
import math
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from aerie.cluster.coordinator.state_publisher import StatePublisher
from aerie.cluster.transport.channel import Context, Inbox, IngressLink
from aerie.cluster.transport.encoding import BadMessageError, decode
from aerie.cluster.transport.messages import (
    MAX_CRASHES,
    Abort,
    EngineState,
    GenerateRequest,
    Probe,
    Refusal,
    Refused,
    RequestTimings,
    SpeculationStats,
    Subscribe,
    TokenBatch,
    TokenDelta,
)
from aerie.cluster.transport.reactor import Reactor
from aerie.cluster.transport.sockets import Transport
from aerie.workers.scheduling.adapters import Adapter
from aerie.workers.scheduling.plan import unpack_i32
from aerie.workers.scheduling.queues.tenants import Tenant
from aerie.workers.scheduling.request import FinishReason, QueueFullError, Request, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class Stream:
    """Destination of a request's tokens. `RequestStreams` sends what is put here.

    ingress: the request's connection.
    running_stats, token_origins: as in `GenerateRequest`.
    queued_s: time of queueing; infinity for requests that have run or are resumed, which may wait without limit.
    client_id: the client's id of the request.
    num_resumes: number of worker groups that the request has lost.
    num_crashes: steps with the request that hung or crashed, on any engine.
    """

    request_id: str
    ingress: IngressLink
    running_stats: bool = False
    token_origins: bool = False
    queued_s: float = math.inf
    client_id: str = ""
    num_resumes: int = 0
    num_crashes: int = 0

    def put(self, output: RequestOutput, num_draft_tokens: int, version: str = "") -> None:
        """Add new tokens. num_draft_tokens: see `token_delta`. version: of the weights that wrote them; "": those of
        the start."""
        delta = token_delta(output, self.running_stats, self.token_origins, num_draft_tokens, self.num_resumes)
        if version and output.tokens:
            delta = msgspec.structs.replace(delta, weight_versions=((version, len(output.tokens)),))
        self.ingress.deltas.append(delta)

    def put_taken(self) -> None:
        """Report that the request is queued, so that its ingress does not try another engine."""
        self.ingress.deltas.append(TokenDelta(self.request_id, ()))

    def put_crashes(self) -> None:
        """Add the number of hung or crashed steps: the ingress passes it on to the next engine."""
        self.ingress.deltas.append(TokenDelta(self.request_id, (), num_crashes=self.num_crashes))

    def put_end(self, reason: FinishReason, error: str | None) -> None:
        """Add the end, without a token."""
        self.ingress.deltas.append(TokenDelta(self.request_id, (), finish=reason.value, error=error))


def token_delta(
    output: RequestOutput, running_stats: bool, token_origins: bool, num_draft_tokens: int, num_resumes: int = 0
) -> TokenDelta:
    """Return the message of a step's output.

    running_stats, token_origins, num_resumes: see `Stream`.
    num_draft_tokens: drafted per round of the default shape.
    """
    request, reason = output.request, output.finish_reason
    delta = TokenDelta(request.request_id, tuple(output.tokens), None, output.logprobs, output.error)
    if output.prompt_logprobs is not None:
        delta = msgspec.structs.replace(delta, prompt_logprobs=(output.prompt_logprobs,))
    if reason is not None or running_stats:
        histogram = tuple(request.acceptance_histogram)
        delta = msgspec.structs.replace(
            delta,
            finish=None if reason is None else reason.value,
            cached_tokens=request.cached_tokens,
            speculation=(
                SpeculationStats(sum(histogram), histogram, num_draft_tokens, request.num_draft_tokens)
                if histogram
                else None
            ),
            timings=RequestTimings(request.queue_s, num_resumes),
        )
    if output.routed_experts:
        delta = msgspec.structs.replace(delta, routed_experts=output.routed_experts)
    if token_origins:
        drafted = tuple(position < output.num_drafted for position in range(len(output.tokens)))
        delta = msgspec.structs.replace(delta, drafted=drafted)
    return delta


logger = logging.getLogger(__name__)

_MAX_MESSAGES_PER_PASS = 64  # so that many new requests do not delay running ones


class RequestStreams:
    """The streams of all accepted requests. Each stream sends exactly one end to its ingress, and exists until then. If
    an ingress disconnects or does not read, all its requests are aborted.

    is_draining: set it to refuse new requests.
    is_paused: set it to refuse new requests until it is unset. Probes succeed.
    ends_pause: the route that ends the pause.
    is_leaving: also set it if another engine replaces this one.
    states: publishes the engine's state to the same ingresses.
    queue_timeout_s: requests with a longer expected wait for their first step are refused; those that have waited
        longer end.
    fault: why requests would fail now, or "".
    identity: see `aerie.cluster.plan.identity`.
    """

    def __init__(
        self,
        context: Context,
        transport: Transport,
        reactor: Reactor,
        engine_id: str,
        scheduler: Scheduler,
        clock: Callable[[], float],
        queue_timeout_s: float = math.inf,
        fault: Callable[[], str] = lambda: "",
        identity: str = "",
    ) -> None:
        self.is_draining = False
        self.is_leaving = False
        self.is_paused = False
        self.ends_pause = "/resume"
        self._clock = clock
        self._queue_timeout_s = queue_timeout_s
        self._fault = fault
        self._scheduler = scheduler
        self._reactor = reactor
        self._streams: dict[str, Stream] = {}
        self._inbox = Inbox(context, transport, f"{engine_id}-inbox")
        reactor.watch(self._inbox.socket, self._read_inbox)
        self.states = StatePublisher(engine_id, scheduler, clock, self._send, identity)
        self._num_draft_tokens = scheduler.num_draft_tokens

    @property
    def endpoint(self) -> str:
        """Endpoint of the inbox."""
        return self._inbox.endpoint

    @property
    def is_empty(self) -> bool:
        """Whether no request is unfinished."""
        return not self._streams

    def publish(self, outputs: Sequence[RequestOutput]) -> None:
        """Send a step's tokens, one message per ingress."""
        for output in outputs:
            request = output.request
            stream = self._streams.get(request.request_id)
            if stream is None:
                continue  # ended since the step
            stream.queued_s = math.inf
            try:
                version = self._scheduler.weights.version if output.version is None else output.version
                stream.put(output, self._num_draft_tokens, version)
                if output.finish_reason is not None:
                    del self._streams[request.request_id]
            except Exception as error:  # a bug in one request must not end all others
                logger.exception("request %s failed while its tokens were sent", request.request_id)
                self._end(request.request_id, FinishReason.ERROR, f"{type(error).__name__}: {error}")
        self._flush()

    def lost_workers(
        self, requests: Sequence[Request], blamed: Sequence[Request], max_resumes: int, reason: str
    ) -> None:
        """Resume or end `requests` of a lost worker group. Requests that were resumed `max_resumes` times end with an
        error, and so do requests in `blamed` that were in a hung or crashed step before."""
        suspects = {request.request_id for request in blamed}
        if suspects:
            logger.warning("the step that hung or crashed ran requests %s", ", ".join(sorted(suspects)))
        for request in requests:
            stream = self._streams[request.request_id]
            stream.num_resumes += 1
            stream.num_crashes += request.request_id in suspects
            if stream.num_resumes > max_resumes:
                times = f" (after {max_resumes} resumptions)" if max_resumes else ""
                self._end(request.request_id, FinishReason.ERROR, reason + times)
            elif stream.num_crashes > MAX_CRASHES:
                logger.error("request %s is not resumed again: its steps hung or crashed twice", request.request_id)
                self._end(request.request_id, FinishReason.ERROR, f"{reason} (its steps hung or crashed twice)")
            else:
                self._scheduler.stats.num_resumed += 1
                stream.put_crashes()
        self._flush()

    def fail_all(self, reason: str) -> None:
        """End every request with an error."""
        for request_id in list(self._streams):
            self._end(request_id, FinishReason.ERROR, reason)
        self._flush()

    def adapter_lost(self, adapter: Adapter, reason: str) -> None:
        """End the requests of an adapter with an error."""
        for request_id in self._scheduler.queues.requests_with(adapter):
            self._end(request_id, FinishReason.ERROR, reason)
        self._flush()

    def check_waiting(self) -> None:
        """Refuse requests that have waited too long for their first step. Call it regularly."""
        overdue_s = self._clock() - self._queue_timeout_s
        for stream in [stream for stream in self._streams.values() if stream.queued_s < overdue_s]:
            if self._scheduler.queues.has_started(stream.request_id):
                stream.queued_s = math.inf
                continue
            if self._streams.pop(stream.request_id, None) is None:
                continue  # its ingress was lost during another refusal
            request = self._scheduler.abort(stream.request_id, FinishReason.ERROR)
            assert request is not None, "a stream has a request until its end"
            tenant = self._scheduler.queues.tenants.of(request.owner)
            message = f"waited {self._queue_timeout_s:g} s in the queue (engine.queue_timeout_s)"
            self._send(stream.ingress, Refused(stream.request_id, self._queue_full(message, tenant)))

    def abort(self, client_ids: Collection[str] | None = None) -> int:
        """Abort the requests with these ids of their clients; all if None. Return their number."""
        request_ids = [
            stream.request_id
            for stream in self._streams.values()
            if client_ids is None or stream.client_id in client_ids
        ]
        for request_id in request_ids:
            self._end(request_id, FinishReason.ABORT, None)
        self._flush()
        return len(request_ids)

    def close(self, linger_ms: int) -> None:
        """Close the inbox; queued messages are sent for up to `linger_ms`."""
        self._reactor.forget(self._inbox.socket)
        self._inbox.close(linger_ms)

    def _read_inbox(self) -> None:
        """Handle the ingresses' messages that have arrived, at most `_MAX_MESSAGES_PER_PASS`."""
        for _ in range(_MAX_MESSAGES_PER_PASS):
            received = self._inbox.receive()
            if received is None:
                return
            ingress, raw = received
            try:
                message = decode(raw)
            except BadMessageError:
                logger.exception("a message from an ingress was dropped")
                continue
            if isinstance(message, GenerateRequest):
                self.states.count_request(ingress)
                refusal = self._submit(ingress, message)
                if refusal is not None:
                    self._send(ingress, Refused(message.request_id, refusal))
            elif isinstance(message, Probe):
                self._answer_probe(ingress, message)
            elif isinstance(message, Abort):
                stream = self._streams.get(message.request_id)
                if stream is not None and stream.ingress is ingress:
                    self._end(message.request_id, FinishReason.ABORT, None)
            elif isinstance(message, Subscribe):
                self.states.subscribe(ingress)
            else:
                logger.error("a %s from an ingress was dropped", type(message).__name__)

    def _submit(self, ingress: IngressLink, message: GenerateRequest) -> Refusal | None:
        """Queue or refuse a request. No content of a request may end the loop."""
        if self.is_draining:
            return Refusal("leaving" if self.is_leaving else "not_ready", "the engine is draining")
        if self.is_paused:
            return Refusal("not_ready", f"the engine is paused; POST {self.ends_pause} ends that")
        tenant = self._scheduler.queues.tenants.of(message.owner)
        wait_s = None if message.resumed else self._scheduler.admission.wait_s(tenant)
        if wait_s is not None and wait_s > self._queue_timeout_s:
            return self._queue_full(
                f"a new request would wait {wait_s:.0f} s, more than engine.queue_timeout_s={self._queue_timeout_s:g}",
                tenant,
            )
        try:
            request = Request(
                message.request_id,
                array("i", message.prompt),
                message.sampling,
                output=unpack_i32(message.output).tolist(),
                owner=message.owner,
                inputs=message.inputs,
            )
            self._scheduler.submit(request, resumed=message.resumed)
            self._scheduler.stats.num_resumed += message.resumed or bool(request.output)
        except QueueFullError as error:
            return self._queue_full(str(error), tenant)
        except ValueError as error:  # such as RequestTooLargeError
            return Refusal("too_large", str(error))
        except Exception as error:
            logger.exception("request %s could not be queued", message.request_id)
            return Refusal("not_ready", f"{type(error).__name__}: {error}")
        queued_s = math.inf if message.resumed else self._clock()
        client_id = message.owner.request_id
        stream = Stream(message.request_id, ingress, message.running_stats, message.token_origins, queued_s, client_id)
        stream.num_crashes = message.num_crashes
        self._streams[message.request_id] = stream
        stream.put_taken()
        return None

    def _answer_probe(self, ingress: IngressLink, probe: Probe) -> None:
        """Answer like a request that generates nothing."""
        fault = "the engine is draining" if self.is_draining else self._fault()
        if fault:
            kind = "leaving" if self.is_leaving else "not_ready"
            self._send(ingress, Refused(probe.request_id, Refusal(kind, fault)))
        else:
            Stream(probe.request_id, ingress).put_end(FinishReason.STOP, None)

    def slot_wait_s(self) -> float:
        """Return the expected seconds until a new request gets a slot (`EngineState.wait_s`)."""
        scheduler = self._scheduler
        wait_s, speed = scheduler.admission.wait_s(), scheduler.prefill_tokens_per_s()
        return max(0.0, wait_s - scheduler.backlog_tokens / speed) if wait_s is not None and speed else 0.0

    def _queue_full(self, message: str, tenant: Tenant) -> Refusal:
        return Refusal("queue_full", message, self._scheduler.admission.retry_after_s(tenant, self._queue_timeout_s))

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        """End a request in any state. Unknown ones have ended already."""
        self._scheduler.abort(request_id, reason)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.put_end(reason, error)

    def _flush(self) -> None:
        """Send what was put into streams since the last call, one message per ingress."""
        for link in list(self._inbox.links.values()):
            if not link.deltas:
                continue
            deltas, link.deltas = link.deltas, []
            if reason := self._inbox.send(link, TokenBatch(tuple(deltas))):
                self._ingress_lost(link, reason)

    def _send(self, ingress: IngressLink, message: Refused | EngineState) -> None:
        if reason := self._inbox.send(ingress, message):
            self._ingress_lost(ingress, reason)

    def _ingress_lost(self, ingress: IngressLink, reason: str) -> None:
        """Abort the requests of an ingress, because messages to it were lost. If it still runs, it notices the loss by
        the number of its next state message."""
        if ingress.is_gone:
            self.states.forget(ingress)
        lost = [stream.request_id for stream in self._streams.values() if stream.ingress is ingress]
        if lost:
            logger.warning("an ingress is lost, with %d requests: %s", len(lost), reason)
        for request_id in lost:
            del self._streams[request_id]
            self._scheduler.abort(request_id, FinishReason.ABORT)
