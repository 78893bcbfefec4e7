"""The coordinator's side towards clients: requests in from ingresses, tokens and ends out.

Used by `cluster.coordinator.loop`, in its thread.
"""

import logging
import math
from array import array
from collections.abc import Callable, Sequence

from cluster.coordinator.publisher import Stream, TokenPublisher
from cluster.coordinator.state_publisher import StatePublisher
from cluster.transport.channel import Context, Inbox, IngressLink
from cluster.transport.encoding import BadMessageError, decode
from cluster.transport.messages import Abort, GenerateRequest, GenerateSummary, Probe, Refusal, Refused, Subscribe
from cluster.transport.reactor import Reactor
from cluster.transport.sockets import Transport
from workers.scheduling.plan import unpack_i32
from workers.scheduling.request import FinishReason, QueueFullError, Request, RequestOutput
from workers.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_CRASHES = 1  # of steps with a request, after which it is still resumed
_MAX_MESSAGES_PER_TURN = 64  # so that a flood of requests does not hold up the running ones


class RequestStreams:
    """A request that the scheduler has taken has one stream here until its end was sent to its ingress, on
    both ways; exactly one end is sent.

    is_draining: set it to refuse new requests. is_leaving: and this too, if another engine takes this one's place.
    states: for the same ingresses.
    queue_timeout_s: a request that would wait longer is refused, and one that has is given up.
    fault: why no request would get through now, or "".
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
    ) -> None:
        self.is_draining = False
        self.is_leaving = False
        self._clock = clock
        self._queue_timeout_s = queue_timeout_s
        self._fault = fault
        self._scheduler = scheduler
        self._reactor = reactor
        self._streams: dict[str, Stream] = {}
        self._inbox = Inbox(context, transport, f"{engine_id}-inbox")
        reactor.watch(self._inbox.socket, self._read_inbox)
        self.states = StatePublisher(engine_id, scheduler, clock, self._inbox.send)
        self._publisher = TokenPublisher(
            context, transport, reactor, engine_id, scheduler.num_draft_tokens, clock, self._ingress_gone
        )

    @property
    def endpoint(self) -> str:
        """Of the inbox."""
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
                self._publisher.put(stream, output)
                if output.finish_reason is not None:
                    del self._streams[request.request_id]
                    self._send_summary(stream, request, output.finish_reason, output.error)
            except Exception as error:  # a bug that one request meets must not end all others
                logger.exception("request %s failed while its tokens were sent", request.request_id)
                self._end(request.request_id, FinishReason.ERROR, f"{type(error).__name__}: {error}")
        self._publisher.flush()

    def lost_workers(
        self, requests: Sequence[Request], blamed: Sequence[Request], max_resumes: int, reason: str
    ) -> None:
        """The worker group that ran `requests` is lost. Those that were resumed `max_resumes` times already end with an
        error, and so do those of `blamed` of which a step hung or crashed before; the others stay."""
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
                self._publisher.put_crashes(stream)
        self._publisher.flush()

    def fail_all(self, reason: str) -> None:
        """End every request with an error."""
        for request_id in list(self._streams):
            self._end(request_id, FinishReason.ERROR, reason)
        self._publisher.flush()

    def check_connections(self) -> None:
        """Give up ingresses that could not be reached; to be called now and then."""
        self._publisher.check_connections()

    def check_waiting(self) -> None:
        """Refuse what has waited too long for its first step, as if it had just come; to be called now and then."""
        overdue_s = self._clock() - self._queue_timeout_s
        for stream in [stream for stream in self._streams.values() if stream.queued_s < overdue_s]:
            self._scheduler.abort(stream.request_id, FinishReason.ERROR)
            del self._streams[stream.request_id]
            message = f"waited {self._queue_timeout_s:g} s in the queue (engine.queue_timeout_s)"
            self._inbox.send(stream.asker, Refused(stream.request_id, self._queue_full(message)))

    def close(self, linger_ms: int) -> None:
        """Close all sockets; messages still queued have `linger_ms` to leave."""
        self._publisher.close(linger_ms)
        self._reactor.forget(self._inbox.socket)
        self._inbox.close(linger_ms)

    def _read_inbox(self) -> None:
        for _ in range(_MAX_MESSAGES_PER_TURN):
            received = self._inbox.receive()
            if received is None:
                return
            sender, raw = received
            try:
                message = decode(raw)
            except BadMessageError:
                logger.exception("a message from an ingress was dropped")
                continue
            if isinstance(message, GenerateRequest):
                self.states.received(sender)
                refusal = self._submit(sender, message)
                if refusal is not None:
                    self._inbox.send(sender, Refused(message.request_id, refusal))
            elif isinstance(message, Probe):
                self._answer_probe(sender, message)
            elif isinstance(message, Abort):
                self._end(message.request_id, FinishReason.ABORT, None)
            elif isinstance(message, Subscribe):
                self.states.subscribe(sender, message)
            else:
                logger.error("a %s from an ingress was dropped", type(message).__name__)

    def _submit(self, sender: bytes, message: GenerateRequest) -> Refusal | None:
        """Queue a request, or say why not. Nothing that one request holds may end the loop."""
        if self.is_draining:
            return Refusal("leaving" if self.is_leaving else "not_ready", "the engine is draining")
        wait_s = None if message.resumed else self._scheduler.admission.wait_s()
        if wait_s is not None and wait_s > self._queue_timeout_s:
            return self._queue_full(
                f"what waits takes {wait_s:.0f} s, more than engine.queue_timeout_s={self._queue_timeout_s:g}"
            )
        try:
            request = Request(
                message.request_id,
                array("i", message.prompt),
                message.sampling,
                output=unpack_i32(message.output).tolist(),
            )
            ingress = self._publisher.open(message.reply_to)
            self._scheduler.submit(request, resumed=message.resumed)
            self._scheduler.stats.num_resumed += message.resumed or bool(request.output)
        except QueueFullError as error:
            return self._queue_full(str(error))
        except ValueError as error:  # RequestTooLargeError is one
            return Refusal("too_large", str(error))
        except Exception as error:
            logger.exception("request %s could not be queued", message.request_id)
            return Refusal("not_ready", f"{type(error).__name__}: {error}")
        queued_s = math.inf if message.resumed else self._clock()
        stream = Stream(message.request_id, sender, ingress, message.running_stats, message.token_origins, queued_s)
        stream.num_crashes = message.num_crashes
        self._streams[message.request_id] = stream
        self._publisher.put_taken(stream)
        return None

    def _answer_probe(self, sender: bytes, probe: Probe) -> None:
        """As a request would be answered that has nothing to generate."""
        fault = "the engine is draining" if self.is_draining else self._fault()
        try:
            ingress = self._publisher.open(probe.reply_to)
        except ValueError as error:
            fault = str(error)
        if fault:
            kind = "leaving" if self.is_leaving else "not_ready"
            self._inbox.send(sender, Refused(probe.request_id, Refusal(kind, fault)))
            return
        stream = Stream(probe.request_id, sender, ingress, False)
        self._publisher.put_end(stream, FinishReason.STOP, None)
        self._send_summary(stream, None, FinishReason.STOP, None)

    def slot_wait_s(self) -> float:
        """Until what waits has been worked off, as far as it is known."""
        return (self._scheduler.admission.wait_s() or 0.0) if self._scheduler.num_waiting else 0.0

    def _queue_full(self, message: str) -> Refusal:
        return Refusal("queue_full", message, self._scheduler.admission.retry_after_s())

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        """End a request in whatever state; an unknown one has ended already."""
        request = self._scheduler.abort(request_id, reason)
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        self._publisher.put_end(stream, reason, error)
        self._send_summary(stream, request, reason, error)

    def _send_summary(self, stream: Stream, request: Request | None, reason: FinishReason, error: str | None) -> None:
        num_output = len(request.output) if request is not None else 0
        self._inbox.send(stream.asker, GenerateSummary(stream.request_id, reason.value, num_output, error))

    def _ingress_gone(self, link: IngressLink, reason: str) -> None:
        for stream in [stream for stream in self._streams.values() if stream.ingress is link]:
            self._end(stream.request_id, FinishReason.ABORT, reason)
