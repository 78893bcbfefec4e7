"""Chunked prefill: chooses the prompt chunks of a step, and admits requests."""

from collections.abc import Callable
from itertools import islice

from aerie.attention.kv_cache.prefix_cache import Match, PrefixCache
from aerie.workers.config import RoundShape, RoundShapes
from aerie.workers.scheduling.adapters import MAX_PASS_S
from aerie.workers.scheduling.image_chunks import ImageChunks
from aerie.workers.scheduling.latency_budget import LatencyBudget, StepBudget, StepRounds
from aerie.workers.scheduling.plan import Chunk, pack_i32
from aerie.workers.scheduling.prompt_order import AdmittedPrompts, SharedPrefixes, TenantTurns
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.queues.tenants import PRIORITY_S
from aerie.workers.scheduling.queues.waiting_queue import GrammarQueue
from aerie.workers.scheduling.sequence import PlanBuilder, Sequence
from aerie.workers.scheduling.slot_lengths import Slots
from aerie.workers.scheduling.stats import SchedulerStats
from aerie.workers.scheduling.step_time import Prediction, Step

MAX_PASSED = 64  # waiting requests that a step examines for admission
MAX_ASKED = 8  # waiting requests whose common prefixes get saved states in a step of a hybrid model
MASK_WAIT_MS = 250.0  # used without costs


class PrefillPlanner:
    """Fills a plan with prompt tokens up to its latency budget (without one: `max_step_tokens`), earliest deadline
    first.

    A prompt's deadline is its arrival plus `LatencyBudget.patience_s` (plus 0 without a budget: first come, first
    served). It is set once. Only prompts that arrive before another one's deadline can pass it, so no prompt starves.

    Requests are also admitted in this order, each with its first chunk. If one has no room, all later ones wait; but a
    request whose grammar is not compiled does not block others. No request waits for pages forever. An admitted request
    has room for its whole prompt in addition to all promised pages, and pages are taken from the youngest, so the
    oldest admitted request can take every page and finish. The oldest waiting request is admitted once running requests
    end, because later arrivals cannot pass its deadline.

    With several tenants, the one with the least weighted tokens comes first, also among admitted prompts
    (`tenant_turns`).

    A numeric ITL target also limits the growth of the batch (`LatencyBudget.growth_limit_ms`).

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
        images: ImageChunks,
    ) -> None:
        self._queues = queues
        self._slot_pages = queues.slot_pages
        self._stats = stats
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._max_kv_tokens = shapes.max_kv_tokens
        self._round_pages = queues.slot_pages.pages_for(shapes.max_new_tokens)
        self._grammars = grammars
        self._images = images
        self.shared = SharedPrefixes(queues)
        self._turns = TenantTurns(queues, grammars, stats, clock)
        self.budget: LatencyBudget | None = None

    def deadline_s(self, sequence: Sequence) -> float:
        """Return the time by which the prompt should be computed. Sets `num_cached`; cached tokens take no time."""
        begin_s = sequence.submitted_s + PRIORITY_S * sequence.request.owner.priority
        if self.budget is None:
            return begin_s
        cache = self._cache_for(sequence)
        salt = self._slot_pages.salt(-1, sequence.salt)
        sequence.num_cached = 0 if cache is None else cache.num_cached(sequence.tokens, salt)
        num_tokens = len(sequence.tokens) - sequence.num_cached
        return begin_s + self.budget.patience_s(num_tokens, self._queues.backlog_tokens)

    def mask_wait_ms(self, expected: Prediction | None) -> float:
        """Return the milliseconds that a step may wait for grammar masks. expected: its predicted time."""
        return MASK_WAIT_MS if self.budget is None or expected is None else self.budget.mask_wait_ms(expected.ms)

    def give_way(self, builder: PlanBuilder) -> tuple[Slots, Slots]:
        """Begin a plan: preempt for the tenant whose turn it is, if it lacks room. Return the slots whose rounds run in
        this step, and all slots that could run one."""
        self._turns.make_room(builder, self.promised_pages)
        slots = self._slot_pages.round_slots()
        return slots if self.budget is None else self._turns.running(slots, self.budget), slots

    def plan(
        self,
        builder: PlanBuilder,
        drafted: RoundShape,
        rounds: StepRounds,
        preferred_shape: int | None = None,
        rests: bool = False,
    ) -> StepBudget:
        """Add prompt chunks of admitted and new requests to `rounds`, as long as slots, pages and budget allow. Return
        the budget after these chunks.

        drafted: the shape to draft after a prompt's last chunk, if its request speculates.
        preferred_shape: index of the shape that later rounds are expected to verify; None: that of `rounds`.
        rests: see `LatencyBudget.step_limit_ms`.
        """
        queues, budget = self._queues, self._step_budget(rounds, rests)
        preferred = rounds if preferred_shape is None else rounds._replace(shape=preferred_shape)
        admitted, turns = AdmittedPrompts(queues.prefilling.values(), self._turns.only), self._turns
        self.shared.begin()
        self._images.begin(len(queues.active) > len(queues.prefilling))
        while budget.room(1, 0):
            first = admitted.first()
            waiting = self._next_waiting(first, builder, rounds) if self._can_admit(builder) else None
            if waiting is not None and turns.only not in (None, waiting.tenant):
                waiting = None
            if waiting is not None:
                builder.admits = self._may_grow(waiting, builder, preferred) and self._admit(waiting, builder, budget)
                if builder.admits:
                    self.shared.record_admission(waiting)
                    count = self._plan_chunk(waiting, budget, builder, drafted)
                    assert count > 0, "a request was admitted without room for its first chunk"
            elif first is not None:
                admitted.remove(first)
                if first.slot >= 0:
                    self._plan_chunk(first, budget, builder, drafted)
            else:
                break
        if self._slot_pages.saves is not None:
            # saving a state at the end of a common prefix must be planned before the chunk that passes this position
            for sequence in islice(queues.waiting, MAX_ASKED):
                if sequence.number not in builder.held:
                    self.shared.must_wait(sequence, builder)
        self.shared.record_plan(builder)
        return budget

    def _next_waiting(self, admitted: Sequence | None, builder: PlanBuilder, rounds: StepRounds) -> Sequence | None:
        """Return the first waiting request that can be admitted, unless `admitted` has an earlier deadline.

        Skips requests whose grammar or mask is not ready, because the step's rounds would wait for it, requests whose
        adapter is being read or is not in the tables, and requests whose prefix this plan computes for another request.
        """
        passed: Sequence | None = None  # the first request whose adapter is not in the tables
        for sequence in islice(filter(self._queues.may_be_admitted, self._queues.waiting), MAX_PASSED):
            if admitted is not None and admitted.precedes(sequence):
                return None
            if sequence.adapter is not None and not sequence.adapter.is_read:
                continue
            if not self._has_table(sequence, passed):
                passed = passed or sequence
                continue
            if rounds.num_requests and not self._grammars.is_ready(sequence):
                continue
            if sequence.number not in builder.held and not self.shared.must_wait(sequence, builder):
                return sequence
            builder.held.add(sequence.number)
        return None

    def _has_table(self, sequence: Sequence, passed: Sequence | None) -> bool:
        """Return whether the request's adapter is in the ranks' tables, or gets there. A request that found none
        waits at most `MAX_PASS_S` while later requests keep all others in use."""
        if sequence.adapter is None:
            return True
        if passed is not None and self._clock() - passed.submitted_s > MAX_PASS_S:
            return False
        return self._queues.adapters.has_room(sequence.adapter)

    def _may_grow(self, sequence: Sequence, builder: PlanBuilder, rounds: StepRounds) -> bool:
        """Return whether a request may join the rounds. If rounds exceed a numeric target, one request joins per step,
        so that the time of each batch size is known before the next."""
        budget, queues = self.budget, self._queues
        if budget is None or budget.may_stretch or not queues.active or sequence.max_len <= len(sequence.tokens) + 1:
            return True
        step_time, num_requests = budget.step_time, len(queues.active) + 1
        grown = Step(rounds.shape, num_requests, rounds.kv_tokens + len(sequence.tokens))
        ms = step_time.ms(grown) * max(1.0, step_time.slowdown)
        if ms <= budget.target_ms:
            return True
        if rounds.num_requests and builder.inits:
            return False
        waited_s = self._clock() - sequence.submitted_s
        return ms <= budget.growth_limit_ms(self._slot_pages.mean_gap_ms(), waited_s)

    def _can_admit(self, builder: PlanBuilder) -> bool:
        return builder.admits and not builder.preempted and self._slot_pages.num_free_slots > 0

    def may_rest(self, rounds: StepRounds) -> bool:
        """Return whether pending prompts are a reason to leave `rounds` out of a step (`LatencyBudget.may_rest`)."""
        return self.budget is not None and self.budget.may_rest(rounds, *self._admissible())

    def _step_budget(self, rounds: StepRounds, rests: bool) -> StepBudget:
        if self.budget is None:
            return StepBudget(self._max_step_tokens)
        return self.budget.step(rounds, *self._admissible(), rests)

    def _admissible(self) -> tuple[int, float]:
        """Return the uncomputed prompt tokens of requests that have a slot or could get one now, and the mean number of
        tokens before them that need not be computed."""
        queues = self._queues
        if self._turns.only is None and self._turns.is_shared():
            return 0, 0.0  # a short step, so that another tenant's next request finds one
        prompts = [(len(sequence.tokens), sequence.computed) for sequence in queues.prefilling.values()]
        for sequence in islice(queues.waiting, self._slot_pages.num_free_slots):
            prompts.append((len(sequence.tokens), sequence.num_cached))
        tokens = sum(total - start for total, start in prompts)
        return tokens, sum((total - start) * start for total, start in prompts) / max(tokens, 1)

    def _plan_chunk(self, sequence: Sequence, budget: StepBudget, builder: PlanBuilder, drafted: RoundShape) -> int:
        """Plan the request's next chunk within budget and pages. Return its number of tokens."""
        start, total = sequence.computed, len(sequence.tokens)
        draft_tokens = drafted.draft_tokens if sequence.request.sampling.speculative else 0
        self._images.encode(sequence, start, budget)
        room = budget.room(total - start, start)
        saves = self._slot_pages.saves
        if saves is not None:
            room = saves.chunk_tokens(sequence.slot, start, room)
        room = self._images.room(sequence, start, room, budget.tokens_left) if room else 0
        count = self._fit_chunk(sequence, room, draft_tokens, builder) if room else 0
        if count == 0:
            return 0
        budget.take(count, start)
        self._images.take(sequence, start, count)
        end = start + count
        is_last = end == total
        next_token = -1 if is_last else int(sequence.ids(end, end + 1)[0])
        asks = sequence.request.wants_prompt_logprobs and count > is_last
        logprobs = sequence.request.sampling.prompt_logprobs if asks else -1
        tokens, store_from = (
            pack_i32(sequence.ids(start, end)),
            sequence.store_from if start < sequence.store_from else 0,
        )
        inputs = None if sequence.request.inputs is None else sequence.request.inputs.cut(start, end)
        builder.chunks.append(
            Chunk(
                sequence.slot,
                start,
                tokens=tokens,
                next_token=next_token,
                logprobs=logprobs,
                store_from=store_from,
                inputs=inputs,
            )
        )
        if saves is not None:
            saves.plan_chunk(sequence.slot, start, sequence.tokens[start:end], sequence.request.sampling.stop_token_ids)
        if asks:
            builder.with_prompt_logprobs.append(sequence)
        builder.max_kv_len = max(builder.max_kv_len, end + (draft_tokens if is_last else 0))
        builder.num_planned[sequence.slot] = count
        sequence.computed = end
        self._slot_pages.committed[sequence.slot] = end
        sequence.tenant.charge(count)
        self._stats.prompt_tokens += count
        if is_last:
            builder.last_chunks.append(sequence)
        return count

    def _fit_chunk(self, sequence: Sequence, count: int, draft_tokens: int, builder: PlanBuilder) -> int:
        """Get pages for up to `count` tokens, and for `draft_tokens` after a prompt's end. Preempt younger requests if
        not even one token fits. Return the number of tokens that have pages."""
        slot_pages = self._slot_pages
        start, total = sequence.computed, len(sequence.tokens)
        while True:
            end = start + count
            missing = slot_pages.fit_slot(sequence.slot, end + (draft_tokens if end == total else 0))
            if missing == 0:
                return count
            fitting = min(count, slot_pages.room(sequence.slot) - start, total - 1 - start)
            fitting = self._images.fitting(sequence, start, max(fitting, 0))
            if fitting > 0:
                count = fitting
                continue
            if self._queues.youngest is sequence:
                return 0
            self._queues.preempt_youngest(builder)

    def _admit(self, sequence: Sequence, builder: PlanBuilder, budget: StepBudget) -> bool:
        """Give a waiting request a slot, if the pool has room for its whole prompt in addition to all promised pages,
        and the step for its first chunk. Return whether it did."""
        if sequence.not_before >= builder.oldest_in_flight:
            return False  # results from before its preemption are still in flight
        slot_pages, request = self._slot_pages, sequence.request
        allocator, cache = slot_pages.allocator, self._cache_for(sequence)
        room = allocator.num_available - self.promised_pages()
        insertions = 0 if cache is None else cache.num_insertions
        if self._queues.active and sequence.pages_missing[0] == insertions and sequence.pages_missing[1] > room:
            return False
        if len(sequence.tokens) != len(sequence.prompt) + len(request.output):
            sequence.tokens = sequence.known_tokens()
        total = len(sequence.tokens)
        if self._queues.active and not slot_pages.windows_fit(total, self._max_kv_tokens):
            return False
        held_before = allocator.num_held
        salt = slot_pages.salt(-1, sequence.salt)
        match = Match([], 0) if cache is None else cache.match(sequence.tokens, salt)
        need = slot_pages.pages_for(total + self._max_kv_tokens) - len(match.pages)
        if self._queues.active and need + (allocator.num_held - held_before) > room:
            allocator.release(match.pages)
            sequence.pages_missing = (insertions, need)
            return False
        start = match.num_saved
        self._images.encode(sequence, start, budget)
        room = budget.room(1, start)
        limit = budget.tokens_left
        if room == 0 or not all(self._images.room(sequence, start, count, limit) for count in (room, total - start)):
            allocator.release(match.pages)
            return False
        builder.inits.append(self._queues.admit(sequence, match))
        self._turns.record_admission(sequence)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            request.cached_tokens = min(sequence.computed, len(request.prompt))
            request.queue_s = self._clock() - sequence.submitted_s
            self._stats.queue_s.observe(request.queue_s)
            if cache is not None:
                cache.record_query(total, match)
        return True

    def _cache_for(self, sequence: Sequence) -> PrefixCache | None:
        """Return the prefix cache; None for a request with prompt log-probabilities, which computes its whole
        prompt."""
        return None if sequence.request.wants_prompt_logprobs else self._slot_pages.cache

    def promised_pages(self) -> int:
        """Return the pages that running requests may need for their next round, and that admitted prompts still
        lack."""
        num_decoding = len(self._queues.active) - len(self._queues.prefilling)
        return self._round_pages * num_decoding + self._slot_pages.prompt_pages_missing(self._max_kv_tokens)
