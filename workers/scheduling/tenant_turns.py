"""What a step does for the tenant whose turn it is: its prompt comes first, others' rounds give way, and it gets a
slot. Used by the scheduler and `aerie.workers.scheduling.prefill`. With one tenant, nothing of this happens."""

from collections.abc import Callable, Iterable
from operator import attrgetter

import numpy as np

from aerie.workers.scheduling.latency_budget import LatencyBudget
from aerie.workers.scheduling.queues.grammar_queue import GrammarQueue
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.queues.shares import Shares
from aerie.workers.scheduling.queues.tenants import Tenant
from aerie.workers.scheduling.sequence import PlanBuilder, Sequence
from aerie.workers.scheduling.slot_lengths import Slots
from aerie.workers.scheduling.stats import SchedulerStats

_ORDER = attrgetter("order")


class AdmittedPrompts:
    """Prompts with a slot, in the order in which they are computed: tenants in turn, each one's by deadline. only: the
    tenant whose prompts alone are computed; None: all."""

    def __init__(self, sequences: Iterable[Sequence], only: Tenant | None = None) -> None:
        self._by_tenant: dict[Tenant, list[Sequence]] = {}
        for sequence in sorted(sequences, key=_ORDER, reverse=True):
            if only is None or sequence.tenant is only:
                self._by_tenant.setdefault(sequence.tenant, []).append(sequence)

    def first(self) -> Sequence | None:
        """Return the first one, None if there is none."""
        heads = [prompts[-1] for prompts in self._by_tenant.values() if prompts]
        return min(heads, key=lambda each: each.rank(each.tenant.served), default=None)

    def remove(self, first: Sequence) -> None:
        """Remove the first one."""
        self._by_tenant[first.tenant].pop()


class TenantTurns:
    """Decides what gives way to the tenant whose turn it is.

    only: the tenant whose prompts alone the step computes; None: those of all.
    """

    def __init__(
        self, queues: RequestQueues, grammars: GrammarQueue, stats: SchedulerStats, clock: Callable[[], float]
    ) -> None:
        self.only: Tenant | None = None
        self._queues = queues
        self._slot_pages = queues.slot_pages
        self._shares = Shares(queues)
        self._grammars = grammars
        self._stats = stats
        self._clock = clock
        self._all_ran_s = 0.0  # the last time at which no rounds gave way

    def is_shared(self) -> bool:
        """Whether several tenants have requests, or had some lately."""
        tenants = self._queues.tenants
        return len(tenants) > 1 and len(tenants.recent(self._clock()) | self._shares.tenants()) > 1

    def admitted(self, sequence: Sequence) -> None:
        """Record that a request has a slot: the whole prompt keeps its tenant's turn if another one runs more."""
        if len(self._queues.tenants) > 1:
            running = self._shares.running_with(sequence)
            is_less = running[sequence.tenant] < max(running.values())
            sequence.turn = sequence.tenant.served if is_less else None

    def make_room(self, builder: PlanBuilder, promised_pages: Callable[[], int]) -> None:
        """Preempt a request, if the first waiting one has no slot or not enough pages and its tenant may take them
        (`Shares.above_share`). Called before the rounds are planned.

        promised_pages: pages that running requests may still need.
        """
        queues, slot_pages = self._queues, self._slot_pages
        if len(queues.tenants) < 2 or not queues.waiting or queues.suspects:
            return
        first = next(iter(queues.waiting))
        if first.not_before >= builder.oldest_in_flight or not self._grammars.is_ready(first):
            return
        if any(sequence.tenant is first.tenant for sequence in queues.prefilling.values()):
            return  # its other prompt is computed first, and this one's prefix may be a part of it
        pages = slot_pages.pages
        if not slot_pages.num_free_slots:
            found = self._shares.above_share(first.tenant, lambda sequence: 1, len(slot_pages.number))
        elif first.pages_missing[1] > slot_pages.allocator.num_available - promised_pages():
            total = slot_pages.allocator.num_pages
            found = self._shares.above_share(first.tenant, lambda sequence: len(pages[sequence.slot]), total)
        else:
            return
        if found is not None:
            queues.preempt(found, builder.step - 1)
            self._stats.num_preemptions += 1

    def running(self, slots: Slots, budget: LatencyBudget) -> Slots:
        """Return those of `slots` whose rounds run in the next step, and set `only`. Other tenants' rounds and prompts
        give way to the prompts of a tenant that runs fewer requests and whose turn it is.

        budget: rounds give way for at most its `limit_ms`.
        """
        self.only = None
        if len(slots) == 0 or not self.is_shared():
            return slots
        now, first = self._clock(), self._first()
        if first is not None and now - self._all_ran_s <= budget.limit_ms / 1000:
            running, turn = self._shares.running_with(first), first.rank(first.tenant.served)[0]
            wait = {each for each in running if running[each] > running[first.tenant] and each.served >= turn}
            by_slot = self._queues.by_slot
            stays = np.array([by_slot[slot].tenant not in wait for slot in slots.tolist()], np.bool_)
            if not stays.all():
                self.only = first.tenant
                return slots[stays]
        self._all_ran_s = now
        return slots

    def _first(self) -> Sequence | None:
        """Return the prompt that comes first, with or without a slot; None if there is none."""
        admitted, waiting = AdmittedPrompts(self._queues.prefilling.values()).first(), None
        if self._slot_pages.num_free_slots:
            waiting = next(iter(self._queues.waiting), None)
        if admitted is None or waiting is None:
            return admitted or waiting
        return admitted if admitted.precedes(waiting) else waiting
