"""Which tenant's request comes next. Owned by `aerie.workers.scheduling.queues.request_queues`.

A tenant is an API key's name; all requests without one are one tenant. Each tenant has a counter of the tokens that the
engine has computed for it (prompt and output), divided by its weight; the least counter comes first. This is Virtual
Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2), with start-time fair
queueing's rule for tenants that return from idleness (Goyal et al., SIGCOMM 1996): their counter rises to that of the
last tenant that was chosen, so that idleness saves up nothing. So counters of tenants whose requests wait differ by at
most the tokens of the requests that one of them can run at once, and no tenant starves.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aerie.workers.scheduling.request import Owner

T = TypeVar("T")

PRIORITY_TOKENS = 1000.0  # weighted tokens that one level of priority lets a request begin ahead of its tenant's turn
RECENT_S = 30.0  # time for which another request of a tenant is expected
PRIORITY_S = 10.0  # time by which one level moves the deadline of a request among those of its tenant


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant's state.

    served: tokens computed for it, divided by `weight`.
    last_s: time of its last arrival.
    retry_at_s: when its last refused request may come again.
    """

    name: str = ""
    weight: float = 1.0
    served: float = 0.0
    last_s: float = -math.inf
    retry_at_s: float = -math.inf

    def charge(self, num_tokens: float) -> None:
        """Count tokens that the engine computes for it."""
        self.served += num_tokens / self.weight


class Tenants:
    """All tenants that have sent a request."""

    def __init__(self) -> None:
        self._by_name: dict[str, Tenant] = {}
        self._last_chosen = 0.0  # maximum counter of a chosen tenant

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, owner: Owner) -> Tenant:
        """Return the tenant of a request, whose weight is that of its newest request."""
        tenant = self._by_name.get(owner.tenant)
        if tenant is None:
            tenant = self._by_name[owner.tenant] = Tenant(owner.tenant, owner.weight, self._last_chosen)
        tenant.weight = owner.weight
        return tenant

    def recent(self, now: float) -> set[Tenant]:
        """Return the tenants whose last request came within `RECENT_S`."""
        return {tenant for tenant in self._by_name.values() if now - tenant.last_s < RECENT_S}

    def counter(self, tenant: Tenant, waits: bool) -> float:
        """Return a tenant's counter if it sent a request now. waits: whether it has others that wait."""
        return tenant.served if waits else max(tenant.served, self._last_chosen)

    def record_return(self, tenant: Tenant) -> None:
        """Record that a tenant has a waiting request again."""
        tenant.served = self.counter(tenant, waits=False)

    def record_start(self, tenant: Tenant) -> None:
        """Record that a tenant's request begins."""
        self._last_chosen = max(self._last_chosen, tenant.served)


def in_turn(
    queues: Iterable[tuple[Tenant, Sequence[T]]],
    rank: Callable[[T, float], tuple[float, ...]],
    cost: Callable[[T], float],
) -> Iterator[T]:
    """Merge the queues of several tenants: yield their entries in the order in which they will be admitted, the least
    rank first. Each queue keeps its order. Tenants' counters are not changed; each entry that is yielded adds its cost
    to a copy of its tenant's counter.

    rank: (entry, its tenant's counter at that time) -> its rank.
    cost: tokens that an entry will cost its tenant.
    """
    heap = [
        (rank(queue[0], tenant.served), position, 0, tenant.served, tenant, queue)
        for position, (tenant, queue) in enumerate(queues)
        if queue
    ]
    heapq.heapify(heap)
    while heap:
        _, position, index, served, tenant, queue = heap[0]
        entry = queue[index]
        yield entry
        if index + 1 == len(queue):
            heapq.heappop(heap)
            continue
        served += cost(entry) / tenant.weight
        heapq.heapreplace(heap, (rank(queue[index + 1], served), position, index + 1, served, tenant, queue))
