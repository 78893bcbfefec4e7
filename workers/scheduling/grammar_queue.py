"""Which requests with grammars may enter a slot: compiling takes up to seconds, and so may a mask, which no running
request should wait for. Used by the scheduler."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from workers.scheduling.plan import Grammar
from workers.scheduling.sequence import Sequence

LOOK_AHEAD = 16  # waiting requests whose grammars are compiled
MAX_KNOWN = 1024  # grammars; what is forgotten is announced again
LATE_LIMIT_S = 60.0  # for one mask; the ranks' processes give up far sooner, by the processor time that it takes


class GrammarQueue:
    """Ranks are told of grammars, and report which they have compiled. A request whose mask was late in a step sits out
    until the ranks report that they have it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The ranks know nothing yet."""
        self._numbers: OrderedDict[Grammar, int] = OrderedDict()
        self._num_announced = 0
        self._compiled: set[int] = set()
        self._late_since: dict[int, float] = {}
        self._sitting_out: set[int] = set()
        self._early: set[int] = set()
        self._ended: list[int] = []

    def announce(self, waiting: Iterable[Sequence]) -> tuple[Grammar, ...]:
        """The grammars of the first of these requests that ranks have not been told of."""
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
        """The ranks are done with these announcements."""
        self._compiled.update(numbers)

    def is_late(self, sequence: Sequence, now: float) -> None:
        """Its mask was not there in time."""
        self._late_since.setdefault(sequence.number, now)
        if sequence.number in self._early:
            self._early.remove(sequence.number)
        else:
            self._sitting_out.add(sequence.number)

    def has_mask(self, number: int) -> None:
        """The ranks have a late request's mask. They may say so before they say that it is late."""
        if number in self._sitting_out:
            self._sitting_out.remove(number)
        else:
            self._early.add(number)

    def admitted(self, sequence: Sequence) -> None:
        """It has a slot."""
        self._sitting_out.discard(sequence.number)

    def went_on(self, sequence: Sequence) -> None:
        """It has a new token."""
        if self._late_since:
            self._late_since.pop(sequence.number, None)

    def overdue(self, now: float) -> list[int]:
        """Numbers of the requests that have had no mask for too long."""
        return [number for number, since_s in self._late_since.items() if now - since_s > LATE_LIMIT_S]

    def end(self, sequence: Sequence) -> None:
        """A request is over, in whatever state."""
        if sequence.request.sampling.grammar is not None:
            self._late_since.pop(sequence.number, None)
            self._sitting_out.discard(sequence.number)
            self._early.discard(sequence.number)
            self._ended.append(sequence.number)

    def take_ended(self) -> list[int]:
        """Requests with grammars that have ended since the last call, for the ranks."""
        ended, self._ended = self._ended, []
        return ended

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a request's next token waits for no compiler and no mask."""
        grammar = sequence.request.sampling.grammar
        if grammar is None:
            return True
        return sequence.number not in self._sitting_out and self._numbers.get(grammar) in self._compiled
