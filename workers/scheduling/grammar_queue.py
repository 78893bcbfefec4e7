"""Which grammars the ranks have been told to compile, and which are compiled: compiling takes up to seconds, which no
running request should wait for. Used by the scheduler."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from workers.scheduling.plan import Grammar
from workers.scheduling.sequence import Sequence

LOOK_AHEAD = 16  # waiting requests whose grammars are compiled
MAX_KNOWN = 1024  # grammars; what is forgotten is announced again


class GrammarQueue:
    """Ranks compile in the order of the announcements, and report how many they are done with."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The ranks know nothing yet."""
        self._numbers: OrderedDict[Grammar, int] = OrderedDict()
        self._num_announced = 0
        self._num_compiled = 0

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
            self._numbers.popitem(last=False)
        return tuple(found)

    def compiled(self, count: int) -> None:
        """The ranks are done with the first `count` announcements."""
        self._num_compiled = count

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a request's first token needs no compiler."""
        grammar = sequence.request.sampling.grammar
        return grammar is None or self._numbers.get(grammar, self._num_compiled) < self._num_compiled
