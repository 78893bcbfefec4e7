"""Accepts or refuses requests. Used by `aerie.workers.scheduling.scheduler`."""

import math
from collections.abc import Callable

from aerie.workers.config import RoundShapes, SchedulerConfig
from aerie.workers.prompt_inputs import ImageSizes
from aerie.workers.scheduling.queues.expected_wait import ExpectedWait
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.queues.tenants import Tenant
from aerie.workers.scheduling.queues.waiting_queue import QueueLoad
from aerie.workers.scheduling.request import QueueFullError, Request, RequestTooLargeError
from aerie.workers.scheduling.shapes.acceptance import Acceptance

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
        acceptance: Acceptance,
        clock: Callable[[], float],
        hidden_size: int = 0,
        images: ImageSizes | None = None,
    ) -> None:
        """hidden_size: the target's, which embeddings in requests must have. images: see `EngineLayout`."""
        self._config = config
        self._max_model_len = max_model_len
        self._queues = queues
        self._max_kv_tokens_at_end = shapes.max_kv_tokens_at_end
        self._clock = clock
        self._hidden_size = hidden_size
        self._images = images
        self.expected = ExpectedWait(queues, shapes, acceptance, clock)

    def wait_s(self, tenant: Tenant | None = None) -> float | None:
        """Return the seconds until a request that came now would start; None if unknown. tenant: see `ExpectedWait`."""
        return self.expected.wait_s(tenant)

    def retry_after_s(self, tenant: Tenant, limit_s: float = math.inf) -> float:
        """Return Retry-After for a refused request: the seconds until the queue has room for it and for the requests
        that were refused before it, so that one which comes again then is accepted.

        tenant: whose it is.
        limit_s: maximum `wait_s` of new requests.
        """
        now, wait_s = self._clock(), self.wait_s(tenant)
        if wait_s is None:
            return UNKNOWN_S
        tenant.retry_at_s = max(tenant.retry_at_s, now + max(0.0, wait_s - limit_s))
        tenant.retry_at_s += self.expected.s_per_request(tenant)
        return min(max(tenant.retry_at_s - now, 1.0), MAX_RETRY_AFTER_S)

    def check_room(self, request: Request) -> None:
        """Raise QueueFullError if the queue has no room. A tenant with less than its share of it has room."""
        config, load = self._config, self._queues.waiting.load
        if self._has_share(request):
            return
        if config.max_waiting is not None and load.num_requests >= config.max_waiting:
            raise QueueFullError(f"max_waiting={config.max_waiting}: {load.num_requests} wait; retry later")
        if load.num_requests and load.bytes_with(request) > config.max_waiting_bytes:
            raise QueueFullError(
                f"max_waiting_bytes={config.max_waiting_bytes}: {load.num_requests} requests with "
                f"{load.prompt_tokens} prompt tokens wait; retry later"
            )

    def _has_share(self, request: Request) -> bool:
        """Whether others fill the queue: with this request its tenant would still have less than its share."""
        by_tenant = self._queues.waiting.by_tenant()
        tenant = self._queues.tenants.of(request.owner)
        if not by_tenant.keys() - {tenant}:
            return False
        share = tenant.weight / sum(item.weight for item in by_tenant.keys() | {tenant})
        own = by_tenant.get(tenant, ())
        tokens = sum(len(item.prompt) for item in own)
        load = QueueLoad(len(own), tokens, input_bytes=sum(item.request.num_input_bytes for item in own))
        has_bytes = load.bytes_with(request) <= share * self._config.max_waiting_bytes
        max_waiting = self._config.max_waiting
        return has_bytes and (max_waiting is None or len(own) + 1 <= share * max_waiting)

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
        self._queues.adapters.check(sampling.adapter)
        if request.inputs is not None:
            max_positions = self._max_model_len - sampling.max_tokens
            request.inputs.check(len(request.prompt), self._hidden_size, max_positions, self._images)
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
