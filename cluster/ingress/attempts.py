"""What became of one request's attempts on engines, and whether another is worth it. Pure; for
`cluster.ingress.remote_engines`."""

from cluster.transport.messages import Refusal
from workers.scheduling.plan import SamplingParams

NEW_ATTEMPTS = 2  # to have an engine take a new request
MAX_CRASHES = 1  # of steps with a request, after which it is still resumed
RESUMED_ATTEMPTS = 3  # to bring one to its end that an engine had taken
RETRY_AFTER_S = 4.0  # what is advised where no engine was there


class EngineFailed(Exception):
    """The engine that ran a request is lost, or tokens of it are. had_taken: it was queued there, or on its way when
    the engine failed; else no engine has been heard of. is_hung: a step of it has not ended for long.
    num_crashes: steps with the request that it said hung or crashed."""

    def __init__(self, reason: str, had_taken: bool, is_hung: bool = False) -> None:
        super().__init__(reason)
        self.had_taken = had_taken
        self.is_hung = is_hung
        self.num_crashes = 0


class Attempts:
    """How a request fares from engine to engine.

    num_attempts: engines that were asked.
    delivered: tokens that its reader has.
    was_taken: an engine had it in its queue, so that it is resumed and not refused any more.
    num_crashes: steps with it that hung or crashed, on all engines.
    num_failed: attempts whose engine could have taken it and did not, or was lost.
    avoid: engines that did not take it. refusal: of the last of them, if it said why.
    failure: of the last attempt.
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
        """Whether enough was tried."""
        if self.num_crashes > MAX_CRASHES:
            return True
        if self.refusal is not None and self.refusal.kind == "too_large":
            return True  # for every engine
        return self.num_failed >= (RESUMED_ATTEMPTS if self.was_taken else NEW_ATTEMPTS)

    def finish(self, sampling: SamplingParams) -> str | None:
        """How the tokens delivered before a failure already ended the request, if they did."""
        delivered = self.delivered
        if not delivered:
            return None
        if delivered[-1] in sampling.stop_token_ids and len(delivered) >= sampling.min_tokens:
            return "stop"
        return "length" if len(delivered) >= sampling.max_tokens else None

    def failed(self, name: str, failed: EngineFailed) -> None:
        """An engine was lost, or did not take it."""
        self.num_failed += 1
        before = self.num_crashes
        self.num_crashes = max(before, failed.num_crashes)
        if failed.is_hung and self.num_crashes == before:  # the engine has not said so itself
            self.num_crashes += 1
        self.failure, self.refusal = str(failed), None
        if failed.had_taken:
            self.was_taken = True
            self.avoid.clear()
        else:
            self.avoid.add(name)

    def refused(self, name: str, refusal: Refusal) -> None:
        """An engine said why it does not take it."""
        self.num_failed += refusal.kind != "leaving"
        self.refusal = refusal
        self.failure = f"the engine failed and no other took the request over: {refusal.message}"
        self.avoid.add(name)

    def as_refusal(self) -> Refusal:
        """What the client is told whose request nobody took."""
        refusal = self.refusal
        if refusal is None or refusal.kind == "leaving":
            return Refusal("not_ready", self.failure if refusal is None else refusal.message, RETRY_AFTER_S)
        return refusal
