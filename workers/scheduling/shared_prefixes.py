"""Prompts that begin like one that is being computed: they wait for its pages instead of computing them again.

Used by `workers.scheduling.prefill` before a request is admitted. No policy of order or of budgets here.
"""

from collections import defaultdict, deque
from collections.abc import Iterator

from workers.scheduling.request_queues import RequestQueues
from workers.scheduling.sequence import PlanBuilder, Sequence


class SharedPrefixes:
    """Pages of prompts that are computed but not in the prefix cache yet, which gets them when a prompt has ended.

    A request waits only in steps that compute a part of its own prompt for another request, which comes before it and
    has taken all of the step's budget that it can use. So it never waits longer than computing that part would take,
    and what is left of the budget goes to other prompts. If the other request is aborted or preempted, nothing of its
    prompt is in the next plan, and the waiting request computes the rest.
    """

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self._slot_pages = queues.slot_pages
        self._ended: deque[tuple[int, Sequence]] = deque()  # step of the last chunk; its result has not been applied
        # by page number, the prompts that are computed and have that page, by its tokens; of the plan being built
        self._by_page: dict[int, dict[bytes, list[Sequence]]] = {}

    def begin(self) -> None:
        """A new plan is built."""
        self._by_page.clear()

    def admitted(self, sequence: Sequence) -> None:
        """The plan gives a slot to a request, whose prompt is computed from now on."""
        for page, found in self._by_page.items():
            if key := self._key(sequence, page):
                found[key].append(sequence)

    def ended(self, builder: PlanBuilder) -> None:
        """The plan is full: remember the prompts that it ends."""
        while self._ended and self._ended[0][0] < builder.oldest_in_flight:
            self._ended.popleft()
        self._ended.extend((builder.step, sequence) for sequence in builder.last_chunks)

    def clear(self) -> None:
        """The ranks' memory is gone."""
        self._ended.clear()
        self._by_page.clear()

    def must_wait(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Whether a chunk of this plan computes a part of the prompt for another request. If none does, put what others
        have computed of it into the prefix cache."""
        cache = self._slot_pages.cache
        if cache is None or sequence.request.wants_prompt_logprobs:
            return False
        size = cache.page_size
        cached = cache.num_cached(sequence.tokens, sequence.request.sampling.cache_salt) // size
        for other in self._others(sequence, cached, builder):
            common = min((_common(other, sequence) - cache.lookahead) // size, (len(sequence.tokens) - 1) // size)
            before = other.computed - builder.num_planned.get(other.slot, 0)
            now, after = (min(common, tokens // size) for tokens in (before, other.computed))
            if after > max(cached, now):
                return True
            if now > cached:
                self._slot_pages.share(other.slot, other.tokens, now)
                cached = now
        return False

    def _others(self, sequence: Sequence, page: int, builder: PlanBuilder) -> list[Sequence]:
        """Requests whose prompts are computed in part, or whole but without a result, and have the same page number
        `page` as `sequence`, the first one that is not cached. Prompts that only share what is cached are not among
        them, however many they are."""
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
        """The salt and the tokens of one page of a prompt; b"" if the prompt does not fill it."""
        cache = self._slot_pages.cache
        assert cache is not None
        start, end = page * cache.page_size, (page + 1) * cache.page_size + cache.lookahead
        tokens = sequence.tokens[start:end]
        return sequence.request.sampling.cache_salt + tokens.tobytes() if len(tokens) == end - start else b""


def _common(first: Sequence, second: Sequence) -> int:
    """Tokens that both prompts begin with."""
    length = min(len(first.tokens), len(second.tokens))
    same = first.tokens[:length] == second.tokens[:length]
    return length if same.all() else int(same.argmin())
