"""Random histories. The rank's KV model fails if a page is missing, shared wrongly, or holds another's content."""

import random
from collections.abc import Sequence

import pytest

from aerie.workers.scheduling.request import FinishReason, Request
from tests.support.simulation.scheduler import Simulation, random_history, random_prompt
from tests.support.slow import covering

POOLS = {1: 110, 4: 30, 16: 12, 64: 5}  # pages: the largest request fits, few of them do at once


@pytest.mark.parametrize("seed,page_size,lookahead", covering([0, 1, 2, 3], sorted(POOLS), [0, 1]))
def test_every_request_gets_its_script_whatever_happens(seed, page_size, lookahead):
    rng = random.Random(f"{seed}-{page_size}-{lookahead}")
    sim = Simulation(
        page_size=page_size,
        num_pages=POOLS[page_size],
        max_running=rng.choice([1, 3, 8]),
        max_step_tokens=rng.choice([1, 7, 32, 200]),
        max_waiting=10,
        lookahead=lookahead,
        speculative=rng.random() < 0.8,
        prefix_cache=rng.random() < 0.8,
        max_in_flight=rng.choice([1, 2, 2, 3]),
    )

    def submit(former: Sequence[Request]) -> Request:
        return sim.submit(
            random_prompt(rng, 60),
            max_tokens=rng.randint(1, 45),
            speculative=rng.random() < 0.7,
            stop_token_ids=(3, 500, 501, 502) if rng.random() < 0.5 else (),
            logprobs=rng.choice([-1, 0]),
            repetition_penalty=rng.choice([1.0, 1.2]),
        )

    num_aborted = random_history(sim, rng, 40, submit)
    assert sim.scheduler.stats.finished.get(FinishReason.ABORT.value, 0) == num_aborted


@pytest.mark.parametrize("page_size", sorted(POOLS))
def test_a_tiny_pool_preempts_and_still_ends(page_size):
    sim = Simulation(page_size=page_size, num_pages=POOLS[page_size], max_running=8, max_step_tokens=64)
    rng = random.Random(7)
    requests = [sim.submit(random_prompt(rng, 8), max_tokens=80) for _ in range(12)]
    sim.run()
    for request in requests:
        sim.check_output(request)
    assert sim.scheduler.stats.num_preemptions == sum(request.num_preemptions for request in requests) > 0
    assert requests[0].num_preemptions == 0, "the oldest is never preempted"
