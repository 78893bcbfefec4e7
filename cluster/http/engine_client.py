"""The interface to engines: tokens for a prompt, and statistics. `aerie.cluster.http` uses only this protocol;
`aerie.cluster.ingress.remote_engines` implements it over Serve and ZeroMQ."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from aerie.cluster.transport.admin import AdminCall, AdminOutcome
from aerie.cluster.transport.messages import EngineStats, FlushOutcome, Refusal, TokenDelta
from aerie.workers.prompt_inputs import PromptInputs
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Owner


class EngineRefused(Exception):
    """No engine accepted the request; `refusal` says why, and when to try again."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.kind}: {refusal.message}")
        self.refusal = refusal


class EngineClient(Protocol):
    """An ingress's access to all engine replicas."""

    def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        request_id: str,
        running_stats: bool = False,
        token_origins: bool = False,
        output: Sequence[int] = (),
        owner: Owner = Owner(),  # noqa: B008 - immutable
        inputs: PromptInputs | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Generate a request's tokens: an async generator of deltas.

        running_stats: send statistics with every delta, not only with the last.
        token_origins: send `drafted` with every delta that has tokens.
        output: tokens that the answer already has; they count against `sampling.max_tokens` and are not sent again.
        owner: whose request it is.
        inputs: inputs of the prompt besides its tokens.
        Raises `EngineRefused` before the first delta if no engine accepts the request. The last delta has `finish`;
        later failures set finish="error" instead of raising. Closing the generator (`aclose`, or cancelling the waiting
        task) before the last delta aborts the request.
        """
        ...

    async def stats(self) -> list[EngineStats]:
        """Return the statistics of every known engine replica, in any state. Does not raise while engines are down."""
        ...

    async def health(self) -> tuple[list[EngineStats], str]:
        """Return the last known statistics, and why a request sent now would not reach any engine's ranks, or "". Takes
        at most half a second."""
        ...

    def adapters(self) -> dict[str, str]:
        """Return the folders of the LoRA adapters that an engine has, by name."""
        ...

    async def administer(self, call: AdminCall) -> list[AdminOutcome]:
        """Let every engine do what an administrator asks. Return one result per known engine replica."""
        ...

    async def flush_cache(self) -> list[FlushOutcome]:
        """Empty every engine's prefix cache. Return one result per known engine replica."""
        ...
