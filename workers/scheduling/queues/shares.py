"""Shares of slots and pages among tenants, computed from the queues. Used by `aerie.workers.scheduling.prompt_order`
and `aerie.workers.scheduling.queues.expected_wait`."""

from collections.abc import Callable

from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.queues.tenants import Tenant
from aerie.workers.scheduling.sequence import Sequence


class Shares:
    """What each tenant runs and may run. Shares follow from the weights of tenants whose requests wait or run."""

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues

    def tenants(self) -> set[Tenant]:
        """Return the tenants whose requests wait or run."""
        queues = self._queues
        return {*queues.waiting.by_tenant(), *(sequence.tenant for sequence in queues.active.values())}

    def backlog_of(self, tenant: Tenant) -> int:
        """Return `RequestQueues.backlog_tokens` of one tenant."""
        waiting = self._queues.waiting.by_tenant().get(tenant, ())
        prefilling = (sequence for sequence in self._queues.prefilling.values() if sequence.tenant is tenant)
        return sum(
            len(sequence.tokens) - max(sequence.computed, sequence.num_cached) for sequence in (*waiting, *prefilling)
        )

    def running_with(self, sequence: Sequence) -> dict[Tenant, float]:
        """Return each tenant's number of running requests divided by its weight, as if `sequence` ran."""
        running = {sequence.tenant: 0.0 if sequence.slot >= 0 else 1.0 / sequence.tenant.weight}
        for other in self._queues.active.values():
            running[other.tenant] = running.get(other.tenant, 0.0) + 1.0 / other.tenant.weight
        return running

    def is_next(self, tenant: Tenant) -> bool:
        """Whether a new request of this tenant would start right after the tenant's own waiting requests: no other
        waiting tenant comes first, and a slot is free, or the tenant may take one (`above_share`). Asked only if other
        tenants have requests."""
        by_tenant = self._queues.waiting.by_tenant()
        num_waiting = len(by_tenant.get(tenant, ()))
        served = self._queues.tenants.counter(tenant, bool(num_waiting))
        if any(other.served < served for other in by_tenant if other is not tenant):
            return False
        slot_pages = self._queues.slot_pages
        return slot_pages.num_free_slots > num_waiting or self._may_take(tenant, num_waiting + 1)

    def above_share(self, tenant: Tenant, held: Callable[[Sequence], int], total: int) -> Sequence | None:
        """Return a request to preempt for the first waiting one of `tenant`: the youngest of the tenant with the most,
        if this has more than its share of `total` slots or pages.

        A tenant takes slots and pages only if all its requests need at most half of its share of slots, or it runs
        none. Others, with more requests than that, wait for requests that end: so no two tenants preempt each other in
        turn. held: what a running request holds.
        """
        if not self._may_take(tenant, len(self._queues.waiting.by_tenant()[tenant])):
            return None
        used = dict.fromkeys(self._queues.waiting.by_tenant(), 0)
        for sequence in self._queues.active.values():
            used[sequence.tenant] = used.get(sequence.tenant, 0) + held(sequence)
        largest = max(used, key=lambda item: used[item] / item.weight)
        share = total * largest.weight / sum(item.weight for item in used)
        running = (item for item in self._queues.active.values() if item.tenant is largest)
        youngest = max(running, key=lambda item: item.number, default=None)
        if youngest is None or largest is tenant or used[largest] - held(youngest) < share:
            return None
        return youngest

    def _may_take(self, tenant: Tenant, num_waiting: int) -> bool:
        """Whether a tenant may take slots and pages of others. num_waiting: its waiting requests."""
        num_running = sum(item.tenant is tenant for item in self._queues.active.values())
        weights = sum(item.weight for item in self.tenants() | {tenant})
        share = len(self._queues.slot_pages.number) * tenant.weight / weights
        return num_running + num_waiting <= share / 2 or (num_running == 0 and share >= 1.0)
