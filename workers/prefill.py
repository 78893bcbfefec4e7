"""Which prompt chunks a step carries, and who is admitted. The part of the scheduler that is not about rounds."""

from collections.abc import Callable

from workers.plan import Chunk, pack_i32
from workers.roster import Roster
from workers.sequence import Draft, Sequence
from workers.stats import SchedulerStats


class PrefillPlanner:
    """Fills a plan with prompt tokens, first come first served, at most `max_step_tokens` a step.

    tail_tokens: KV positions behind a prompt that its last chunk may write, because it also drafts. max_new_tokens:
    tokens that the widest round can commit.
    """

    def __init__(
        self, roster: Roster, stats: SchedulerStats, clock: Callable[[], float], max_step_tokens: int, tail_tokens: int,
        max_new_tokens: int,
    ) -> None:
        self._roster = roster
        self._reservation = roster.reservation
        self._stats = stats
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._tail_tokens = tail_tokens
        self._max_new_tokens = max_new_tokens

    def plan(self, draft: Draft) -> None:
        """Prompt chunks, oldest request first, then new requests while slots, pages and tokens last."""
        budget = self._max_step_tokens
        for sequence in list(self._roster.prefilling.values()):
            if budget == 0:
                return
            if sequence.slot >= 0:
                budget -= self._plan_chunk(sequence, budget, draft)
        while budget and self._roster.waiting and self._reservation.has_free_slot and not draft.preempted:
            sequence = next(iter(self._roster.waiting.values()))
            if not self._admit(sequence, draft):
                return
            count = self._plan_chunk(sequence, budget, draft)
            assert count > 0, "a request was admitted without room for its first chunk"
            budget -= count

    def _plan_chunk(self, sequence: Sequence, budget: int, draft: Draft) -> int:
        """The request's next chunk of at most `budget` tokens; how many it got, 0 if pages are short."""
        start, total = sequence.computed, len(sequence.tokens)
        count = self._fit_chunk(sequence, min(budget, total - start), draft)
        if count == 0:
            return 0
        end = start + count
        is_last = end == total
        next_token = -1 if is_last else int(sequence.tokens[end])
        draft.chunks.append(Chunk(sequence.slot, start, pack_i32(sequence.tokens[start:end]), next_token))
        draft.max_kv_len = max(draft.max_kv_len, end + (self._tail_tokens if is_last else 0))
        sequence.computed = end
        self._reservation.committed[sequence.slot] = end
        self._stats.prompt_tokens += count
        if is_last:
            draft.last_chunks.append(sequence)
        return count

    def _fit_chunk(self, sequence: Sequence, count: int, draft: Draft) -> int:
        """Pages for the next `count` tokens, or for fewer; preempts younger requests if there is none for even one."""
        books = self._reservation
        start, total = sequence.computed, len(sequence.tokens)
        while True:
            end = start + count
            missing = books.fit_slot(sequence.slot, end + (self._tail_tokens if end == total else 0))
            if missing == 0:
                return count
            room = (len(books.pages[sequence.slot]) + books.allocator.num_available) * books.page_size
            fitting = min(count, room - start, total - 1 - start)
            if fitting > 0:
                count = fitting
                continue
            if self._roster.youngest is sequence:
                return 0
            self._roster.preempt_youngest(draft)

    def _admit(self, sequence: Sequence, draft: Draft) -> bool:
        """Gives a waiting request a slot if its whole prompt has room beside what the others need soon."""
        if sequence.not_before >= draft.oldest_in_flight:
            return False  # results of its rounds before the preemption are still to come
        books, request = self._reservation, sequence.request
        allocator, cache = books.allocator, books.cache
        room = allocator.num_available - self._promised_pages()
        insertions = 0 if cache is None else cache.num_insertions
        if self._roster.active and sequence.pages_missing[0] == insertions and sequence.pages_missing[1] > room:
            return False
        if len(sequence.tokens) != len(sequence.prompt) + len(request.output):
            sequence.tokens = sequence.known_tokens()
        total = len(sequence.tokens)
        held_before = allocator.num_held
        cached = [] if cache is None else cache.match(sequence.tokens)
        need = books.pages_for(total + self._tail_tokens) - len(cached)
        if self._roster.active and need + (allocator.num_held - held_before) > room:
            allocator.release(cached)
            sequence.pages_missing = (insertions, need)
            return False
        draft.inits.append(self._roster.admit(sequence, cached))
        if not sequence.was_admitted:
            sequence.was_admitted = True
            request.cached_tokens = min(sequence.computed, len(request.prompt))
            self._stats.queue_s.observe(self._clock() - sequence.submitted_s)
            if cache is not None:
                cache.record_query(total, sequence.computed)
        return True

    def _promised_pages(self) -> int:
        """Pages that running requests may want in their next round and admitted prompts still have to get."""
        books = self._reservation
        per_round = books.pages_for(self._max_new_tokens)
        num_decoding = len(self._roster.active) - len(self._roster.prefilling)
        prompts = sum(
            books.pages_for(len(sequence.tokens) + self._tail_tokens) - len(books.pages[sequence.slot])
            for sequence in self._roster.prefilling.values()
        )
        return per_round * num_decoding + prompts
