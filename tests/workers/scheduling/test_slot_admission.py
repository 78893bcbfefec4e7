"""The expected time of the queue, for refusals of a full queue and `engine.queue_timeout_s`."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.simulation.load import H200, Policy, poisson_load, replace_struct, simulate
from tests.support.slow import slow
from workers.config import PLAIN, RoundShapes, SchedulerConfig
from workers.scheduling.cost_table import CostTable, RoundCosts
from workers.scheduling.latency_budget import LatencyBudget
from workers.scheduling.plan import StepResult
from workers.scheduling.queues.admission import MAX_RETRY_AFTER_S, UNKNOWN_S, Admission
from workers.scheduling.queues.waiting_queue import QueueLoad
from workers.scheduling.request import RequestOutput
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.timing.step import Step
from workers.scheduling.timing.step_time import StepTime

CONFIG = SchedulerConfig(8, 100)
COSTS = CostTable((RoundCosts((1, 8), (10.0, 10.0), (0.0, 0.0)),), (0,), (1, 100), ((1.0, 100.0),))


def test_what_waits_takes_its_prompts_and_the_rounds_of_its_answers() -> None:
    """100 prompt tokens take 100 ms, a round of four requests 10."""
    queue = SimpleNamespace(load=QueueLoad(3, 1000, 3000, 800))
    admission = Admission(CONFIG, 2000, SimpleNamespace(waiting=queue), RoundShapes((PLAIN,)))  # type: ignore[arg-type]
    admission.budget = LatencyBudget.of(CONFIG, StepTime(COSTS, 8, noise=0.0))
    for _ in range(4):
        assert admission.wait_s() is None and admission.retry_after_s() == UNKNOWN_S
        admission.ended(41)
    admission.ran(Step(0, 4, 500, 70, 3.0), 4)
    assert admission.wait_s() == pytest.approx(0.8 + 3 * 40 / 4 * 0.010)
    queue.load = QueueLoad(3, 1000, 33, 800)
    assert admission.wait_s() == pytest.approx(0.8 + 30 / 4 * 0.010), "they may have eleven tokens each at most"
    assert admission.retry_after_s() == 1.0
    queue.load = QueueLoad(100, 1000, 10**6, 10_000)
    assert admission.retry_after_s() == pytest.approx((10.0 + 100 * 40 / 4 * 0.010) / 2)
    queue.load = QueueLoad(10**4, 10**6, 10**6, 10**6)
    assert admission.retry_after_s() == MAX_RETRY_AFTER_S
    admission.budget = None
    assert admission.wait_s() is None


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
