"""How fast an engine works its queue off, from the requests that ended lately. Pure; used by
`cluster.coordinator.request_streams`."""

from collections import deque
from collections.abc import Callable

from workers.scheduling.waiting_queue import QueueLoad

WINDOW_S = 30.0
_MOST_ENDS = 512
_FEWEST_ENDS = 4  # below, there is no speed to speak of
UNKNOWN_S = 5.0  # what to advise then
LONGEST_S = 60.0  # OpenAI's clients ignore a longer Retry-After


class QueueSpeed:
    """Tokens of ended requests per second, prompts and answers alike: what a request takes is told by its tokens, not
    by its number."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=_MOST_ENDS)

    def ended(self, num_prompt: int, num_output: int, someone_waits: bool) -> None:
        """A request ended now, with so many tokens computed for it. An engine that nobody waits for may be faster than
        it shows, so that only a stretch of time counts in which someone did."""
        if not someone_waits:
            self._ends.clear()
            return
        self._ends.append((self._clock(), num_prompt + num_output, num_output))

    def wait_s(self, load: QueueLoad) -> float | None:
        """Seconds until what waits has been worked off; None while the speed is not known. Answers are taken to be as
        long as the last ones were, or as they may be at most."""
        now = self._clock()
        while self._ends and self._ends[0][0] < now - WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < _FEWEST_ENDS:
            return None
        span_s = max(now - self._ends[0][0], 1e-3)
        # The first end opens the span; its tokens were computed before it.
        per_second = (sum(tokens for _, tokens, _ in self._ends) - self._ends[0][1]) / span_s
        usual_output = sum(output for _, _, output in self._ends) / len(self._ends)
        work = load.prompt_tokens + min(load.max_output_tokens, load.num_requests * usual_output)
        return work / per_second if per_second > 0 else None

    def retry_after_s(self, load: QueueLoad) -> float:
        """What to advise where the queue is full: when half of it is worked off, so that it never runs dry."""
        wait_s = self.wait_s(load)
        return UNKNOWN_S if wait_s is None else min(max(wait_s / 2, 1.0), LONGEST_S)
