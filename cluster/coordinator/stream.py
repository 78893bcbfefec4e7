"""One request's stream: what is put into it goes with the connection's next message, one per ingress and step. Used by
`aerie.cluster.coordinator.request_streams`, in the loop's thread."""

import math
from dataclasses import dataclass

import msgspec

from aerie.cluster.transport.channel import IngressLink
from aerie.cluster.transport.messages import RequestTimings, SpeculationStats, TokenDelta
from aerie.workers.scheduling.request import FinishReason, RequestOutput


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
    if token_origins:
        drafted = tuple(position < output.num_drafted for position in range(len(output.tokens)))
        delta = msgspec.structs.replace(delta, drafted=drafted)
    return delta
