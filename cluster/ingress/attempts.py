"""The attempts of one request on engines, and whether to try again. Pure; used by
`aerie.cluster.ingress.remote_engines`."""

from aerie.cluster.transport.messages import MAX_CRASHES, Refusal
from aerie.workers.scheduling.plan import SamplingParams

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

    def failed(self, name: str, failed: EngineFailed) -> None:
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

    def refused(self, name: str, refusal: Refusal) -> None:
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
