"""The attempts of one request on engines, the tokens received from each, and whether to try again. Pure; used by
`aerie.cluster.ingress.remote_engines`, filled by `aerie.cluster.ingress.engine_links`."""

import asyncio
from array import array
from collections.abc import Callable

import msgspec

from aerie.cluster.transport.messages import MAX_CRASHES, Refusal, TokenDelta, add_versions
from aerie.workers.scheduling.plan import PromptLogprobs, SamplingParams, TokenLogprobs

NEW_ATTEMPTS = 2  # maximum for a request that no engine has accepted
RESUMED_ATTEMPTS = 3  # maximum for a request that an engine had accepted
RETRY_AFTER_S = 4.0  # Retry-After if there was no engine


class EngineFailed(Exception):
    """A request's engine failed, or some of the request's tokens were lost.

    had_taken: the engine had queued the request, or the request was on its way when the engine failed.
    is_hung: a step of the engine has been running for too long.
    num_crashes: steps with this request that the engine reported as hung or crashed.
    """

    def __init__(self, reason: str, had_taken: bool, is_hung: bool = False) -> None:
        super().__init__(reason)
        self.had_taken = had_taken
        self.is_hung = is_hung
        self.num_crashes = 0


class Attempts:
    """The attempts of one request.

    num_attempts: attempts so far.
    delivered: tokens sent to the client.
    was_taken: an engine had queued the request; from then on it is resumed instead of refused.
    num_crashes: steps with this request that hung or crashed, on all engines.
    num_failed: attempts whose engine failed, or did not accept the request although it could have.
    avoid: engines that did not accept the request.
    refusal: the last reason that an engine gave for not accepting it, if any.
    failure: why the last attempt failed.
    """

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.was_taken = False
        self.num_attempts = 0
        self.num_failed = 0
        self.num_crashes = 0
        self.avoid: set[str] = set()
        self.refusal: Refusal | None = None
        self.failure = "no engine is there"

    @property
    def is_over(self) -> bool:
        """Return whether to give up."""
        if self.num_crashes > MAX_CRASHES:
            return True
        if self.refusal is not None and self.refusal.kind == "too_large":
            return True  # all engines would refuse it
        return self.num_failed >= (RESUMED_ATTEMPTS if self.was_taken else NEW_ATTEMPTS)

    def finish(self, sampling: SamplingParams) -> str | None:
        """Return the finish reason if the delivered tokens already complete the request."""
        delivered = self.delivered
        if not delivered:
            return None
        if delivered[-1] in sampling.stop_token_ids and len(delivered) >= sampling.min_tokens:
            return "stop"
        return "length" if len(delivered) >= sampling.max_tokens else None

    def record_failure(self, name: str, failed: EngineFailed) -> None:
        """Record that an engine failed, or did not accept the request in time."""
        self.num_failed += 1
        before = self.num_crashes
        self.num_crashes = max(before, failed.num_crashes)
        if failed.is_hung and self.num_crashes == before:  # the engine has not counted the hung step itself
            self.num_crashes += 1
        self.failure, self.refusal = str(failed), None
        if failed.had_taken:
            self.was_taken = True
            self.avoid.clear()
        else:
            self.avoid.add(name)

    def record_refusal(self, name: str, refusal: Refusal) -> None:
        """Record that an engine refused the request with a reason. If several queues are full, the client is told when
        the first one has room."""
        self.num_failed += refusal.kind != "leaving"
        before = self.refusal
        if before is None or before.kind != refusal.kind or refusal.retry_after_s < before.retry_after_s:
            self.refusal = refusal
        self.failure = f"the engine failed and no other took the request over: {refusal.message}"
        self.avoid.add(name)

    def as_refusal(self) -> Refusal:
        """Return the refusal for the client if no engine accepted the request."""
        refusal = self.refusal
        if refusal is None or refusal.kind == "leaving":
            return Refusal("not_ready", self.failure if refusal is None else refusal.message, RETRY_AFTER_S)
        return refusal


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
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._drafted: list[bool] = []
        self._versions: list[tuple[str, int]] = []
        self._last: TokenDelta | None = None

    def put(self, delta: TokenDelta) -> None:
        """Add a received delta."""
        self.is_taken = True
        self.num_crashes = max(self.num_crashes, delta.num_crashes)
        self._tokens.extend(delta.tokens)
        self._logprobs.extend(delta.logprobs or ())
        self._prompt_logprobs.extend(delta.prompt_logprobs)
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
        if last is None or (last.finish is None and not self._tokens and not self._prompt_logprobs):
            return None  # no tokens, perhaps only the confirmation that the request is queued
        tokens, self._tokens = tuple(self._tokens), array("i")
        logprobs, self._logprobs = tuple(self._logprobs), []
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        drafted, self._drafted = tuple(self._drafted), []
        versions, self._versions = tuple(self._versions), []
        return msgspec.structs.replace(
            last,
            request_id=request_id,
            tokens=tokens,
            logprobs=logprobs or None,
            prompt_logprobs=prompt_logprobs,
            drafted=drafted,
            weight_versions=versions if any(version for version, _ in versions) else (),
        )

    def close(self) -> None:
        """Stop reading. Aborts the request unless it has ended."""
        self._on_close(self)
