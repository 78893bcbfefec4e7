"""Accepts or refuses requests, and estimates the time of waiting requests. Used by `workers.scheduling.scheduler`."""

from workers.config import RoundShapes, SchedulerConfig
from workers.scheduling.latency_budget import LatencyBudget
from workers.scheduling.queues.request_queues import RequestQueues
from workers.scheduling.request import QueueFullError, Request, RequestTooLargeError
from workers.scheduling.timing.step import Step

MIN_ENDED = 4  # finished requests needed for an estimate of the mean answer length
UNKNOWN_S = 5.0  # Retry-After before that
MAX_RETRY_AFTER_S = 60.0  # OpenAI's clients ignore longer values
_LENGTH_WEIGHT, _ROUND_WEIGHT = 1 / 128, 1 / 32  # of the newest request and step in the running means


class Admission:
    """Refuses requests that are invalid or can never run, and all requests while the queue is full.

    budget: predicts the time of prompts and rounds; None until costs are known.
    """

    def __init__(self, config: SchedulerConfig, max_model_len: int, queues: RequestQueues, shapes: RoundShapes) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._queues = queues
        self._max_kv_tokens_at_end = shapes.max_kv_tokens_at_end
        self.budget: LatencyBudget | None = None
        self._num_ended = 0
        self._answer_tokens = 0.0  # mean length of answers
        self._round_tokens = 1.0  # mean tokens per request and round
        self._rounds = Step()  # the last step with rounds

    def ended(self, num_output: int) -> None:
        """Record the output length of a finished request."""
        self._num_ended += 1
        self._answer_tokens += (num_output - self._answer_tokens) * max(1 / self._num_ended, _LENGTH_WEIGHT)

    def ran(self, step: Step, num_tokens: int) -> None:
        """Record a step with rounds, which emitted `num_tokens` tokens."""
        self._rounds = step._replace(chunk_tokens=0, context_tokens=0.0)
        self._round_tokens += (num_tokens / step.num_requests - self._round_tokens) * _ROUND_WEIGHT

    def wait_s(self) -> float | None:
        """Return the seconds until all waiting requests are finished; None if unknown.

        Assumes the batch size of the last step, and answers of the mean length or their limit, whichever is shorter.
        """
        load, budget = self._queues.waiting.load, self.budget
        if budget is None or self._num_ended < MIN_ENDED:
            return None
        num_tokens = min(float(load.max_output_tokens), load.num_requests * self._answer_tokens) - load.num_requests
        num_rounds = max(0.0, num_tokens) / max(1.0, self._round_tokens)
        rounds = self._rounds
        decode_ms = num_rounds / max(1, rounds.num_requests) * budget.step_time.ms(rounds)
        return (budget.prompt_ms(load.backlog_tokens) + decode_ms) / 1000

    def retry_after_s(self) -> float:
        """Return Retry-After for a full queue: the seconds to finish half of it, so that it does not run empty."""
        wait_s = self.wait_s()
        return UNKNOWN_S if wait_s is None else min(max(wait_s / 2, 1.0), MAX_RETRY_AFTER_S)

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
