"""Which prompts `aerie.workers.scheduling.prefill` computes first, whom it looks at, and what it tells the latency
budget."""

import pytest

from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.latency_budget import StepBudget, StepRounds
from aerie.workers.scheduling.plan import StepPlan, unpack_i32
from aerie.workers.scheduling.request import Request
from tests.support.simulation.scheduler import Simulation


def chunks(plan: StepPlan) -> list[tuple[int, int]]:
    """Slot and number of tokens of each."""
    return [(chunk.slot, len(unpack_i32(chunk.tokens))) for chunk in plan.chunks]


def move(sim: Simulation, request: Request, deadline_s: float) -> None:
    sequence = sim.scheduler.queues.find(request.request_id)
    assert sequence is not None
    sequence.deadline_s = deadline_s


def test_of_admitted_prompts_the_earliest_deadline_is_computed_first() -> None:
    sim = Simulation(max_step_tokens=16, prefix_cache=False)
    requests = [sim.submit(list(range(length))) for length in (40, 6, 50)]
    assert chunks(sim.schedule()) == [(0, 16)]
    move(sim, requests[0], 3.0)
    move(sim, requests[1], 1.0)
    move(sim, requests[2], 2.0)
    assert chunks(sim.schedule()) == [(1, 6), (2, 10)], "both pass the first one, which waits with its slot"
    assert chunks(sim.schedule()) == [(2, 16)]
    move(sim, requests[0], 0.0)
    assert chunks(sim.schedule()) == [(0, 16)]
    assert chunks(sim.schedule()) == [(0, 8), (2, 8)], "what is left of the step goes to the next"


def test_an_admitted_prompt_goes_before_waiting_ones_of_its_deadline() -> None:
    """Equal deadlines are taken in the order of arrival."""
    sim = Simulation(max_step_tokens=8, prefix_cache=False)
    requests = [sim.submit(list(range(12))) for _ in range(2)]
    for request in requests:
        move(sim, request, 1.0)
    assert chunks(sim.schedule()) == [(0, 8)]
    assert chunks(sim.schedule()) == [(0, 4), (1, 4)]


def test_a_prompt_without_room_is_looked_up_again_only_if_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Simulation(page_size=4, num_pages=20, max_step_tokens=64)
    first = sim.submit(list(range(30)), max_tokens=12)
    sim.step()
    second = sim.submit([100 + i for i in range(44)], max_tokens=12)
    cache = sim.scheduler.prefix_cache
    assert cache is not None
    looked_up, match = [], cache.match
    monkeypatch.setattr(cache, "match", lambda tokens, salt: looked_up.append(len(tokens)) or match(tokens, salt))
    sim.step()
    assert looked_up == [44] and sim.scheduler.num_waiting == 1
    sequence = sim.scheduler.queues.find(second.request_id)
    assert sequence is not None and sequence.pages_missing[1] > sim.scheduler.allocator.num_available
    sim.step()
    assert looked_up == [44], "neither pages nor the cache have changed"
    sim.run()
    assert looked_up[-1] == 44 and len(looked_up) > 1
    sim.check_output(first)
    sim.check_output(second)


class _Budget:
    """A latency budget that notes how many prompt tokens it is told of, and after how many others on average."""

    may_stretch = True

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []

    def may_rest(self, rounds: StepRounds, backlog_tokens: int, backlog_context: float) -> bool:
        return False

    def step(self, rounds: StepRounds, backlog_tokens: int, backlog_context: float, rests: bool = False) -> StepBudget:
        self.told.append((backlog_tokens, backlog_context))
        return StepBudget(10)

    def mask_wait_ms(self, expected_ms: float) -> float:
        return 1.0

    def patience_s(self, num_tokens: int, backlog_tokens: int) -> float:
        return float(num_tokens)


def test_the_budget_is_told_of_the_tokens_that_could_be_planned_now() -> None:
    """Those left of admitted prompts, and whole prompts of as many waiting requests as there are free slots."""
    sim = Simulation(max_running=2, prefix_cache=False)
    budget = _Budget()
    sim.scheduler._prefill.budget = budget  # type: ignore[assignment]
    for length in (13, 20, 50):
        sim.submit(list(range(length)))
    assert chunks(sim.schedule()) == [(0, 10)]
    assert chunks(sim.schedule()) == [(0, 3), (1, 7)]
    assert chunks(sim.schedule()) == [(1, 10)]
    assert budget.told == [(13 + 20, 0), (3 + 20, 3 * 10 / 23), (13, 7)]


def test_the_last_chunk_of_one_token_asks_for_no_prompt_log_probabilities() -> None:
    """No prompt token follows it."""
    sim = Simulation(max_step_tokens=8, speculative=False)
    sim.submit(list(range(9)), prompt_logprobs=0)
    asked = [(len(unpack_i32(c.tokens)), c.logprobs) for plan in (sim.schedule(), sim.schedule()) for c in plan.chunks]
    assert asked == [(8, 0), (1, -1)]


@pytest.mark.parametrize(("preferred", "num_running"), [(0, 2), (1, 1)])
def test_a_request_joins_if_the_preferred_rounds_stay_within_a_numeric_target(
    preferred: int, num_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a probe runs trees, of which two take 50 ms, the preferred rounds of 5 ms decide."""
    rounds = RoundCosts((1, 4), (5.0, 5.0), (0.0, 0.0)), RoundCosts((1, 2, 4), (5.0, 50.0, 50.0), (0.0, 0.0, 0.0))
    sim = Simulation(costs=CostTable(rounds, (0,), (1, 16), ((5.0, 5.0),), (1,)), itl_target_ms=10.0)
    monkeypatch.setattr(sim.scheduler.rounds, "choose_shape", lambda shapes: 1)
    monkeypatch.setattr(sim.scheduler.rounds, "preferred", lambda shape: preferred)
    sim.submit([1, 2, 3], max_tokens=40)
    sim.step()
    sim.submit([4, 5, 6], max_tokens=40)
    sim.step()
    assert sim.scheduler.num_running == num_running
