"""Tokens out: one message per ingress and step. Used by `cluster.coordinator.request_streams`, in the loop's thread."""

import math
from collections.abc import Callable

import msgspec

from cluster.transport.channel import Context, IngressLink
from cluster.transport.messages import RequestTimings, SpeculationStats, TokenBatch, TokenDelta
from cluster.transport.reactor import Reactor
from cluster.transport.sockets import Transport
from workers.scheduling.request import FinishReason, RequestOutput

CONNECT_TIMEOUT_S = 10.0


class Stream:
    """Where a request's tokens go.

    asker: the ingress's connection on which it came, which gets the summary.
    ingress: its other one, which gets the tokens.
    running_stats, token_origins: as in `GenerateRequest`.
    queued_s: when it was queued; infinity once it has run or is resumed, for those may wait for ever.
    num_resumes: worker groups it has lost.
    num_crashes: steps with it that hung or crashed, here or elsewhere.
    """

    __slots__ = (
        "request_id",
        "asker",
        "ingress",
        "running_stats",
        "token_origins",
        "queued_s",
        "num_resumes",
        "num_crashes",
    )

    def __init__(
        self,
        request_id: str,
        asker: bytes,
        ingress: IngressLink,
        running_stats: bool,
        token_origins: bool = False,
        queued_s: float = math.inf,
    ) -> None:
        self.request_id = request_id
        self.asker = asker
        self.ingress = ingress
        self.running_stats = running_stats
        self.token_origins = token_origins
        self.queued_s = queued_s
        self.num_resumes = 0
        self.num_crashes = 0


class TokenPublisher:
    """Links to ingresses, opened with their first request, and the step's deltas for each.

    An ingress that closes its socket, never opens it, or does not read is lost: on_gone is called with its link and
    the reason, in the reactor's thread. It never makes the loop wait.
    """

    def __init__(
        self,
        context: Context,
        transport: Transport,
        reactor: Reactor,
        source: str,
        num_draft_tokens: int,
        clock: Callable[[], float],
        on_gone: Callable[[IngressLink, str], None],
    ) -> None:
        self._context = context
        self._transport = transport
        self._reactor = reactor
        self._source = source
        self._num_draft_tokens = num_draft_tokens
        self._clock = clock
        self._on_gone = on_gone
        self._links: dict[str, IngressLink] = {}
        self._sequences: dict[str, int] = {}  # of links that were closed: a returning ingress must see the gap
        self._unconnected: dict[str, float] = {}  # endpoint -> when its link was opened

    def open(self, endpoint: str) -> IngressLink:
        """The link to an ingress; raises ValueError for an endpoint that cannot be."""
        link = self._links.get(endpoint)
        if link is None:
            link = IngressLink(self._context, self._transport, endpoint, self._sequences.get(endpoint, 0))
            self._links[endpoint] = link
            self._unconnected[endpoint] = self._clock()
            self._reactor.watch(link.monitor.socket, lambda: self._check(link))
        return link

    def put(self, stream: Stream, output: RequestOutput) -> None:
        """A request's new tokens, for the next `flush`."""
        request, reason = output.request, output.finish_reason
        delta = TokenDelta(stream.request_id, tuple(output.tokens), None, output.logprobs, output.error)
        if output.prompt_logprobs is not None:
            delta = msgspec.structs.replace(delta, prompt_logprobs=(output.prompt_logprobs,))
        if reason is not None or stream.running_stats:
            histogram = tuple(request.acceptance_histogram)
            delta = msgspec.structs.replace(
                delta,
                finish=None if reason is None else reason.value,
                cached_tokens=request.cached_tokens,
                speculation=(
                    SpeculationStats(sum(histogram), histogram, self._num_draft_tokens, request.num_draft_tokens)
                    if histogram
                    else None
                ),
                timings=RequestTimings(request.queue_s, stream.num_resumes),
            )
        if stream.token_origins:
            drafted = tuple(position < output.num_drafted for position in range(len(output.tokens)))
            delta = msgspec.structs.replace(delta, drafted=drafted)
        stream.ingress.deltas.append(delta)

    def put_taken(self, stream: Stream) -> None:
        """That a request is queued, for the next `flush`: its ingress looks for another engine if it hears nothing."""
        stream.ingress.deltas.append(TokenDelta(request_id=stream.request_id, tokens=()))

    def put_crashes(self, stream: Stream) -> None:
        """How many steps with a request hung or crashed, for the next `flush`: its ingress tells the next engine."""
        stream.ingress.deltas.append(TokenDelta(stream.request_id, (), num_crashes=stream.num_crashes))

    def put_end(self, stream: Stream, reason: FinishReason, error: str | None) -> None:
        """A request that ends without a token, for the next `flush`."""
        delta = TokenDelta(request_id=stream.request_id, tokens=(), finish=reason.value, error=error)
        stream.ingress.deltas.append(delta)

    def flush(self) -> None:
        """Send what was put since the last time, one message per ingress."""
        for link in list(self._links.values()):
            if not link.deltas:
                continue
            deltas, link.deltas = link.deltas, []
            if not link.send(TokenBatch(self._source, link.sequence, tuple(deltas))):
                self._drop(link, "it does not read its tokens")

    def check_connections(self) -> None:
        """Give up ingresses that could not be reached; to be called now and then."""
        overdue_s = self._clock() - CONNECT_TIMEOUT_S
        for endpoint, opened_s in list(self._unconnected.items()):
            link = self._links[endpoint]
            if link.monitor.was_connected:
                del self._unconnected[endpoint]
            elif opened_s < overdue_s:
                self._drop(link, f"no connection within {CONNECT_TIMEOUT_S:g} s")

    def close(self, linger_ms: int = 0) -> None:
        """Close all links."""
        for link in list(self._links.values()):
            self._close(link, linger_ms)

    def _check(self, link: IngressLink) -> None:
        reason = link.monitor.check()
        if reason is not None:
            self._drop(link, reason)

    def _drop(self, link: IngressLink, reason: str) -> None:
        self._close(link, 0)
        self._on_gone(link, f"ingress {link.endpoint} is gone: {reason}")

    def _close(self, link: IngressLink, linger_ms: int) -> None:
        self._reactor.forget(link.monitor.socket)
        del self._links[link.endpoint]
        self._unconnected.pop(link.endpoint, None)
        self._sequences[link.endpoint] = link.sequence
        link.close(linger_ms)
