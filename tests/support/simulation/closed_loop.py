"""Clients that each send a request as soon as the last one is answered, on simulated steps of a small model on two
cores: what a policy makes of the gaps of plain streams when other requests come in a burst.

A round takes milliseconds for each request beside its weights, and rounds of 32 chains take three times the ITL target.
"""

import heapq
import itertools
import math
import random
import statistics
from dataclasses import dataclass, field

from aerie.attention.config import CacheConfig
from aerie.cluster.coordinator.plan_timing import PlanTiming
from aerie.workers.config import PLAIN, RoundShapes, SchedulerConfig
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.plan import SamplingParams, StepPlan, StepResult
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.scheduler import Scheduler
from tests.support.simulation.load import CHAIN, SimulatedRank
from tests.support.simulation.scheduler import Clock

SHAPES = RoundShapes((PLAIN, CHAIN), default=1, adaptive=True, eager=True)
NUM_SLOTS = 32
_SIZES, _CHUNKS, _BESIDE = (1, 2, 4, 8, 16, 32), (1, 16, 64, 256, 512), (0, 1, 8, 32)


def two_cores(plain_ms: float, chain_ms: float) -> CostTable:
    """plain_ms, chain_ms: of a round for each request."""

    def rounds(base_ms: float, each_ms: float) -> RoundCosts:
        return RoundCosts(_SIZES, tuple(base_ms + each_ms * count for count in _SIZES), (0.0,) * len(_SIZES))

    beside_ms = [18.0 + chain_ms * count if count else 8.0 for count in _BESIDE]
    chunk_ms = tuple(tuple(ms + 2.0 + 0.6 * tokens for tokens in _CHUNKS) for ms in beside_ms)
    return CostTable((rounds(10.0, plain_ms), rounds(18.0, chain_ms)), _BESIDE, _CHUNKS, chunk_ms, (1,) * len(_BESIDE))


@dataclass(frozen=True)
class Clients:
    """num: clients. max_tokens: of each answer. first_s: when they begin, one after the other from the first to the
    second. pause_s: the longest pause before the next request; infinity: no next one."""

    num: int
    max_tokens: int
    first_s: tuple[float, float] = (0.0, 0.0)
    pause_s: float = 0.0


@dataclass
class Answer:
    """sent_s: when its request came. times_s: of its events."""

    clients: Clients
    sent_s: float
    times_s: list[float] = field(default_factory=list)

    @property
    def gaps_ms(self) -> list[float]:
        """Between its events."""
        return [1000 * (later - sooner) for sooner, later in itertools.pairwise(self.times_s)]

    def excess(self, target_ms: float) -> float:
        """Its longest gap, over twice its median gap and a target."""
        gaps = self.gaps_ms
        return max(gaps) / (2 * statistics.median(gaps) + target_ms)


@dataclass
class Served:
    """answers: that have ended. seconds: until the last one had. num_tokens: of all of them. max_rounds: of a step."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0
    max_rounds: int = 0


def serve(groups: list[Clients], costs: CostTable, target_ms: float, seconds: float, seed: int) -> Served:
    """Serve the clients' requests; after `seconds` they send no more."""
    clock, rng, timing, found = Clock(), random.Random(seed), PlanTiming(2), Served()
    config = SchedulerConfig(max_running=NUM_SLOTS, max_step_tokens=512, itl_target_ms=target_ms)
    cache = CacheConfig(page_size=16, prefix_cache=False)
    scheduler = Scheduler(config, cache, 20_000, 2048, clock, SHAPES, 1)
    scheduler.use_costs(costs)

    def step_ms(plan: StepPlan, kv_tokens: int) -> float:
        num_tokens = sum(len(chunk.tokens) // 4 for chunk in plan.chunks)
        found.max_rounds = max(found.max_rounds, len(plan.slots) // 4)
        return costs.step_ms(plan.shape, len(plan.slots) // 4, kv_tokens, num_tokens) * rng.lognormvariate(0, 0.1)

    rank = SimulatedRank(NUM_SLOTS, step_ms, seed, lambda shape, rng: rng.randint(1, 4) if shape else 1)
    numbers, running = itertools.count(), dict[str, Answer]()
    coming = [(rng.uniform(*group.first_s), next(numbers), group) for group in groups for _ in range(group.num)]
    heapq.heapify(coming)
    plan_due_s = math.inf
    while True:
        result_s = rank.results[0][0] if rank.results else math.inf
        next_s = min(coming[0][0] if coming else math.inf, result_s, plan_due_s)
        if next_s == math.inf:
            found.seconds = clock.now
            return found
        clock.now = max(clock.now, next_s)
        while coming and coming[0][0] <= clock.now:
            number, group = heapq.heappop(coming)[1:]
            running[str(number)] = Answer(group, clock.now)
            scheduler.submit(Request(str(number), [1] * 3, SamplingParams(group.max_tokens)))
        if result_s <= clock.now:
            result = rank.results.popleft()[1]
            assert isinstance(result, StepResult), "no graph waits"
            timing.record_result(clock.now, result.elapsed_s)
            for output in scheduler.apply(result):
                answer = running[output.request.request_id]
                answer.times_s.append(clock.now)
                found.num_tokens += len(output.tokens)
                if output.finish_reason is not None:
                    found.answers.append(answer)
                    again_s = clock.now + rng.random() * answer.clients.pause_s
                    if again_s < seconds:
                        heapq.heappush(coming, (again_s, next(numbers), answer.clients))
        plan_due_s = math.inf
        while scheduler.num_in_flight < 2:
            due_s = timing.due_s()
            if clock.now < due_s:
                plan_due_s = due_s
                break
            plan = scheduler.schedule()
            if plan is None:
                break
            timing.record_plan(clock.now, scheduler.expected)
            rank.execute(plan, clock.now)
