"""Which prompt chunks a step carries, and who is admitted. The part of the scheduler that is not about rounds."""

from collections.abc import Callable
from itertools import islice
from operator import attrgetter

from attention.kv_cache.prefix_cache import Match, PrefixCache
from workers.config import RoundShape, RoundShapes
from workers.scheduling.grammar_queue import GrammarQueue
from workers.scheduling.latency_budget import LatencyBudget, StepBudget, StepRounds
from workers.scheduling.plan import Chunk, pack_i32
from workers.scheduling.request_queues import RequestQueues
from workers.scheduling.sequence import PlanBuilder, Sequence
from workers.scheduling.shared_prefixes import SharedPrefixes
from workers.scheduling.stats import SchedulerStats
from workers.scheduling.step_time import Prediction

MAX_PASSED = 64  # requests with uncompiled grammars that a later request may pass: each step looks through them
MASK_WAIT_MS = 250.0  # where no costs are known
_ORDER = attrgetter("order")


class PrefillPlanner:
    """Fills a plan with prompt tokens, as many as its latency budget holds (without one, `max_step_tokens`), the prompt
    with the earliest deadline first.

    A deadline is the time of arrival and the prompt's patience (`LatencyBudget.patience_s`; none without a budget,
    which is first come first served). It is set once, when the request comes. So a prompt waits for those with earlier
    deadlines only, all of which came before its own deadline: none starves, whatever comes later.

    New requests are admitted in the same order, with their first chunk; the first that has no room lets none pass (one
    whose grammar is still compiled does). A
    request may so be admitted before an older one that waits. Memory stays safe: whoever is admitted has room for its
    whole prompt beside all that was promised to the others, and pages are still taken from the youngest arrival. The
    oldest of all unfinished requests, once it has a slot, can take every page and so ends; while it waits, nothing that
    came after its deadline passes it, and what runs ends. Then it is admitted.

    budget: None until costs are known.
    """

    def __init__(
        self,
        queues: RequestQueues,
        stats: SchedulerStats,
        clock: Callable[[], float],
        max_step_tokens: int,
        shapes: RoundShapes,
        grammars: GrammarQueue,
    ) -> None:
        self._queues = queues
        self._slot_pages = queues.slot_pages
        self._stats = stats
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._max_kv_tokens = shapes.max_kv_tokens
        self._round_pages = queues.slot_pages.pages_for(shapes.max_new_tokens)
        self._grammars = grammars
        self.shared = SharedPrefixes(queues)
        self.budget: LatencyBudget | None = None

    def deadline_s(self, sequence: Sequence) -> float:
        """When its prompt should be computed. What the prefix cache has of it counts for nothing."""
        if self.budget is None:
            return sequence.submitted_s
        cache = self._cache_for(sequence)
        salt = sequence.request.sampling.cache_salt
        sequence.num_cached = 0 if cache is None else cache.num_cached(sequence.tokens, salt)
        num_tokens = len(sequence.tokens) - sequence.num_cached
        return sequence.submitted_s + self.budget.patience_s(num_tokens, self._queues.backlog_tokens)

    def mask_wait_ms(self, expected: Prediction | None) -> float:
        """Milliseconds that a step may wait for its grammars' masks. expected: what the step should take."""
        return MASK_WAIT_MS if self.budget is None or expected is None else self.budget.mask_wait_ms(expected.ms)

    def plan(self, builder: PlanBuilder, drafted: RoundShape, rounds: StepRounds) -> StepBudget:
        """Prompt chunks beside `rounds`, of admitted and new requests while slots, pages and the
        budget last; how much of that was used. drafted: the shape that a prompt's last chunk drafts if its request
        speculates."""
        queues, budget = self._queues, self._step_budget(rounds)
        admitted = sorted(queues.prefilling.values(), key=_ORDER, reverse=True)
        self.shared.begin()
        while budget.room(1, 0):
            first = admitted[-1] if admitted else None
            waiting = self._next_waiting(first, builder, rounds) if self._can_admit(builder) else None
            if waiting is not None:
                builder.admits = self._admit(waiting, builder, budget)
                if builder.admits:
                    self.shared.admitted(waiting)
                    count = self._plan_chunk(waiting, budget, builder, drafted)
                    assert count > 0, "a request was admitted without room for its first chunk"
            elif admitted:
                sequence = admitted.pop()
                if sequence.slot >= 0:
                    self._plan_chunk(sequence, budget, builder, drafted)
            else:
                break
        self.shared.ended(builder)
        return budget

    def _next_waiting(self, admitted: Sequence | None, builder: PlanBuilder, rounds: StepRounds) -> Sequence | None:
        """The first waiting request, if it comes before `admitted`. Two kinds are passed: those whose grammar is still
        compiled or whose mask is late, because rounds beside them would wait too, and those whose prefix this plan
        computes for another."""
        for sequence in islice(filter(self._queues.may_be_admitted, self._queues.waiting), MAX_PASSED):
            if admitted is not None and admitted.order < sequence.order:
                return None
            if rounds.num_requests and not self._grammars.is_ready(sequence):
                continue
            if sequence.number not in builder.held and not self.shared.must_wait(sequence, builder):
                return sequence
            builder.held.add(sequence.number)
        return None

    def _can_admit(self, builder: PlanBuilder) -> bool:
        return builder.admits and not builder.preempted and self._slot_pages.num_free_slots > 0

    def _step_budget(self, rounds: StepRounds) -> StepBudget:
        if self.budget is None:
            return StepBudget(self._max_step_tokens)
        return self.budget.step(rounds, self._admissible_tokens())

    def _admissible_tokens(self) -> int:
        """Prompt tokens that may be planned now: of requests that have a slot or could get one."""
        queues = self._queues
        backlog = sum(len(sequence.tokens) - sequence.computed for sequence in queues.prefilling.values())
        for sequence in islice(queues.waiting, self._slot_pages.num_free_slots):
            backlog += len(sequence.tokens) - sequence.num_cached
        return backlog

    def _plan_chunk(self, sequence: Sequence, budget: StepBudget, builder: PlanBuilder, drafted: RoundShape) -> int:
        """The request's next chunk, as far as the budget and pages go; how many tokens it got."""
        start, total = sequence.computed, len(sequence.tokens)
        draft_tokens = drafted.draft_tokens if sequence.request.sampling.speculative else 0
        room = budget.room(total - start, start)
        count = self._fit_chunk(sequence, room, draft_tokens, builder) if room else 0
        if count == 0:
            return 0
        budget.take(count, start)
        end = start + count
        is_last = end == total
        next_token = -1 if is_last else int(sequence.tokens[end])
        asks = sequence.request.wants_prompt_logprobs and count > is_last
        logprobs = sequence.request.sampling.prompt_logprobs if asks else -1
        builder.chunks.append(Chunk(sequence.slot, start, pack_i32(sequence.tokens[start:end]), next_token, logprobs))
        if asks:
            builder.asking.append(sequence)
        builder.max_kv_len = max(builder.max_kv_len, end + (draft_tokens if is_last else 0))
        builder.num_planned[sequence.slot] = count
        sequence.computed = end
        self._slot_pages.committed[sequence.slot] = end
        self._stats.prompt_tokens += count
        if is_last:
            builder.last_chunks.append(sequence)
        return count

    def _fit_chunk(self, sequence: Sequence, count: int, draft_tokens: int, builder: PlanBuilder) -> int:
        """Pages for the next `count` tokens, or for fewer, and for `draft_tokens` after the prompt's last; preempts
        younger requests if there is none for even one."""
        slot_pages = self._slot_pages
        start, total = sequence.computed, len(sequence.tokens)
        while True:
            end = start + count
            missing = slot_pages.fit_slot(sequence.slot, end + (draft_tokens if end == total else 0))
            if missing == 0:
                return count
            room = (len(slot_pages.pages[sequence.slot]) + slot_pages.allocator.num_available) * slot_pages.page_size
            fitting = min(count, room - start, total - 1 - start)
            if fitting > 0:
                count = fitting
                continue
            if self._queues.youngest is sequence:
                return 0
            self._queues.preempt_youngest(builder)

    def _admit(self, sequence: Sequence, builder: PlanBuilder, budget: StepBudget) -> bool:
        """Gives a waiting request a slot if its whole prompt has room beside what the others need soon, and the step
        has room for its first chunk, which may begin after a long cached prefix."""
        if sequence.not_before >= builder.oldest_in_flight:
            return False  # results of its rounds before the preemption are still to come
        slot_pages, request = self._slot_pages, sequence.request
        allocator, cache = slot_pages.allocator, self._cache_for(sequence)
        room = allocator.num_available - self._promised_pages()
        insertions = 0 if cache is None else cache.num_insertions
        if self._queues.active and sequence.pages_missing[0] == insertions and sequence.pages_missing[1] > room:
            return False
        if len(sequence.tokens) != len(sequence.prompt) + len(request.output):
            sequence.tokens = sequence.known_tokens()
        total = len(sequence.tokens)
        held_before = allocator.num_held
        match = Match([], 0) if cache is None else cache.match(sequence.tokens, request.sampling.cache_salt)
        cached = match.pages
        need = slot_pages.pages_for(total + self._max_kv_tokens) - len(cached)
        if self._queues.active and need + (allocator.num_held - held_before) > room:
            allocator.release(cached)
            sequence.pages_missing = (insertions, need)
            return False
        if budget.room(1, len(cached) * slot_pages.page_size) == 0:
            allocator.release(cached)
            return False
        builder.inits.append(self._queues.admit(sequence, cached))
        if not sequence.was_admitted:
            sequence.was_admitted = True
            request.cached_tokens = min(sequence.computed, len(request.prompt))
            request.queue_s = self._clock() - sequence.submitted_s
            self._stats.queue_s.observe(request.queue_s)
            if cache is not None:
                cache.record_query(total, match)
        return True

    def _cache_for(self, sequence: Sequence) -> PrefixCache | None:
        """Where a prompt may be found; nowhere, if log-probabilities of all of it are wanted."""
        return None if sequence.request.wants_prompt_logprobs else self._slot_pages.cache

    def _promised_pages(self) -> int:
        """Pages that running requests may want in their next round and admitted prompts still have to get."""
        num_decoding = len(self._queues.active) - len(self._queues.prefilling)
        return self._round_pages * num_decoding + self._slot_pages.prompt_pages_missing(self._max_kv_tokens)
