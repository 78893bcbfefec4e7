"""Which prompt chunks a step carries, and who is admitted. The part of the scheduler that is not about rounds."""

from collections.abc import Callable

from workers.config import RoundShape, RoundShapes
from workers.scheduling.plan import Chunk, pack_i32
from workers.scheduling.request_queues import RequestQueues
from workers.scheduling.sequence import PlanBuilder, Sequence
from workers.scheduling.stats import SchedulerStats


class PrefillPlanner:
    """Fills a plan with prompt tokens, first come first served, at most `max_step_tokens` a step."""

    def __init__(
        self,
        queues: RequestQueues,
        stats: SchedulerStats,
        clock: Callable[[], float],
        max_step_tokens: int,
        shapes: RoundShapes,
    ) -> None:
        self._queues = queues
        self._slot_pages = queues.slot_pages
        self._stats = stats
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._shapes = shapes

    def plan(self, builder: PlanBuilder, drafted: RoundShape) -> None:
        """Prompt chunks, oldest request first, then new requests while slots, pages and tokens last. drafted: the shape
        that a prompt's last chunk drafts if its request speculates."""
        budget = self._max_step_tokens
        for sequence in list(self._queues.prefilling.values()):
            if budget == 0:
                return
            if sequence.slot >= 0:
                budget -= self._plan_chunk(sequence, budget, builder, drafted)
        while budget and self._queues.waiting and self._slot_pages.has_free_slot and not builder.preempted:
            sequence = next(iter(self._queues.waiting.values()))
            if not self._admit(sequence, builder):
                return
            count = self._plan_chunk(sequence, budget, builder, drafted)
            assert count > 0, "a request was admitted without room for its first chunk"
            budget -= count

    def _plan_chunk(self, sequence: Sequence, budget: int, builder: PlanBuilder, drafted: RoundShape) -> int:
        """The request's next chunk of at most `budget` tokens; how many it got, 0 if pages are short."""
        start, total = sequence.computed, len(sequence.tokens)
        draft_tokens = drafted.draft_tokens if sequence.request.sampling.speculative else 0
        count = self._fit_chunk(sequence, min(budget, total - start), draft_tokens, builder)
        if count == 0:
            return 0
        end = start + count
        is_last = end == total
        next_token = -1 if is_last else int(sequence.tokens[end])
        builder.chunks.append(Chunk(sequence.slot, start, pack_i32(sequence.tokens[start:end]), next_token))
        builder.max_kv_len = max(builder.max_kv_len, end + (draft_tokens if is_last else 0))
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

    def _admit(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Gives a waiting request a slot if its whole prompt has room beside what the others need soon."""
        if sequence.not_before >= builder.oldest_in_flight:
            return False  # results of its rounds before the preemption are still to come
        slot_pages, request = self._slot_pages, sequence.request
        allocator, cache = slot_pages.allocator, slot_pages.cache
        room = allocator.num_available - self._promised_pages()
        insertions = 0 if cache is None else cache.num_insertions
        if self._queues.active and sequence.pages_missing[0] == insertions and sequence.pages_missing[1] > room:
            return False
        if len(sequence.tokens) != len(sequence.prompt) + len(request.output):
            sequence.tokens = sequence.known_tokens()
        total = len(sequence.tokens)
        held_before = allocator.num_held
        cached = [] if cache is None else cache.match(sequence.tokens)
        need = slot_pages.pages_for(total + self._shapes.max_kv_tokens) - len(cached)
        if self._queues.active and need + (allocator.num_held - held_before) > room:
            allocator.release(cached)
            sequence.pages_missing = (insertions, need)
            return False
        builder.inits.append(self._queues.admit(sequence, cached))
        if not sequence.was_admitted:
            sequence.was_admitted = True
            request.cached_tokens = min(sequence.computed, len(request.prompt))
            self._stats.queue_s.observe(self._clock() - sequence.submitted_s)
            if cache is not None:
                cache.record_query(total, sequence.computed)
        return True

    def _promised_pages(self) -> int:
        """Pages that running requests may want in their next round and admitted prompts still have to get."""
        slot_pages = self._slot_pages
        per_round = slot_pages.pages_for(self._shapes.max_new_tokens)
        num_decoding = len(self._queues.active) - len(self._queues.prefilling)
        prompts = sum(
            slot_pages.pages_for(len(sequence.tokens) + self._shapes.max_kv_tokens)
            - len(slot_pages.pages[sequence.slot])
            for sequence in self._queues.prefilling.values()
        )
        return per_round * num_decoding + prompts
