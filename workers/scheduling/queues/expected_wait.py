"""Estimates when a new request would start, from the requests that run and wait. Used by
`aerie.workers.scheduling.queues.admission`.

Everything is charged at the batch that will run, never at the last step's: batch sizes, tree shapes and step times
follow from the queue (`wait_forecast`), lengths of answers and tokens per round from finished rounds and requests.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.acceptance.survival import FIRST_CHANCE, Survival
from aerie.workers.scheduling.latency_budget import LatencyBudget
from aerie.workers.scheduling.queues.answer_lengths import AnswerLengths, LengthForecast
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.queues.wait_forecast import QueueSimulation, StepForecast, Work
from aerie.workers.scheduling.sequence import Sequence as RequestSequence
from aerie.workers.scheduling.timing.step import Step

REFRESH_S = 0.25  # age at which a simulation is repeated; one takes a millisecond or two of the host
REFRESH_SHARE = 1 / 16  # change of the queue's length, as a share of it, at which it is repeated
STEPS_REFRESH_S = 2.0  # age at which expected step times are predicted again
MAX_GROUPS = 128  # simulated groups of waiting requests; more are extrapolated
GROUPS_PER_BATCH = 16  # minimum number of groups in a full batch
FIRST_ROUNDS = 16.0  # weight of the first guess in a shape's tokens per round, in rounds
MAX_ROUNDS = 8192.0  # rounds after which older ones are forgotten
_SPREAD, _CHOICE = math.sqrt(2) % 1, math.sqrt(5) % 1  # multiples of both, modulo 1, are spread evenly


class ExpectedWait:
    """The seconds until a new request would start.

    budget: predicts steps; None until costs are known.
    """

    def __init__(
        self, queues: RequestQueues, shapes: RoundShapes, survival: Survival, clock: Callable[[], float]
    ) -> None:
        self.budget: LatencyBudget | None = None
        self._queues = queues
        self._shapes = shapes
        self._survival = survival
        self._clock = clock
        self._lengths = AnswerLengths()
        first = [1.0 if shapes.model_free else _tokens(FIRST_CHANCE, shape.depth) for shape in shapes.shapes]
        self._num_rounds = np.full(len(shapes), FIRST_ROUNDS)
        self._num_tokens = FIRST_ROUNDS * np.array(first)
        self._steps: StepForecast | None = None
        self._steps_for = (-math.inf, 0.0, 0.0, 0.0)  # time and arguments of `_steps`
        self._at_s, self._num_waiting = -math.inf, 0  # of the last simulation
        self._wait_s = self._s_per_request = 0.0

    def ended(self, num_tokens: int, has_stopped: bool) -> None:
        """Record the output length of a finished request. has_stopped: whether it ended before its limit."""
        self._lengths.ended(num_tokens, has_stopped)

    def ran(self, step: Step, num_tokens: int) -> None:
        """Record a step with rounds, which emitted `num_tokens` tokens."""
        shape = step.shape
        if self._num_rounds[shape] > MAX_ROUNDS:
            self._num_rounds[shape] /= 2
            self._num_tokens[shape] /= 2
        self._num_rounds[shape] += step.num_requests
        self._num_tokens[shape] += num_tokens

    def wait_s(self) -> float | None:
        """Return the seconds until a request that came now would start; None if unknown."""
        budget, num_waiting = self.budget, len(self._queues.waiting)
        if budget is None:
            return None
        if not num_waiting and self._queues.slot_pages.num_free_slots:
            return budget.prompt_ms(self._queues.backlog_tokens) / 1000
        now = self._clock()
        arrived = num_waiting - self._num_waiting
        if now - self._at_s > REFRESH_S or abs(arrived) > max(1.0, REFRESH_SHARE * self._num_waiting):
            self._simulate(budget, now)
            arrived = 0
        return max(0.0, self._wait_s + arrived * self._s_per_request - (now - self._at_s))

    def s_per_request(self) -> float:
        """Return the seconds between the starts of two waiting requests at the end of the queue."""
        return self._s_per_request if self.wait_s() is not None else 0.0

    def _simulate(self, budget: LatencyBudget, now: float) -> None:
        queues, slot_pages = self._queues, self._queues.slot_pages
        num_waiting, num_slots = len(queues.waiting), len(slot_pages.number)
        active = queues.active.values()
        lengths = self._lengths.forecast(np.array([len(each.request.output) for each in active], np.int64))
        size = min(max(1, num_slots // GROUPS_PER_BATCH), max(1, math.ceil(num_waiting / MAX_GROUPS)))
        num_groups = min(num_waiting // size, MAX_GROUPS)
        sampled = self._sampled(num_groups, size)
        prompts = sum(len(each.tokens) - each.num_cached for each in sampled)
        scale = queues.waiting.load.backlog_tokens / num_waiting * num_groups / prompts if prompts else 1.0
        margin = self._shapes.max_kv_tokens + slot_pages.page_size // 2
        running = [_work(each, lengths, 1, len(each.tokens) - each.computed, margin) for each in active]
        waiting = [_work(each, lengths, size, scale * (len(each.tokens) - each.num_cached), margin) for each in sampled]
        rest = num_waiting - num_groups * size
        newest = waiting[-1] if waiting else running[-1]
        steps = self._step_forecast(budget, now, running + waiting, [*active, *sampled])
        simulation = QueueSimulation(
            running,
            [*waiting, newest._replace(num_requests=1)],
            steps,
            num_slots,
            slot_pages.allocator.num_pages * slot_pages.page_size,
            slot_pages.page_size * slot_pages.pages_for(self._shapes.max_new_tokens),
        )
        start_s = simulation.start_s()
        half = num_groups // 2
        later = max(1, (num_groups - half) * size)
        self._s_per_request = (start_s[-1] - start_s[half]) / later
        self._wait_s = start_s[-1] + rest * self._s_per_request
        self._at_s, self._num_waiting = now, num_waiting

    def _sampled(self, num_groups: int, size: int) -> list[RequestSequence]:
        """Return one waiting request for each group: in the queue's order, or spread over a queue that is too long."""
        waiting = self._queues.waiting
        if (num_groups + 1) * size > len(waiting):
            return [waiting[index * size + size // 2] for index in range(num_groups)]
        return [waiting[int((index * _CHOICE % 1) * len(waiting))] for index in range(num_groups)]

    def _step_forecast(
        self, budget: LatencyBudget, now: float, work: Sequence[Work], sequences: Sequence[RequestSequence]
    ) -> StepForecast:
        count = sum(each.num_requests for each in work)
        kv_tokens = sum(each.num_requests * (each.kv_tokens + each.answer_tokens / 2) for each in work) / count
        prompt_tokens = sum(each.num_requests * each.kv_tokens for each in work) / count
        share = sum(each.request.sampling.speculative for each in sequences) / len(sequences)
        made_s, *others = self._steps_for
        known = zip(others, (kv_tokens, prompt_tokens, share), strict=True)
        if self._steps is None or now - made_s > STEPS_REFRESH_S or any(abs(a - b) > 0.1 * b for a, b in known):
            tokens = [1.0 + share * (each - 1.0) for each in self._round_tokens()]
            context_tokens = max(0.0, prompt_tokens - budget.max_step_tokens) / 2
            self._steps = StepForecast(budget, self._shapes, tokens, kv_tokens, context_tokens)
            self._steps_for = now, kv_tokens, prompt_tokens, share
        return self._steps

    def _round_tokens(self) -> list[float]:
        """Return the expected tokens of a request's round, by shape."""
        if self._shapes.learns_acceptance:
            return self._survival.tokens_of_new()
        found: list[float] = (self._num_tokens / self._num_rounds).tolist()
        return found


def _work(
    sequence: RequestSequence, lengths: LengthForecast, num_requests: int, prompt_tokens: float, margin: int
) -> Work:
    """Return what a request has still to do. margin: KV tokens that it holds beyond its own."""
    num_output, max_tokens = len(sequence.request.output), sequence.request.sampling.max_tokens
    hazard = -math.log1p(-(sequence.number * _SPREAD % 1))
    length = lengths.length(num_output, max_tokens, hazard)
    kv_tokens = len(sequence.prompt) + num_output + margin
    return Work(num_requests, prompt_tokens, kv_tokens, max(1.0, length - num_output))


def _tokens(chance: float, depth: int) -> float:
    """Return the expected tokens of a round if each draft is accepted with `chance` after those before it."""
    return sum(chance**k for k in range(depth + 1))
