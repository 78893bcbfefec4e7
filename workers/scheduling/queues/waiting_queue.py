"""Requests that wait for a slot, in the order of admission, and those whose grammar or mask is not ready, so that
running requests need not wait for it. Totals are updated with each change, because every step and arrival reads them
and ten thousand requests may wait."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.scheduling.queues.tenants import Tenant, in_turn
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.sequence import Sequence

# Bytes of one waiting request without its prompt: request, sampling parameters, sequence and stream (measured in
# `tests/workers/scheduling/test_waiting_queue.py`).
REQUEST_BYTES = 3072
BYTES_PER_TOKEN = 4  # int32
_ORDER = attrgetter("order")


class QueueLoad(NamedTuple):
    """Totals of the waiting requests.

    num_requests: requests.
    prompt_tokens: tokens of their prompts.
    max_output_tokens: maximum tokens that they may generate.
    backlog_tokens: prompt tokens to compute, without those found in the prefix cache.
    input_bytes: bytes of `Request.inputs`.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    max_output_tokens: int = 0
    backlog_tokens: int = 0
    input_bytes: int = 0

    def bytes_with(self, request: Request) -> int:
        """Return the host memory of the queued requests and one more."""
        tokens, inputs = self.prompt_tokens + len(request.prompt), self.input_bytes + request.num_input_bytes
        return (self.num_requests + 1) * REQUEST_BYTES + tokens * BYTES_PER_TOKEN + inputs


class WaitingQueue:
    """Waiting requests: tenants in turn, each one's requests by deadline. load: their totals."""

    def __init__(self) -> None:
        self.load = QueueLoad()
        self._by_tenant: dict[Tenant, list[Sequence]] = {}  # without empty lists
        self._backlog: dict[
            int, int
        ] = {}  # tokens counted per request number, because a sequence's tokens may change before it leaves

    def __len__(self) -> int:
        return self.load.num_requests

    def __iter__(self) -> Iterator[Sequence]:
        if len(self._by_tenant) == 1:
            (sequences,) = self._by_tenant.values()
            return iter(sequences)
        return in_turn(self._by_tenant.items(), Sequence.rank, self._cost)

    def by_tenant(self) -> Mapping[Tenant, list[Sequence]]:
        """Return the waiting requests of each tenant that has any, in their order."""
        return self._by_tenant

    def _cost(self, sequence: Sequence) -> float:
        return self._backlog[sequence.number]

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence by its deadline."""
        insort(self._by_tenant.setdefault(sequence.tenant, []), sequence, key=_ORDER)
        self._add_load(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be in the queue."""
        sequences = self._by_tenant[sequence.tenant]
        index = bisect_left(sequences, sequence.order, key=_ORDER)
        assert sequences[index] is sequence
        del sequences[index]
        if not sequences:
            del self._by_tenant[sequence.tenant]
        self._change_load(sequence, -1, self._backlog.pop(sequence.number))

    def reorder(self) -> None:
        """Sort and count again, after deadlines and `num_cached` have changed."""
        self.load = QueueLoad()
        for sequences in self._by_tenant.values():
            sequences.sort(key=_ORDER)
            for sequence in sequences:
                self._add_load(sequence)

    def _add_load(self, sequence: Sequence) -> None:
        backlog = self._backlog[sequence.number] = len(sequence.tokens) - sequence.num_cached
        self._change_load(sequence, 1, backlog)

    def _change_load(self, sequence: Sequence, sign: int, backlog: int) -> None:
        """Add a request to the load (sign 1), or subtract it (sign -1). backlog: prompt tokens to compute for it."""
        load = self.load
        self.load = QueueLoad(
            load.num_requests + sign,
            load.prompt_tokens + sign * len(sequence.prompt),
            load.max_output_tokens + sign * sequence.request.sampling.max_tokens,
            load.backlog_tokens + sign * backlog,
            load.input_bytes + sign * sequence.request.num_input_bytes,
        )


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
        grammars = []
        for sequence in islice(waiting, LOOK_AHEAD):
            grammar = sequence.request.sampling.grammar
            if grammar is not None and grammar not in self._numbers:
                self._numbers[grammar] = self._num_announced
                self._num_announced += 1
                grammars.append(grammar)
        while len(self._numbers) > MAX_KNOWN:
            _, number = self._numbers.popitem(last=False)
            self._compiled.discard(number)
        return tuple(grammars)

    def mark_compiled(self, numbers: Iterable[int]) -> None:
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

    def record_admission(self, sequence: Sequence) -> None:
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
