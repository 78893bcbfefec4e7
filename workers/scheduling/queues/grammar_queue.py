"""Tracks requests whose grammar or mask is not ready, which may take seconds, so that running requests need not wait.
Used by the scheduler."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.scheduling.sequence import Sequence

LOOK_AHEAD = 16  # number of waiting requests whose grammars are compiled ahead
MAX_KNOWN = 1024  # grammars remembered; others are announced again
LATE_LIMIT_S = 60.0  # maximum wait for one mask; the ranks' processes usually give up earlier, by CPU time


class GrammarQueue:
    """Announces grammars to the ranks, which compile them and report that. A request with a late mask leaves its slot
    until the ranks report its mask."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again with new ranks."""
        self._numbers: OrderedDict[Grammar, int] = OrderedDict()
        self._num_announced = 0
        self._compiled: set[int] = set()
        # numbers of requests
        self._late_since: dict[int, float] = {}
        self._awaiting_mask: set[int] = set()
        self._ready_before_late: set[int] = set()  # requests whose mask was reported ready before it was reported late
        self._ended: list[int] = []

    def announce(self, waiting: Iterable[Sequence]) -> tuple[Grammar, ...]:
        """Return the grammars of the first waiting requests that the ranks do not know yet."""
        found = []
        for sequence in islice(waiting, LOOK_AHEAD):
            grammar = sequence.request.sampling.grammar
            if grammar is not None and grammar not in self._numbers:
                self._numbers[grammar] = self._num_announced
                self._num_announced += 1
                found.append(grammar)
        while len(self._numbers) > MAX_KNOWN:
            _, number = self._numbers.popitem(last=False)
            self._compiled.discard(number)
        return tuple(found)

    def compiled(self, numbers: Iterable[int]) -> None:
        """Record that the ranks have compiled these announced grammars."""
        self._compiled.update(numbers)

    def record_late_mask(self, sequence: Sequence, now: float) -> None:
        """Record that a request's mask is late."""
        self._late_since.setdefault(sequence.number, now)
        if sequence.number in self._ready_before_late:
            self._ready_before_late.remove(sequence.number)
        else:
            self._awaiting_mask.add(sequence.number)

    def record_mask(self, number: int) -> None:
        """Record that a late mask is ready. This report may arrive before the report that the mask is late."""
        if number in self._awaiting_mask:
            self._awaiting_mask.remove(number)
        else:
            self._ready_before_late.add(number)

    def admitted(self, sequence: Sequence) -> None:
        """Record that a request has a slot."""
        self._awaiting_mask.discard(sequence.number)

    @property
    def has_late(self) -> bool:
        """Whether the mask of any running request is late."""
        return bool(self._late_since)

    def record_new_tokens(self, sequence: Sequence) -> None:
        """Record that a request has new tokens, so that its mask is not late."""
        self._late_since.pop(sequence.number, None)

    def overdue(self, now: float) -> list[int]:
        """Return the numbers of requests whose masks have been late for `LATE_LIMIT_S`."""
        return [number for number, since_s in self._late_since.items() if now - since_s > LATE_LIMIT_S]

    def end(self, sequence: Sequence) -> None:
        """Forget a request, in any state."""
        if sequence.request.sampling.grammar is not None:
            self._late_since.pop(sequence.number, None)
            self._awaiting_mask.discard(sequence.number)
            self._ready_before_late.discard(sequence.number)
            self._ended.append(sequence.number)

    def take_ended(self) -> list[int]:
        """Return the numbers of requests with grammars that ended since the last call, for the ranks."""
        ended, self._ended = self._ended, []
        return ended

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a request's grammar is compiled and its mask is not late."""
        grammar = sequence.request.sampling.grammar
        if grammar is None:
            return True
        return sequence.number not in self._awaiting_mask and self._numbers.get(grammar) in self._compiled
