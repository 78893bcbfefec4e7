"""Lets prompts wait for a prefix that another prompt is computing. Used by `aerie.workers.scheduling.prefill` before
admission."""

from collections import defaultdict, deque
from collections.abc import Iterator

from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.sequence import PlanBuilder, Sequence


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

    def admitted(self, sequence: Sequence) -> None:
        """Record that a request is admitted; its prompt is computed from now on."""
        for page, found in self._by_page.items():
            if key := self._key(sequence, page):
                found[key].append(sequence)

    def ended(self, builder: PlanBuilder) -> None:
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
        found = self._by_page.get(page)
        if found is None:
            found = self._by_page[page] = defaultdict(list)
            for other in self._computed(builder):
                if other_key := self._key(other, page):
                    found[other_key].append(other)
        return [other for other in found.get(key, ()) if other.slot >= 0]

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
