"""The expected wait of a new request, for refusals of a full queue and `engine.queue_timeout_s`."""

import random
from dataclasses import replace

import numpy as np
import pytest

from aerie.attention.config import CacheConfig
from aerie.workers.config import PLAIN, RoundShapes, SchedulerConfig
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.latency_budget import LatencyBudget
from aerie.workers.scheduling.plan import SamplingParams, StepResult
from aerie.workers.scheduling.queues.admission import MAX_RETRY_AFTER_S, UNKNOWN_S
from aerie.workers.scheduling.queues.expected_wait import AnswerLengths
from aerie.workers.scheduling.queues.tenants import Tenant
from aerie.workers.scheduling.queues.wait_forecast import QueueSimulation, StepForecast, Work
from aerie.workers.scheduling.request import Request, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler
from aerie.workers.scheduling.step_time import Step, StepTime
from tests.support.simulation.bursts import ENGINES, Answers, burst
from tests.support.simulation.load import H200, Policy, poisson_load, replace_struct, simulate
from tests.support.simulation.scheduler import Clock
from tests.support.slow import slow

COSTS = CostTable(
    (RoundCosts((1, 8), (10.0, 10.0), (0.0, 0.0)),), (0, 8), (1, 100), ((1.0, 100.0), (11.0, 110.0)), (0, 0)
)
CONFIG = SchedulerConfig(8, 100, itl_target_ms=1000.0)


def _scheduler(clock: Clock, num_pages: int = 10_000) -> Scheduler:
    """Eight slots; 100 prompt tokens take 100 ms, a round 10."""
    return Scheduler(CONFIG, CacheConfig(page_size=16, prefix_cache=False), num_pages, 4000, clock)


def _submit(scheduler: Scheduler, count: int, prompt_len: int, max_tokens: int) -> None:
    for _ in range(count):
        name = f"r{scheduler.num_waiting}"
        scheduler.submit(Request(name, [1] * prompt_len, SamplingParams(max_tokens)))


def test_the_wait_is_charged_at_the_batch_that_will_run_and_not_at_the_last_one() -> None:
    """64 answers of 101 tokens need eight batches of eight, whatever ran before: one request, as at a load's end."""
    clock = Clock()
    scheduler = _scheduler(clock)
    assert scheduler.admission.wait_s() is None and scheduler.admission.retry_after_s(Tenant()) == UNKNOWN_S
    scheduler.use_costs(COSTS)
    assert scheduler.admission.wait_s() == 0.0
    expected = scheduler.admission.expected
    expected.record_answer(101, has_stopped=False)
    expected.record_step(Step(0, 1, 500), 1)
    _submit(scheduler, 64, 10, 101)
    wait_s = scheduler.admission.wait_s()
    assert wait_s == pytest.approx(64 * 0.010 + 8 * 1.0, rel=0.15)
    assert type(wait_s) is type(scheduler.admission.retry_after_s(Tenant(), 5.0)) is float, "as messages encode it"


def test_pages_bound_the_batch() -> None:
    """Each request fills a quarter of the pages at its end, so that four of eight slots run."""
    clock = Clock()
    waits_s = []
    for num_pages in (10_000, 4 * 20):
        scheduler = _scheduler(clock, num_pages)
        scheduler.use_costs(COSTS)
        scheduler.admission.expected.record_answer(100, has_stopped=False)
        _submit(scheduler, 64, 200, 100)
        waits_s.append(scheduler.admission.wait_s())
    assert waits_s[1] is not None and waits_s[0] is not None and waits_s[1] > 1.2 * waits_s[0]


def test_answers_at_their_limit_show_only_that_they_would_be_longer() -> None:
    lengths, none = AnswerLengths(), np.empty(0, np.int64)
    hazards = -np.log1p(-(np.arange(400) + 0.5) / 400)

    def mean(max_tokens: int, running: np.ndarray = none) -> float:
        forecast = lengths.forecast(running)
        return float(np.mean([forecast.length(0, max_tokens, hazard) for hazard in hazards.tolist()]))

    assert mean(4096) < 400, "unknown ones are short, so that none is refused in error"
    lengths.record_answer(1000, has_stopped=False)
    assert mean(1000) > 900
    for _ in range(3):
        for num_tokens in range(1, 400):
            lengths.record_answer(num_tokens, has_stopped=True)
    assert mean(4096) == pytest.approx(200, rel=0.15)
    assert lengths.forecast(none).length(300, 4096, 1.0) < 450, "those of 300 tokens have at most a hundred more"
    assert mean(4096, np.full(500, 390)) > 1.3 * 200, "five hundred that run have passed 390"


CASES = [
    ("70B", "one", "1024/1024", 200),
    ("8B chain", "load", "512/64", 400),
    *slow(
        ("70B", "load", "1024/1024", 1000),
        ("70B", "load", "1024/256 of 4096", 2000),
        ("70B chain", "load", "1024/1024", 1000),
        ("70B chain", "load", "256/1024 of 4096", 1000),
        ("8B", "one", "1024/1024", 2000),
        ("8B", "load", "512/64", 10_000),
        ("8B chain", "load", "1024/256 of 4096", 4000),
        ("8B adaptive", "load", "1024/1024", 2000),
        ("8B, little KV", "load", "1024/1024", 1000),
    ),
]


@pytest.mark.parametrize(("engine", "history", "lengths", "size"), CASES)
def test_a_burst_is_taken_as_far_as_it_starts_in_time(engine: str, history: str, lengths: str, size: int) -> None:
    """`python -m tests.support.simulation.bursts` prints more of them. With answers of equal length requests start in
    waves of 128, of which the last begins near a limit or does not: half a wave is added to 10 %."""
    for limit_s, found in burst(engine, history, lengths, size).items():
        assert found.in_time >= min(size, 100)
        assert abs(found.taken - found.in_time) <= 0.1 * found.in_time + 40, (limit_s, found)


def test_a_burst_of_unknown_answers_is_not_refused() -> None:
    found = burst("70B", "idle", "1024/1024", 200)[300.0]
    assert found.in_time == found.taken == 200


@pytest.mark.parametrize("seed", range(20))
def test_the_simulation_of_any_queue_ends(seed: int) -> None:
    """Also with few pages, where requests are preempted; starts are in the order of the queue."""
    rng = random.Random(seed)
    budget = LatencyBudget.of(CONFIG, StepTime(COSTS, 8, noise=0.0))
    steps = StepForecast(budget, RoundShapes((PLAIN,)), [1.0], 100.0, 0.0)

    def work(is_running: bool) -> Work:
        kv_tokens = rng.randint(1, 300)
        return Work(rng.randint(1, 2), 0 if is_running else kv_tokens, kv_tokens, rng.choice([1.0, 20.0, 300.0]))

    running, waiting = [work(rng.random() < 0.8) for _ in range(4)], [work(False) for _ in range(40)]
    start_s = QueueSimulation(running, waiting, steps, 8, rng.choice([200, 1000, 10_000]), 16).start_s()
    assert len(start_s) == 40 and start_s == sorted(start_s) and 0.0 < start_s[-1] < 300.0


@pytest.mark.parametrize("seed", range(20))
def test_a_simulation_ends_with_fractions_of_tokens(seed: int) -> None:
    """Prompts are scaled to the queue's mean, so a group may have less than a token, or what rounding left of one."""
    rng = random.Random(seed)
    budget = LatencyBudget.of(CONFIG, StepTime(COSTS, 8, noise=0.0))
    steps = StepForecast(budget, RoundShapes((PLAIN,)), [1.0], 100.0, 0.0)

    def work(prompt_tokens: float) -> Work:
        return Work(rng.randint(1, 3), prompt_tokens, max(1.0, prompt_tokens), rng.choice([1.0, 20.0]))

    waiting = [work(rng.choice([0.0, 1e-9, 0.3, 1 / 3, 7.7, 900.1])) for _ in range(40)]
    start_s = QueueSimulation([work(0.1), work(0.0)], waiting, steps, 8, 10_000, 16).start_s()
    assert len(start_s) == 40 and 0.0 < max(start_s) < 300.0


def test_who_comes_again_after_retry_after_is_taken() -> None:
    """An engine of 16 slots gets 400 requests at once, with a limit of 20 s."""
    policy = replace(ENGINES["70B"], config=SchedulerConfig(16, 2048))
    rng = random.Random(1)
    load = [Answers(128, 128).arrival(at_s, rng) for at_s in [0.0] * 4 + [60.0] * 400]
    tries, tenant = dict[str, list[float]](), Tenant()

    def again_s(scheduler: Scheduler, request: Request) -> float | None:
        tries.setdefault(request.request_id, []).append(scheduler._clock())
        wait_s = scheduler.admission.wait_s()
        assert wait_s is not None
        return None if wait_s <= 20.0 else scheduler.admission.retry_after_s(tenant, 20.0)

    simulate(load, policy, 0, again_s)
    counts = np.array([len(times) for times in tries.values()])
    assert (counts > 1).sum() > 100, "some were refused"
    assert (counts > 2).mean() < 0.1, "but hardly any twice"
    assert max(times[1] - times[0] for times in tries.values() if len(times) > 1) <= MAX_RETRY_AFTER_S


@pytest.mark.parametrize("told", [*slow(1.0), 2.0], ids=["costs are right", "costs are double"])
def test_the_wait_of_a_burst_is_known_before_half_of_it_is_over(monkeypatch: pytest.MonkeyPatch, told: float) -> None:
    """For 500 requests that come at once, whatever the start measured."""
    load = [replace(arrival, at_s=0.0) for arrival in poisson_load(50.0, 10.0, 3)]
    costs = replace_struct(H200, chunk_ms=tuple(tuple(told * ms for ms in row) for row in H200.chunk_ms))
    seen, apply = list[tuple[float, float | None, int]](), Scheduler.apply

    def watched(scheduler: Scheduler, result: StepResult) -> list[RequestOutput]:
        outputs = apply(scheduler, result)
        seen.append((scheduler._clock(), scheduler.admission.wait_s(), scheduler.num_waiting))
        return outputs

    monkeypatch.setattr(Scheduler, "apply", watched)
    simulate(load, Policy(costs))
    end_s = next(now for now, _, num_waiting in seen if num_waiting == 0)
    found = [(wait, end_s - now) for now, wait, _ in seen if wait is not None and 0.2 * end_s < now < 0.7 * end_s]
    ratios = np.array([wait / left for wait, left in found])
    assert len(found) > 50 and np.quantile(ratios, 0.1) > 0.6 and np.quantile(ratios, 0.9) < 1.5
