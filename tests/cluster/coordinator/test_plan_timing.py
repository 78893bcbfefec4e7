"""Plans leave just before the step that runs ends: late enough for requests that come, early enough for the device."""

import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aerie.cluster.coordinator.plan_timing import FIRST_MARGIN_S, LEAD_S, PlanTiming
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.step_time import Prediction, Step, StepTime

COSTS = CostTable((RoundCosts((1,), (5.0,), (0.0,)),), (0, 1), (64,), ((15.0,), (20.0,)), (0, 0))


def sure(ms: float) -> Prediction:
    """A step of which all is known."""
    return Prediction(ms, 0.0)


@dataclass
class Device:
    """Steps of 5 ms, every fourth with prompts and of 20 ms, which take `ratio` times what the start measured.

    waited_s: how long the device had nothing to do. held_s: how long plans that were sent waited for it.
    """

    timing: PlanTiming
    ratio: float = 1.0
    noise: float = 0.0
    send_s: float = 0.0003
    receive_s: float = 0.0003
    seed: int = 0
    step_time: StepTime = field(default_factory=lambda: StepTime(COSTS, 1))
    waited_s: float = 0.0
    held_s: float = 0.0
    busy_s: float = 0.0

    def run(self, num_steps: int, expected: bool = True) -> None:
        """So many steps from an idle device on; where the device waited and what it did count from 0."""
        rng, now, free_s = random.Random(self.seed), 0.0, 0.0
        self.waited_s = self.held_s = self.busy_s = 0.0
        results: deque[tuple[float, float, float]] = deque()
        steps: deque[Step] = deque()
        num_sent = 0
        while num_sent < num_steps:
            due_s = self.timing.due_s()
            if due_s <= now:
                has_prompts = num_sent % 4 == 3
                step = Step(num_requests=1, chunk_tokens=64 if has_prompts else 0)
                took_s = COSTS.step_ms(*step) / 1000 * self.ratio * rng.lognormvariate(0, self.noise)
                arrived_s = now + self.send_s
                self.waited_s += max(0.0, arrived_s - free_s) if num_sent else 0.0
                self.held_s += max(0.0, free_s - arrived_s)
                free_s = max(free_s, arrived_s) + took_s
                self.busy_s += took_s
                results.append((free_s + self.receive_s, free_s - arrived_s, took_s * 1000))
                steps.append(step)
                self.timing.record_plan(now, self.step_time.predict(step) if expected else None)
                num_sent += 1
                continue
            result_s = results[0][0] if results else math.inf
            now = min(due_s, result_s)
            assert now < math.inf, "no plan is due and no result will come"
            if now == result_s:
                self.read(results.popleft(), steps.popleft())
        while results:
            self.read(results.popleft(), steps.popleft())

    def read(self, result: tuple[float, float, float], step: Step) -> None:
        """The coordinator has the oldest result."""
        now, elapsed_s, took_ms = result
        self.timing.record_result(now, elapsed_s)
        self.step_time.observe(step, took_ms)


@given(
    ratio=st.floats(0.4, 3.0),
    noise=st.floats(0.0, 0.05),
    send_s=st.floats(0.0, 0.002),
    receive_s=st.floats(0.0, 0.001),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_device_hardly_waits_whatever_is_not_known_of_it(ratio, noise, send_s, receive_s, seed):
    """Next to plans that leave as soon as there is room, which wait for a device that is quicker than they are."""
    device, at_once = (Device(PlanTiming(2), ratio, noise, send_s, receive_s, seed) for _ in range(2))
    device.run(100)
    device.run(300)
    at_once.run(300, expected=False)
    assert device.waited_s <= at_once.waited_s + (0.005 + 0.3 * noise) * device.busy_s


def test_plans_are_there_hardly_before_they_are_needed():
    device = Device(PlanTiming(2), noise=0.01)
    device.run(100)
    device.run(400)
    assert device.held_s / 400 < LEAD_S + 0.001, "of 8.75 ms that a step takes in the mean"
    assert device.waited_s / device.busy_s < 0.005


def test_without_expectations_plans_leave_as_soon_as_there_is_room():
    timing = PlanTiming(2)
    timing.record_plan(1.0, None)
    assert timing.due_s() == -math.inf
    timing.record_plan(1.0, None)
    assert timing.due_s() == math.inf


def test_an_idle_engines_plan_leaves_at_once_and_the_next_near_its_end():
    timing = PlanTiming(2)
    assert timing.due_s() == -math.inf
    timing.record_plan(10.0, sure(5.0))
    assert timing.due_s() == pytest.approx(10.005 - FIRST_MARGIN_S)


def test_what_is_not_known_for_sure_is_taken_to_end_early():
    """The estimate is one standard deviation early, because an idle device costs more than an early plan."""
    timing = PlanTiming(2)
    timing.record_plan(10.0, Prediction(50.0, 0.3, 0.4))
    assert timing.due_s() == pytest.approx(10.0 + 0.050 * math.exp(-0.5) - FIRST_MARGIN_S)


def test_a_plan_that_came_too_late_is_followed_by_earlier_ones():
    timing = PlanTiming(2)
    timing.record_plan(0.0, sure(5.0))
    timing.record_plan(timing.due_s(), sure(5.0))
    timing.record_result(0.0052, 0.005)
    margin_s = timing.margin_s
    timing.record_result(0.0112, 0.0055)  # rank 0 had it half a millisecond after the step before had ended
    assert timing.margin_s > margin_s + 0.0005


def test_a_step_that_ends_while_the_next_plan_is_held_makes_plans_earlier():
    timing = PlanTiming(2)
    timing.record_plan(0.0, sure(50.0))
    timing.record_result(0.005, 0.005)
    assert timing.margin_s > FIRST_MARGIN_S


def test_one_step_far_off_changes_little():
    device = Device(PlanTiming(2))
    device.run(100)
    margin_s = device.timing.margin_s
    device.timing.record_plan(50.0, sure(5.0))
    before_s = device.timing.due_s()
    device.timing.record_result(50.9, 0.9)
    device.timing.record_plan(51.0, sure(5.0))
    assert device.timing.due_s() - 51.0 == pytest.approx(before_s - 50.0, abs=0.0011)
    assert device.timing.margin_s == margin_s


def test_other_ranks_start_anew():
    device = Device(PlanTiming(2), ratio=2.0, send_s=0.003)
    device.run(200)
    device.timing.record_plan(99.0, sure(5.0))
    device.timing.reset()
    assert device.timing.due_s() == -math.inf
    assert device.timing.margin_s == FIRST_MARGIN_S
