"""Whether the draft guesses one LoRA adapter's texts. Pure; used by `aerie.workers.scheduling.adapters`.

One shape serves all requests of a step, so an adapter whose drafts are wrong would lower the estimates for its
neighbours (`aerie.workers.scheduling.shapes.acceptance`). Its requests stop drafting alone.
"""

from aerie.workers.scheduling.commands.command_queue import FEW_ACCEPTED, FEW_ROUNDS

PROBE_EVERY = 16  # requests, of which one drafts although the draft has failed


class DraftFit:
    """Accepted drafts of one adapter.

    num_rounds, num_accepted: rounds that verified drafts, and the draft tokens that they accepted.
    has_failed: whether the last `FEW_ROUNDS` judged rounds accepted fewer than `FEW_ACCEPTED` tokens each.
    """

    def __init__(self) -> None:
        self.num_rounds = self.num_accepted = 0
        self.has_failed = False
        self._judged = (0, 0)  # rounds and accepted tokens at the last judgement
        self._num_requests = 0  # since it has failed

    def count(self, num_accepted: int) -> None:
        """Count a round that verified drafts."""
        self.num_rounds += 1
        self.num_accepted += num_accepted

    def judge(self) -> bool:
        """Return whether the draft fails now; judges once in `FEW_ROUNDS` rounds."""
        rounds, accepted = self._judged
        if self.num_rounds - rounds < FEW_ROUNDS:
            return False
        self.has_failed = self.num_accepted - accepted < FEW_ACCEPTED * (self.num_rounds - rounds)
        self._judged = self.num_rounds, self.num_accepted
        return self.has_failed

    def is_wanted(self) -> bool:
        """Return whether the next request drafts: all do until the draft fails, then one in `PROBE_EVERY`."""
        self._num_requests = self._num_requests + 1 if self.has_failed else 0
        return not self.has_failed or self._num_requests % PROBE_EVERY == 0
