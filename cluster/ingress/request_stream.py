"""Tokens received for one request from one engine. Filled by `aerie.cluster.ingress.engine_link`."""

import asyncio
from array import array
from collections.abc import Callable

import msgspec

from aerie.cluster.transport.messages import TokenDelta, add_versions
from aerie.workers.scheduling.plan import PromptLogprobs, TokenLogprobs


class RequestStream:
    """A request's tokens in order, then its end: a delta with `finish`, or `failure`.

    Unread tokens are joined to one delta. So a slow reader costs only the memory of its tokens, and no queue can
    overflow.

    changed: set when there is a delta to take, or a failure; `take` clears it.
    is_taken: the engine has queued the request.
    num_crashes: steps with the request that hung or crashed on this engine.
    failure: why no more tokens come; earlier ones can still be taken.
    """

    def __init__(self, on_close: Callable[["RequestStream"], None] = lambda stream: None) -> None:
        self.changed = asyncio.Event()
        self.is_taken = False
        self.num_crashes = 0
        self.failure: Exception | None = None
        self._on_close = on_close
        self._tokens = array("i")  # four bytes per token instead of a list's 36
        self._logprobs: list[TokenLogprobs] = []
        self._of_prompt: list[PromptLogprobs] = []
        self._drafted: list[bool] = []
        self._versions: list[tuple[str, int]] = []
        self._last: TokenDelta | None = None

    def put(self, delta: TokenDelta) -> None:
        """Add a received delta."""
        self.is_taken = True
        self.num_crashes = max(self.num_crashes, delta.num_crashes)
        self._tokens.extend(delta.tokens)
        self._logprobs.extend(delta.logprobs or ())
        self._of_prompt.extend(delta.prompt_logprobs)
        self._drafted.extend(delta.drafted)
        if delta.tokens:
            add_versions(self._versions, delta)
        self._last = delta
        self.changed.set()

    def fail(self, failure: Exception) -> None:
        """End the stream with a failure."""
        self.failure = failure
        self.changed.set()

    def take(self, request_id: str) -> TokenDelta | None:
        """Return all unread tokens as one delta, with the client's request id; None without any."""
        last, self._last = self._last, None
        self.changed.clear()
        if last is None or (last.finish is None and not self._tokens and not self._of_prompt):
            return None  # no tokens, perhaps only the confirmation that the request is queued
        tokens, self._tokens = tuple(self._tokens), array("i")
        logprobs, self._logprobs = tuple(self._logprobs), []
        of_prompt, self._of_prompt = tuple(self._of_prompt), []
        drafted, self._drafted = tuple(self._drafted), []
        versions, self._versions = tuple(self._versions), []
        return msgspec.structs.replace(
            last,
            request_id=request_id,
            tokens=tokens,
            logprobs=logprobs or None,
            prompt_logprobs=of_prompt,
            drafted=drafted,
            weight_versions=versions if any(version for version, _ in versions) else (),
        )

    def close(self) -> None:
        """Stop reading. Aborts the request unless it has ended."""
        self._on_close(self)
