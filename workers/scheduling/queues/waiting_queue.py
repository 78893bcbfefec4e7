"""Requests that wait for a slot, in the order of admission, and their totals. Owned by
`aerie.workers.scheduling.queues.request_queues`.

Every step and every arrival reads the totals, and ten thousand requests may wait. So the totals are updated with each
change.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from aerie.workers.scheduling.queues.tenants import Tenant, turns
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
        return turns(self._by_tenant.items(), Sequence.rank, self._cost)

    def by_tenant(self) -> Mapping[Tenant, list[Sequence]]:
        """Return the waiting requests of each tenant that has any, in their order."""
        return self._by_tenant

    def _cost(self, sequence: Sequence) -> float:
        return self._backlog[sequence.number]

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence by its deadline."""
        insort(self._by_tenant.setdefault(sequence.tenant, []), sequence, key=_ORDER)
        self._count(sequence, 1, len(sequence.tokens) - sequence.num_cached)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be in the queue."""
        sequences = self._by_tenant[sequence.tenant]
        index = bisect_left(sequences, sequence.order, key=_ORDER)
        assert sequences[index] is sequence
        del sequences[index]
        if not sequences:
            del self._by_tenant[sequence.tenant]
        self._count(sequence, -1, -self._backlog.pop(sequence.number))

    def reorder(self) -> None:
        """Sort and count again, after deadlines and `num_cached` have changed."""
        self.load = QueueLoad()
        for sequences in self._by_tenant.values():
            sequences.sort(key=_ORDER)
            for sequence in sequences:
                self._count(sequence, 1, len(sequence.tokens) - sequence.num_cached)

    def _count(self, sequence: Sequence, sign: int, backlog: int) -> None:
        load = self.load
        if sign > 0:
            self._backlog[sequence.number] = backlog
        self.load = QueueLoad(
            load.num_requests + sign,
            load.prompt_tokens + sign * len(sequence.prompt),
            load.max_output_tokens + sign * sequence.request.sampling.max_tokens,
            load.backlog_tokens + backlog,
            load.input_bytes + sign * sequence.request.num_input_bytes,
        )
