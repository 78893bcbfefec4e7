"""Prompts that begin like one that is being computed: they wait for its pages instead of computing them again.

Used by `workers.scheduling.prefill` before a request is admitted. No policy of order or of budgets here.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

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

    def ended(self, builder: PlanBuilder) -> None:
        """The plan is full: remember the prompts that it ends."""
        while self._ended and self._ended[0][0] < builder.oldest_in_flight:
            self._ended.popleft()
        self._ended.extend((builder.step, sequence) for sequence in builder.last_chunks)

    def clear(self) -> None:
        """The ranks' memory is gone."""
        self._ended.clear()

    def must_wait(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Whether a chunk of this plan computes a part of the prompt for another request. If none does, put what others
        have computed of it into the prefix cache."""
        cache = self._slot_pages.cache
        if cache is None or sequence.request.wants_prompt_logprobs:
            return False
        size, page = cache.page_size, cache.page_size + cache.lookahead
        cached = -1
        for other in self._others(sequence, builder):
            if len(other.tokens) < page or not np.array_equal(other.tokens[:page], sequence.tokens[:page]):
                continue
            if cached < 0:
                cached = cache.num_cached(sequence.tokens, sequence.request.sampling.cache_salt) // size
            common = min((_common(other, sequence) - cache.lookahead) // size, (len(sequence.tokens) - 1) // size)
            planned = sum(len(chunk.tokens) // 4 for chunk in builder.chunks if chunk.slot == other.slot)
            now, after = (min(common, tokens // size) for tokens in (other.computed - planned, other.computed))
            if after > max(cached, now):
                return True
            if now > cached:
                self._slot_pages.share(other.slot, other.tokens, now)
                cached = now
        return False

    def _others(self, sequence: Sequence, builder: PlanBuilder) -> Iterator[Sequence]:
        """Requests whose prompts are computed in part, or whole but without a result."""
        salt = sequence.request.sampling.cache_salt
        ended = (other for step, other in self._ended if step >= builder.oldest_in_flight)
        for other in (*self._queues.prefilling.values(), *ended):
            if other.slot >= 0 and other.request.sampling.cache_salt == salt:
                yield other


def _common(first: Sequence, second: Sequence) -> int:
    """Tokens that both prompts begin with."""
    length = min(len(first.tokens), len(second.tokens))
    same = first.tokens[:length] == second.tokens[:length]
    return length if same.all() else int(same.argmin())
