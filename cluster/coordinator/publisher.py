"""Tokens out: one message per ingress and step. Used by `cluster.coordinator.request_streams`, in the loop's thread."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cluster.transport.channel import Inbox, IngressLink
from cluster.transport.messages import RequestTimings, SpeculationStats, TokenBatch, TokenDelta
from workers.scheduling.request import FinishReason, RequestOutput


@dataclass(slots=True)
class Stream:
    """Destination of a request's tokens.

    ingress: the request's connection.
    running_stats, token_origins: as in `GenerateRequest`.
    queued_s: time of queueing; infinity for requests that have run or are resumed, which may wait without limit.
    num_resumes: number of worker groups that the request has lost.
    num_crashes: steps with the request that hung or crashed, on any engine.
    """

    request_id: str
    ingress: IngressLink
    running_stats: bool = False
    token_origins: bool = False
    queued_s: float = math.inf
    num_resumes: int = 0
    num_crashes: int = 0


class TokenPublisher:
    """Sends the step's deltas to each ingress without blocking the loop.

    on_lost: called by `flush` with a connection that accepts no messages, and the reason.
    """

    def __init__(self, inbox: Inbox, num_draft_tokens: int, on_lost: Callable[[IngressLink, str], None]) -> None:
        self._inbox = inbox
        self._num_draft_tokens = num_draft_tokens
        self._on_lost = on_lost

    def put(self, stream: Stream, output: RequestOutput) -> None:
        """Add a request's new tokens to the next `flush`."""
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
        """Report with the next `flush` that a request is queued, so that its ingress does not try another engine."""
        stream.ingress.deltas.append(TokenDelta(request_id=stream.request_id, tokens=()))

    def put_crashes(self, stream: Stream) -> None:
        """Add the number of hung or crashed steps of a request to the next `flush`: its ingress passes it on to the
        next engine."""
        stream.ingress.deltas.append(TokenDelta(stream.request_id, (), num_crashes=stream.num_crashes))

    def put_end(self, stream: Stream, reason: FinishReason, error: str | None) -> None:
        """Add the end of a request, without a token, to the next `flush`."""
        delta = TokenDelta(request_id=stream.request_id, tokens=(), finish=reason.value, error=error)
        stream.ingress.deltas.append(delta)

    def flush(self) -> None:
        """Send all additions since the last call, one message per ingress."""
        for link in list(self._inbox.links.values()):
            if not link.deltas:
                continue
            deltas, link.deltas = link.deltas, []
            if reason := self._inbox.send(link, TokenBatch(tuple(deltas))):
                self._on_lost(link, reason)
