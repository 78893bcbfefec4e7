"""Watches the draft's acceptance after an update of weights, and names a draft that no longer fits its target. Pure;
used by `aerie.workers.scheduling.scheduler`.

A draft that an update has broken, or left behind, changes no text: it only wastes rounds, and nothing else says so. The
adaptive choice of shapes stops using it by itself (`aerie.workers.scheduling.shapes.shape_choice`).
"""

import logging
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

# Rounds after an update, and what names the draft. A draft that accepts 0.5 tokens a round, which is little, is named
# wrongly with a probability of exp(-8) = 0.0003 by the first rule and below 1e-7 by the second (Poisson).
NONE_ROUNDS = 16  # none of which accepted a draft token
FEW_ROUNDS = 64
FEW_ACCEPTED = 0.1  # tokens per round: an acceptance length of 1.1
HALF_ROUNDS = 256  # with less than half of the acceptance before the update; also the rounds that it takes to know it


class DraftCheck:
    """Acceptance since the last update.

    histogram: returns, for each k, the rounds so far that accepted k draft tokens.
    fault: why the draft counts as dead, or "".
    is_open: whether more rounds are needed to know it. Always false without an update.
    num_updates: calls of `updated`.
    """

    def __init__(self, histogram: Callable[[], Sequence[int]]) -> None:
        self.fault = ""
        self._histogram = histogram
        self._since = list(histogram())
        self._usual: float | None = None  # accepted tokens per round before the last update; None: unknown
        self._version = ""
        self.is_open = False
        self.num_updates = 0

    def updated(self, version: str) -> None:
        """Start again after an update of weights. version: its name."""
        rounds, accepted = self._seen()
        self.num_updates += 1
        if rounds >= HALF_ROUNDS and not self.fault:
            self._usual = accepted / rounds
        self.fault, self._version, self._since, self.is_open = "", version, list(self._histogram()), True

    def observe(self) -> None:
        """Check, after a step's results."""
        if not self.is_open:
            return
        rounds, accepted = self._seen()
        if rounds < NONE_ROUNDS:
            return
        per_round = accepted / rounds
        is_dead = accepted == 0 or (rounds >= FEW_ROUNDS and per_round < FEW_ACCEPTED)
        is_half = self._usual is not None and rounds >= HALF_ROUNDS and per_round < self._usual / 2
        if is_dead or is_half:
            before = "" if self._usual is None else f", {self._usual:.2f} before"
            self.fault = (
                f"since weights {self._version}, {rounds} rounds accepted {per_round:.2f} draft tokens each{before}: "
                "the draft does not fit the target; send its weights, too"
            )
            logger.warning("%s", self.fault)
        self.is_open = not self.fault and rounds < HALF_ROUNDS

    def _seen(self) -> tuple[int, int]:
        """Return rounds since the last update, and the draft tokens that they accepted."""
        counts = [now - then for now, then in zip(self._histogram(), self._since, strict=False)]
        return sum(counts), sum(k * count for k, count in enumerate(counts))
