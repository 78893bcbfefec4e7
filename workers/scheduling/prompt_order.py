"""The order of prompts beyond their deadlines: a prompt waits for a prefix that another one is computing
(`SharedPrefixes`), and with several tenants, the one whose turn it is comes first, takes a slot, and others' rounds
give way (`TenantTurns`). Used by `aerie.workers.scheduling.prefill`."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

import numpy as np

from aerie.workers.scheduling.latency_budget import LatencyBudget
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.queues.shares import Shares
from aerie.workers.scheduling.queues.tenants import Tenant
from aerie.workers.scheduling.queues.waiting_queue import GrammarQueue
from aerie.workers.scheduling.sequence import PlanBuilder, Sequence
from aerie.workers.scheduling.slot_lengths import Slots
from aerie.workers.scheduling.stats import SchedulerStats


class SharedPrefixes:
    """Finds common prefixes with prompts that are being computed, whose pages enter the prefix cache only when the
    prompt ends.

    A request waits only in steps that compute a part of its prompt for another request. That request has priority and
    has taken all the budget that it can use, so waiting takes no longer than computing that part. If the other request
    is aborted or preempted, the waiting one computes the rest.
    """

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self._slot_pages = queues.slot_pages
        # ended prompts, each with the step of its last chunk, whose result is not applied yet
        self._ended: deque[tuple[int, Sequence]] = deque()
        # in the plan being built: page index -> tokens of that page -> prompts that compute it
        self._by_page: dict[int, dict[bytes, list[Sequence]]] = {}

    def begin(self) -> None:
        """Start a new plan."""
        self._by_page.clear()

    def record_admission(self, sequence: Sequence) -> None:
        """Record that a request is admitted; its prompt is computed from now on."""
        for page, by_key in self._by_page.items():
            if key := self._key(sequence, page):
                by_key[key].append(sequence)

    def record_plan(self, builder: PlanBuilder) -> None:
        """Record the prompts that end in this plan, which is complete."""
        while self._ended and self._ended[0][0] < builder.oldest_in_flight:
            self._ended.popleft()
        self._ended.extend((builder.step, sequence) for sequence in builder.last_chunks)

    def clear(self) -> None:
        """Forget everything, because the ranks' memory is gone."""
        self._ended.clear()
        self._by_page.clear()

    def must_wait(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Return whether this plan computes a part of the prompt for another request. If not, insert the part that
        others have already computed into the prefix cache."""
        cache = self._slot_pages.cache
        if cache is None or sequence.request.wants_prompt_logprobs:
            return False
        size, saves = cache.page_size, self._slot_pages.saves
        # resuming may also need a state or a window
        may_lack = saves is not None or self._slot_pages.windows is not None
        salt = self._slot_pages.salt(sequence.slot, sequence.salt)
        cached = cache.num_cached(sequence.tokens, salt) // size
        for other in self._others(sequence, cached, builder):
            common = min((_common(other, sequence) - cache.lookahead) // size, (len(sequence.tokens) - 1) // size)
            before = other.computed - builder.num_planned.get(other.slot, 0)
            now, after = (min(common, tokens // size) for tokens in (before, other.computed))
            if saves is not None:  # without a state at their end, the pages cannot be used
                is_worth = saves.is_worth_waiting((common - cached) * size)
                if not is_worth or not saves.want(other.slot, common * size, before, other.computed):
                    continue
            if after > max(cached, now):
                return True
            if now > cached:
                self._slot_pages.share(other.slot, other.tokens, now)
                cached = cache.num_cached(sequence.tokens, salt) // size if may_lack else now
        return False

    def _others(self, sequence: Sequence, page: int, builder: PlanBuilder) -> list[Sequence]:
        """Return the requests whose prompts have the same tokens as `sequence` in page `page`, its first page that is
        not cached."""
        key = self._key(sequence, page)
        if not key or (page + 1) * self._slot_pages.page_size >= len(sequence.tokens):
            return []
        by_key = self._by_page.get(page)
        if by_key is None:
            by_key = self._by_page[page] = defaultdict(list)
            for other in self._computed(builder):
                if other_key := self._key(other, page):
                    by_key[other_key].append(other)
        return [other for other in by_key.get(key, ()) if other.slot >= 0]

    def _computed(self, builder: PlanBuilder) -> Iterator[Sequence]:
        yield from self._queues.prefilling.values()
        yield from (other for step, other in self._ended if step >= builder.oldest_in_flight)

    def _key(self, sequence: Sequence, page: int) -> bytes:
        """Return the salt and tokens of one page of a prompt; b"" if the prompt does not fill the page."""
        cache = self._slot_pages.cache
        assert cache is not None
        start, end = page * cache.page_size, (page + 1) * cache.page_size + cache.lookahead
        tokens = sequence.tokens[start:end]
        if len(tokens) < end - start:
            return b""
        return self._slot_pages.salt(sequence.slot, sequence.salt) + tokens.tobytes()


def _common(first: Sequence, second: Sequence) -> int:
    """Return the number of tokens that both prompts begin with."""
    length = min(len(first.tokens), len(second.tokens))
    same = first.tokens[:length] == second.tokens[:length]
    return length if same.all() else int(same.argmin())


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
        return min(heads, key=lambda head: head.rank(head.tenant.served), default=None)

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

    def record_admission(self, sequence: Sequence) -> None:
        """Record that a request has a slot: the whole prompt keeps its tenant's turn if another one runs more."""
        if len(self._queues.tenants) > 1:
            running = self._shares.running_with(sequence)
            is_less = running[sequence.tenant] < max(running.values())
            sequence.tenant_counter = sequence.tenant.served if is_less else None

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
            victim = self._shares.above_share(first.tenant, lambda sequence: 1, len(slot_pages.number))
        elif first.pages_missing[1] > slot_pages.allocator.num_available - promised_pages():
            total = slot_pages.allocator.num_pages
            victim = self._shares.above_share(first.tenant, lambda sequence: len(pages[sequence.slot]), total)
        else:
            return
        if victim is not None:
            queues.preempt(victim, builder.step - 1)
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
            running, first_rank = self._shares.running_with(first), first.rank(first.tenant.served)[0]
            wait = {
                tenant for tenant in running if running[tenant] > running[first.tenant] and tenant.served >= first_rank
            }
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
