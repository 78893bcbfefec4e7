"""A prompt that begins like one that is being computed waits for its pages and computes only the rest.

The rank of `tests.support.scripted` fails if a page holds what another request's tokens would have put there.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aerie.workers.scheduling import prompt_order
from aerie.workers.scheduling.plan import StepPlan
from aerie.workers.scheduling.prefill import MAX_PASSED
from aerie.workers.scheduling.prompt_order import SharedPrefixes
from aerie.workers.scheduling.request import Request, RequestState
from aerie.workers.scheduling.sequence import Sequence
from tests.support.simulation.load import Arrival, Policy, simulate
from tests.support.simulation.scheduler import Simulation

PREFIX = list(range(100, 149))  # twelve pages, and the token that the last one depends on
LEADER, FOLLOWER = [*PREFIX, *range(200, 210)], [*PREFIX, *range(300, 306)]


def simulation(**changes: int) -> Simulation:
    return Simulation(**{"num_pages": 200, "max_step_tokens": 20, "max_running": 8, "max_model_len": 120} | changes)


def num_prompt_tokens(plans: list[StepPlan]) -> int:
    return sum(len(chunk.tokens) // 4 for plan in plans for chunk in plan.chunks)


def finish(sim: Simulation, *requests: Request) -> None:
    sim.run()
    for request in requests:
        sim.check_output(request)


def test_a_prefix_that_is_being_computed_is_computed_once():
    sim = simulation()
    leader, *followers = (sim.submit(prompt) for prompt in (LEADER, FOLLOWER, [*PREFIX, 400], LEADER))
    finish(sim, leader, *followers)
    assert [request.cached_tokens for request in followers] == [48, 48, 56]
    assert num_prompt_tokens(sim.plans) == 59 + 7 + 2 + 3


def test_what_the_step_has_left_goes_to_prompts_that_begin_otherwise():
    sim = simulation(max_step_tokens=64)
    sim.submit(LEADER)
    follower, other = sim.submit(FOLLOWER), sim.submit([7] * 5)
    sim.step()
    assert [len(chunk.tokens) // 4 for chunk in sim.plans[0].chunks] == [59, 5]
    assert follower.state is RequestState.RUNNING, "it waited for longer than one step"
    finish(sim, follower, other)
    assert follower.cached_tokens == 48


def test_a_follower_whose_part_is_done_does_not_wait_for_the_rest():
    sim = simulation()
    sim.submit([*PREFIX, *range(200, 260)])
    for _ in range(3):
        sim.schedule()
        sim.read()
    follower = sim.submit(FOLLOWER)
    sim.scheduler.queues.waiting.remove(sequence := next(iter(sim.scheduler.queues.waiting)))
    sequence.deadline_s = -1.0  # before the leader's
    sim.scheduler.queues.waiting.add(sequence)
    plan = sim.schedule()
    assert plan is not None and len(plan.inits) == 1 and plan.inits[0].num_cached == 48
    finish(sim, follower)


@pytest.mark.parametrize("num_steps", (1, 2))
def test_abort_of_the_leader_releases_who_waits_for_it(num_steps):
    sim = simulation()
    leader, follower = sim.submit(LEADER), sim.submit(FOLLOWER)
    for _ in range(num_steps):
        sim.schedule()
    assert follower.state is RequestState.WAITING
    sim.scheduler.abort(leader.request_id)
    plan = sim.schedule()
    assert plan is not None and [init.num_cached for init in plan.inits] == [20 * num_steps]
    for _ in range(num_steps):
        sim.read()
    finish(sim, follower)


def test_preemption_of_the_leader_releases_who_waits_for_it():
    sim = simulation()
    first = sim.submit([1] * 4, max_tokens=60)
    sim.step()
    leader, follower = sim.submit(LEADER), sim.submit(FOLLOWER)
    sim.schedule()
    builder = type("Builder", (), {"step": 9, "preempted": False})()
    sim.scheduler.queues.preempt_youngest(builder)
    assert leader.state is RequestState.WAITING
    finish(sim, first, leader, follower)
    assert leader.num_preemptions == 1


def test_other_salts_and_prompt_log_probabilities_share_nothing():
    sim = simulation()
    leader = sim.submit(LEADER)
    salted = sim.submit(FOLLOWER, cache_salt=b"other")
    asking = sim.submit(FOLLOWER, prompt_logprobs=0)
    outputs: list[Request] = [leader, salted, asking]
    for _ in range(300):
        if not sim.scheduler.num_running and not sim.scheduler.num_waiting:
            break
        while sim.scheduler.num_in_flight < 2 and sim.schedule() is not None:
            pass
        sim.executor.submit(sim.backlog.popleft())
        sim.scheduler.apply(sim.executor.take())
    assert all(request.state is RequestState.FINISHED for request in outputs)
    assert salted.cached_tokens == asking.cached_tokens == 0
    assert num_prompt_tokens(sim.plans) == 59 + 55 + 55


def steps_to_first_token(prompts: list[list[int]], step_tokens: int, prefix_cache: bool) -> list[int]:
    sim = simulation(max_step_tokens=step_tokens, prefix_cache=prefix_cache)
    requests = [sim.submit(prompt, max_tokens=1) for prompt in prompts]
    found = [0] * len(requests)
    for number in range(1, 500):
        if not sim.step():
            break
        found = [at or (number if request.output else 0) for at, request in zip(found, requests, strict=True)]
    assert all(found)
    return found


@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=2, max_size=6),
    step_tokens=st.integers(3, 70),
)
@example(lengths=[(5, 1), (9, 1), (9, 1)], step_tokens=26)  # the last waits for one page of each of the others
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_a_first_token_comes_one_step_later_at_most_for_each_request_before_it(lengths, step_tokens):
    prompts = [list(range(common)) + [500 + number] * own for number, (common, own) in enumerate(lengths)]
    shared, alone = (steps_to_first_token(prompts, step_tokens, cached) for cached in (True, False))
    late = [with_cache - without for with_cache, without in zip(shared, alone, strict=True)]
    assert all(steps <= number for number, steps in enumerate(late)), "each request before it costs one step at most"


def test_a_burst_of_one_prefix_compares_each_prompt_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them wait, and however many a step admits: a request is compared with those that compute what it
    lacks, not with all that begin alike."""
    num_requests, counts = 2000, Counter[str]()
    prefix = tuple(range(2048))
    load = [Arrival(0.0, 2048 + 30, 4, (*prefix, *(number * 7 % 5000 + 10**6,) * 30)) for number in range(num_requests)]
    compare, key = prompt_order._common, SharedPrefixes._key

    def common(*prompts: Sequence) -> int:
        counts["prompts"] += 1
        return compare(*prompts)

    def page_key(self: SharedPrefixes, *page: object) -> bytes:
        counts["pages"] += 1
        return key(self, *page)

    monkeypatch.setattr(prompt_order, "_common", common)
    monkeypatch.setattr(SharedPrefixes, "_key", page_key)
    served = simulate(load, Policy(config=replace(Policy.config, max_step_tokens=512))).served
    assert all(len(request.times_s) > 0 for request in served)
    assert 0 < counts["prompts"] < 3 * MAX_PASSED, "the leader's part is compared with those that wait for it"
    assert counts["pages"] < 4 * num_requests, counts
