"""What the HTTP edge needs from an engine: tokens for a prompt, and statistics.

The edge is written against this protocol and nothing else; `cluster.ingress.remote_engines` implements it over Serve
and ZeroMQ.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from cluster.transport.messages import EngineStats, FlushOutcome, Refusal, TokenDelta
from workers.scheduling.plan import SamplingParams


class EngineRefused(Exception):
    """The engine did not take the request; `refusal` says why and when to come again."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.kind}: {refusal.message}")
        self.refusal = refusal


class EngineClient(Protocol):
    """The way from an ingress to all engine replicas."""

    def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        request_id: str,
        running_stats: bool = False,
        token_origins: bool = False,
        output: Sequence[int] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        """The request's tokens as they are made, an async generator. running_stats: with statistics in every delta, not
        only in the last. token_origins: with `drafted` in every delta that has tokens. output: tokens that the answer
        has already; they count against `sampling.max_tokens` and do not come again.

        Raises `EngineRefused` before the first delta if no engine takes it. The last delta has `finish` set; an engine
        that fails after that point says so with finish="error", not with an exception. Closing the generator
        (`aclose`, or cancelling the task that waits for it) before the last delta aborts the request on the engine.
        """
        ...

    async def stats(self) -> list[EngineStats]:
        """One entry per engine replica that is known, whatever its state; raises nothing while engines are down."""
        ...

    async def health(self) -> tuple[list[EngineStats], str]:
        """Within half a second: what `stats` says or said last, and why a request sent now would not get through to
        the ranks of any engine, or ""."""
        ...

    async def flush_cache(self) -> list[FlushOutcome]:
        """Empty every engine's prefix cache; one entry per engine replica that is known."""
        ...
