"""Estimates when a new request would start, from the requests that run and wait. Pure; used by
`aerie.workers.scheduling.queues.admission`.

Everything is charged at the batch that will run, never at the last step's: batch sizes, tree shapes and step times
follow from the queue (`wait_forecast`), lengths of answers and tokens per round from finished rounds and requests. An
answer that reaches `max_tokens` or still runs shows only that it is longer; so lengths are estimated as a rate of stops
per token (Kaplan and Meier, 1958), as `acceptance` does for drafts.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.latency_budget import LatencyBudget
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.queues.shares import Shares
from aerie.workers.scheduling.queues.tenants import Tenant, in_turn
from aerie.workers.scheduling.queues.wait_forecast import QueueSimulation, StepForecast, Work
from aerie.workers.scheduling.sequence import Sequence as RequestSequence
from aerie.workers.scheduling.shapes.acceptance import FIRST_CHANCE, Acceptance
from aerie.workers.scheduling.step_time import Step

FIRST_LENGTH, FIRST_STOPS = 256.0, 0.05  # before any answer: the mean, and its weight in stops
BUCKET_STOPS = 2.0  # weight of the mean over all lengths in a bucket's rate, in stops
MEMORY = 512.0  # answers after which an answer's weight is 1 / e
_STARTS = [0.0, *(float(8 << power) for power in range(18))]  # lengths at which buckets begin
_EDGES = np.array(_STARTS)
_WIDTHS = np.append(np.diff(_EDGES), np.inf)


class AnswerLengths:
    """Stops and tokens by bucket of the length so far.

    While few answers have ended, the estimate errs towards short answers by a standard error, because a request that is
    refused in error is worse than one that waits in vain.
    """

    def __init__(self) -> None:
        self._stops = np.zeros(len(_EDGES))
        self._tokens = np.zeros(len(_EDGES))

    def record_answer(self, num_tokens: int, has_stopped: bool) -> None:
        """Count an answer. has_stopped: whether it ended by itself, not at its limit."""
        decay = 1.0 - 1.0 / MEMORY
        self._tokens = decay * self._tokens + _passed(np.array([num_tokens]))
        self._stops *= decay
        self._stops[bisect_right(_STARTS, num_tokens) - 1] += has_stopped

    def forecast(self, running: npt.NDArray[np.int64]) -> "LengthForecast":
        """Return the estimate. running: [n] tokens so far of running requests."""
        tokens = self._tokens + _passed(running)
        num_stops = self._stops.sum()
        rate = (num_stops + np.sqrt(num_stops) + FIRST_STOPS) / (tokens.sum() + FIRST_STOPS * FIRST_LENGTH)
        return LengthForecast((self._stops + BUCKET_STOPS) / (tokens + BUCKET_STOPS / rate))


class LengthForecast:
    """Quantiles of the length of answers. rates: stops per token, by bucket."""

    def __init__(self, rates: npt.NDArray[np.float64]) -> None:
        self._rates: list[float] = rates.tolist()
        self._hazards: list[float] = [0.0, *np.cumsum(rates[:-1] * _WIDTHS[:-1]).tolist()]

    def length(self, num_so_far: int, max_tokens: int, hazard: float) -> float:
        """Return the length of an answer with `num_so_far` tokens. hazard: a draw from the exponential distribution of
        mean 1."""
        bucket = bisect_right(_STARTS, num_so_far) - 1
        hazard += self._hazards[bucket] + self._rates[bucket] * (num_so_far - _STARTS[bucket])
        bucket = bisect_right(self._hazards, hazard) - 1
        return min(float(max_tokens), _STARTS[bucket] + (hazard - self._hazards[bucket]) / self._rates[bucket])


def _passed(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the tokens of all answers in each bucket."""
    passed: npt.NDArray[np.float64] = np.clip(lengths[:, None] - _EDGES, 0.0, _WIDTHS).sum(0)
    return passed


REFRESH_S = 0.25  # age at which a simulation is repeated; one takes a millisecond or two of the host
REFRESH_SHARE = 1 / 16  # change of the queue's length, as a share of it, at which it is repeated
STEPS_REFRESH_S = 2.0  # age at which expected step times are predicted again
MAX_GROUPS = 128  # simulated groups of waiting requests; more are extrapolated
SAMPLES_PER_TENANT = 8  # waiting requests from which the mean work of a tenant's is estimated
GROUPS_PER_BATCH = 16  # minimum number of groups in a full batch
FIRST_ROUNDS = 16.0  # weight of the first guess in a shape's tokens per round, in rounds
MAX_ROUNDS = 8192.0  # rounds after which older ones are forgotten
_SPREAD, _CHOICE = math.sqrt(2) % 1, math.sqrt(5) % 1  # multiples of both, modulo 1, are spread evenly


class ExpectedWait:
    """The seconds until a new request would start.

    budget: predicts steps; None until costs are known.
    """

    def __init__(
        self, queues: RequestQueues, shapes: RoundShapes, acceptance: Acceptance, clock: Callable[[], float]
    ) -> None:
        self.budget: LatencyBudget | None = None
        self._queues = queues
        self._shares = Shares(queues)
        self._shapes = shapes
        self._acceptance = acceptance
        self._clock = clock
        self._lengths = AnswerLengths()
        first = [1.0 if shapes.model_free else _tokens(FIRST_CHANCE, shape.depth) for shape in shapes.shapes]
        self._num_rounds = np.full(len(shapes), FIRST_ROUNDS)
        self._num_tokens = FIRST_ROUNDS * np.array(first)
        self._steps: StepForecast | None = None
        self._steps_for = (-math.inf, 0.0, 0.0, 0.0)  # time and arguments of `_steps`
        self._at_s, self._num_waiting = -math.inf, 0  # time and queue of the last simulation
        self._wait_s = self._s_per_request = 0.0
        self._start_s: list[float] = [0.0]  # start of each group of `_size` waiting requests
        self._size = 1
        self._work: dict[Tenant, TenantWork] = {}

    def record_answer(self, num_tokens: int, has_stopped: bool) -> None:
        """Record the output length of a finished request. has_stopped: whether it ended before its limit."""
        self._lengths.record_answer(num_tokens, has_stopped)

    def record_step(self, step: Step, num_tokens: int) -> None:
        """Record a step with rounds, which emitted `num_tokens` tokens."""
        shape = step.shape
        if self._num_rounds[shape] > MAX_ROUNDS:
            self._num_rounds[shape] /= 2
            self._num_tokens[shape] /= 2
        self._num_rounds[shape] += step.num_requests
        self._num_tokens[shape] += num_tokens

    def wait_s(self, tenant: Tenant | None = None) -> float | None:
        """Return the seconds until a request that came now would start; None if unknown. tenant: whose it is; None: it
        comes after all others."""
        budget, num_waiting = self.budget, len(self._queues.waiting)
        if budget is None:
            return None
        if not num_waiting and self._queues.slot_pages.num_free_slots:
            return budget.prompt_ms(self._queues.backlog_tokens) / 1000
        others = tenant is not None and any(other is not tenant for other in self._shares.tenants())
        if tenant is not None and others and self._shares.is_next(tenant):
            return budget.prompt_ms(self._shares.backlog_of(tenant)) / 1000
        now = self._clock()
        arrived = num_waiting - self._num_waiting
        if now - self._at_s > REFRESH_S or abs(arrived) > max(1.0, REFRESH_SHARE * self._num_waiting):
            self._simulate(budget, now)
            arrived = 0
        if tenant is not None and others:
            return max(0.0, self._start_after_s(self._num_ahead(tenant)) - (now - self._at_s))
        return max(0.0, self._wait_s + arrived * self._s_per_request - (now - self._at_s))

    def s_per_request(self, tenant: Tenant) -> float:
        """Return the seconds between the starts of two waiting requests of a tenant at the end of the queue."""
        if self.wait_s() is None:
            return 0.0
        weights = sum(other.weight for other in self._work.keys() | {tenant})
        return self._s_per_request * weights / tenant.weight

    def _simulate(self, budget: LatencyBudget, now: float) -> None:
        """Simulate the queue from now on, and store when its requests start.

        At most `MAX_GROUPS` groups of waiting requests are simulated, each represented by one sampled request. Later
        requests, and one that came now, are extrapolated from the rate at which the second half of the groups starts.
        """
        queues, slot_pages = self._queues, self._queues.slot_pages
        num_waiting, num_slots = len(queues.waiting), len(slot_pages.number)
        active = queues.active.values()
        lengths = self._lengths.forecast(np.array([len(sequence.request.output) for sequence in active], np.int64))
        self._size = size = min(max(1, num_slots // GROUPS_PER_BATCH), max(1, math.ceil(num_waiting / MAX_GROUPS)))
        margin = self._shapes.max_kv_tokens + slot_pages.page_size // 2
        sampled = self._sampled(min(num_waiting // size, MAX_GROUPS), size, lengths)
        num_groups = len(sampled)
        prompts = sum(len(sequence.tokens) - sequence.num_cached for sequence in sampled)
        scale = queues.waiting.load.backlog_tokens / num_waiting * num_groups / prompts if prompts else 1.0
        running = [_work(sequence, lengths, 1, len(sequence.tokens) - sequence.computed, margin) for sequence in active]
        waiting = [
            _work(sequence, lengths, size, scale * (len(sequence.tokens) - sequence.num_cached), margin)
            for sequence in sampled
        ]
        rest = num_waiting - num_groups * size
        newest = waiting[-1] if waiting else running[-1]
        steps = self._step_forecast(budget, now, running + waiting, [*active, *sampled])
        simulation = QueueSimulation(
            running,
            [*waiting, newest._replace(num_requests=1)],
            steps=steps,
            num_slots=num_slots,
            num_kv_tokens=slot_pages.allocator.num_pages * slot_pages.page_size,
            reserved_tokens=slot_pages.page_size * slot_pages.pages_for(self._shapes.max_new_tokens),
        )
        self._start_s = start_s = simulation.start_s()
        half = num_groups // 2
        later = max(1, (num_groups - half) * size)
        self._s_per_request = (start_s[-1] - start_s[half]) / later
        self._wait_s = start_s[-1] + rest * self._s_per_request
        self._at_s, self._num_waiting = now, num_waiting

    def _sampled(self, num_groups: int, size: int, lengths: LengthForecast) -> list[RequestSequence]:
        """Return one waiting request for each of the first groups, in the order of admission."""
        by_tenant = self._queues.waiting.by_tenant()
        self._work = self._work_of_tenants(lengths) if len(by_tenant) > 1 else {}
        if not self._work:
            return [sequence for waiting in by_tenant.values() for sequence in _sampled(waiting, num_groups, size)]
        pools = [(work.tenant, [work] * (work.num_waiting // size)) for work in self._work.values()]
        order = list(islice(in_turn(pools, _first_served, lambda work: size * work.tokens), num_groups))
        samples = {work: iter(_sampled(by_tenant[work.key], order.count(work), size)) for work in set(order)}
        return [next(samples[work]) for work in order]

    def _work_of_tenants(self, lengths: LengthForecast) -> dict[Tenant, "TenantWork"]:
        """Return the work of each tenant with waiting requests."""
        queues, work = self._queues, {}
        for tenant, waiting in queues.waiting.by_tenant().items():
            some = _sampled(waiting, min(len(waiting), SAMPLES_PER_TENANT), 1)
            tokens = sum(_tokens_of(sequence, lengths) for sequence in some) / len(some)
            running = sum(
                _tokens_of(sequence, lengths) for sequence in queues.active.values() if sequence.tenant is tenant
            )
            served = tenant.served + running / tenant.weight
            work[tenant] = TenantWork(tenant, Tenant(tenant.name, tenant.weight, served), len(waiting), tokens)
        return work

    def _num_ahead(self, tenant: Tenant) -> float:
        """Return the number of waiting requests that start before a new one of this tenant."""
        own = self._work.get(tenant)
        num_own = len(self._queues.waiting.by_tenant().get(tenant, ()))
        served, ahead = self._queues.tenants.counter(tenant, bool(num_own)), float(num_own)
        if own is not None:
            served = own.tenant.served + num_own * own.tokens / tenant.weight
        for work in self._work.values():
            if work is not own:
                num_due = (served - work.tenant.served) * work.tenant.weight / work.tokens
                ahead += min(max(0.0, num_due), work.num_waiting)
        return ahead

    def _start_after_s(self, num_ahead: float) -> float:
        """Return the seconds from the last simulation until a request starts that so many precede."""
        last = len(self._start_s) - 1
        beyond = num_ahead - last * self._size
        if beyond >= 0.0:
            return self._start_s[-1] + beyond * self._s_per_request
        return float(np.interp(num_ahead / self._size, np.arange(last + 1), self._start_s))

    def _step_forecast(
        self, budget: LatencyBudget, now: float, work: Sequence[Work], sequences: Sequence[RequestSequence]
    ) -> StepForecast:
        """Return the forecast of step times for this work; the last one if it is recent and the work's means changed by
        at most 10 %."""
        count = sum(item.num_requests for item in work)
        kv_tokens = sum(item.num_requests * (item.kv_tokens + item.answer_tokens / 2) for item in work) / count
        prompt_tokens = sum(item.num_requests * item.kv_tokens for item in work) / count
        share = sum(item.request.sampling.speculative for item in sequences) / len(sequences)
        made_s, *others = self._steps_for
        known = zip(others, (kv_tokens, prompt_tokens, share), strict=True)
        if self._steps is None or now - made_s > STEPS_REFRESH_S or any(abs(a - b) > 0.1 * b for a, b in known):
            tokens = [1.0 + share * (item - 1.0) for item in self._round_tokens()]
            context_tokens = max(0.0, prompt_tokens - budget.max_step_tokens) / 2
            self._steps = StepForecast(budget, self._shapes, tokens, kv_tokens, context_tokens)
            self._steps_for = now, kv_tokens, prompt_tokens, share
        return self._steps

    def _round_tokens(self) -> list[float]:
        """Return the expected tokens of a request's round, by shape."""
        if self._shapes.learns_acceptance:
            return self._acceptance.tokens_of_new()
        per_round: list[float] = (self._num_tokens / self._num_rounds).tolist()
        return per_round


class TenantWork(NamedTuple):
    """Work of a tenant with waiting requests.

    key: the tenant.
    tenant: the tenant as it will be when its running requests have ended.
    num_waiting: waiting requests.
    tokens: mean tokens of each.
    """

    key: Tenant
    tenant: Tenant
    num_waiting: int
    tokens: float


def _first_served(work: TenantWork, served: float) -> tuple[float, ...]:
    return (served,)


def _sampled(waiting: Sequence[RequestSequence], num_groups: int, size: int) -> list[RequestSequence]:
    """Return one request for each group: in the queue's order, or spread over a queue that is too long."""
    if (num_groups + 1) * size > len(waiting):
        return [waiting[index * size + size // 2] for index in range(num_groups)]
    return [waiting[int((index * _CHOICE % 1) * len(waiting))] for index in range(num_groups)]


def _tokens_of(sequence: RequestSequence, lengths: LengthForecast) -> float:
    """Return the tokens that a request has still to compute."""
    work = _work(sequence, lengths, 1, len(sequence.tokens) - max(sequence.computed, sequence.num_cached), 0)
    return max(1.0, work.prompt_tokens + work.answer_tokens)


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
