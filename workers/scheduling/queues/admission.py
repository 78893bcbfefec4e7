"""Accepts or refuses requests. Used by `aerie.workers.scheduling.scheduler`."""

import math
from collections.abc import Callable

from aerie.workers.config import RoundShapes, SchedulerConfig
from aerie.workers.scheduling.acceptance.survival import Survival
from aerie.workers.scheduling.queues.expected_wait import ExpectedWait
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.request import QueueFullError, Request, RequestTooLargeError

UNKNOWN_S = 5.0  # Retry-After before costs are known
MAX_RETRY_AFTER_S = 60.0  # OpenAI's clients ignore longer values


class Admission:
    """Refuses requests that are invalid or can never run, and all requests while the queue is full.

    expected: the expected wait of a new request.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        max_model_len: int,
        queues: RequestQueues,
        shapes: RoundShapes,
        survival: Survival,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._queues = queues
        self._max_kv_tokens_at_end = shapes.max_kv_tokens_at_end
        self._clock = clock
        self.expected = ExpectedWait(queues, shapes, survival, clock)
        self._retry_at_s = -math.inf  # when the last refused request may come again

    def wait_s(self) -> float | None:
        """Return the seconds until a request that came now would start; None if unknown."""
        return self.expected.wait_s()

    def retry_after_s(self, limit_s: float = math.inf) -> float:
        """Return Retry-After for a refused request: the seconds until the queue has room for it and for the requests
        that were refused before it, so that one which comes again then is accepted.

        limit_s: maximum `wait_s` of new requests.
        """
        now, wait_s = self._clock(), self.wait_s()
        if wait_s is None:
            return UNKNOWN_S
        self._retry_at_s = max(self._retry_at_s, now + max(0.0, wait_s - limit_s)) + self.expected.s_per_request()
        return min(max(self._retry_at_s - now, 1.0), MAX_RETRY_AFTER_S)

    def check_room(self, request: Request) -> None:
        """Raise QueueFullError if the queue has no room."""
        config, load = self._config, self._queues.waiting.load
        if config.max_waiting is not None and load.num_requests >= config.max_waiting:
            raise QueueFullError(f"max_waiting={config.max_waiting}: {load.num_requests} wait; retry later")
        if load.num_requests and load.bytes_with(len(request.prompt)) > config.max_waiting_bytes:
            raise QueueFullError(
                f"max_waiting_bytes={config.max_waiting_bytes}: {load.num_requests} requests with "
                f"{load.prompt_tokens} prompt tokens wait; retry later"
            )

    def check(self, request: Request) -> None:
        """Raise ValueError for an invalid request, RequestTooLargeError for one that can never run."""
        sampling, slot_pages = request.sampling, self._queues.slot_pages
        if request.request_id in self._queues:
            raise ValueError(f"request_id={request.request_id}: a request with this id runs already; make ids unique")
        if not request.prompt:
            raise ValueError("prompt: has no tokens; send at least one")
        if sampling.max_tokens <= len(request.output):
            raise ValueError(
                f"max_tokens={sampling.max_tokens}: must be above the {len(request.output)} output tokens that the "
                "request brings"
            )
        length = len(request.prompt) + sampling.max_tokens
        if length > self._max_model_len:
            raise RequestTooLargeError(
                f"prompt of {len(request.prompt)} tokens and max_tokens={sampling.max_tokens} make {length}, the limit "
                f"is {self._max_model_len}: shorten the prompt or lower max_tokens"
            )
        need = slot_pages.pages_for(length - 1 + self._max_kv_tokens_at_end)
        if need > slot_pages.allocator.num_pages:
            raise RequestTooLargeError(
                f"prompt of {len(request.prompt)} tokens and max_tokens={sampling.max_tokens} need {need} KV pages, "
                f"the pool has {slot_pages.allocator.num_pages}: shorten the prompt, lower max_tokens or enlarge "
                "the KV cache"
            )
