"""Requests whose grammar or mask is not ready. Both may take seconds, and running requests must not wait for them. Used
by the scheduler."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from workers.scheduling.plan import Grammar
from workers.scheduling.sequence import Sequence

LOOK_AHEAD = 16  # waiting requests whose grammars are compiled
MAX_KNOWN = 1024  # grammars remembered; forgotten ones are announced again
LATE_LIMIT_S = 60.0  # longest wait for one mask; the ranks' processes give up sooner, by CPU time


class GrammarQueue:
    """Ranks compile announced grammars and report them. A request with a late mask leaves its slot until its mask is
    ready."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the ranks, which are new."""
        self._numbers: OrderedDict[Grammar, int] = OrderedDict()
        self._num_announced = 0
        self._compiled: set[int] = set()
        self._late_since: dict[int, float] = {}
        self._sitting_out: set[int] = set()
        self._early: set[int] = set()
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

    def is_late(self, sequence: Sequence, now: float) -> None:
        """Record that a request's mask is late."""
        self._late_since.setdefault(sequence.number, now)
        if sequence.number in self._early:
            self._early.remove(sequence.number)
        else:
            self._sitting_out.add(sequence.number)

    def has_mask(self, number: int) -> None:
        """Record that a late request's mask is ready. This report may come before the one that it is late."""
        if number in self._sitting_out:
            self._sitting_out.remove(number)
        else:
            self._early.add(number)

    def admitted(self, sequence: Sequence) -> None:
        """Record that a request has a slot."""
        self._sitting_out.discard(sequence.number)

    def went_on(self, sequence: Sequence) -> None:
        """Record that a request has a new token."""
        if self._late_since:
            self._late_since.pop(sequence.number, None)

    def overdue(self, now: float) -> list[int]:
        """Numbers of requests whose mask is overdue."""
        return [number for number, since_s in self._late_since.items() if now - since_s > LATE_LIMIT_S]

    def end(self, sequence: Sequence) -> None:
        """Forget a request, in any state."""
        if sequence.request.sampling.grammar is not None:
            self._late_since.pop(sequence.number, None)
            self._sitting_out.discard(sequence.number)
            self._early.discard(sequence.number)
            self._ended.append(sequence.number)

    def take_ended(self) -> list[int]:
        """Return the ended requests with grammars since the last call, for the ranks."""
        ended, self._ended = self._ended, []
        return ended

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a request's next token waits for neither compiler nor mask."""
        grammar = sequence.request.sampling.grammar
        if grammar is None:
            return True
        return sequence.number not in self._sitting_out and self._numbers.get(grammar) in self._compiled
