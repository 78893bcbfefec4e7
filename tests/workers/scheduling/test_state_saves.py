"""States of recurrent layers that the scheduler saves and resumes at. The scripted rank fails if a request resumes at a
state of other tokens, if a state is read before it is written, or if KV that others share is written again."""

import random
from collections.abc import Sequence

import pytest

from aerie.workers.scheduling.request import FinishReason, Request
from tests.support.simulation.integrity import check_queues
from tests.support.simulation.prefix_loads import possible_tokens, prompt_heavy
from tests.support.simulation.scheduler import Simulation, random_history, random_prompt
from tests.support.simulation.states import hits
from tests.support.slow import slow

POOLS = {1: 110, 4: 30, 16: 12}


def simulation(**changes):
    return Simulation(**{"num_pages": 200, "max_step_tokens": 64, "num_snapshots": 12, "state_interval": 16} | changes)


def computed(sim):
    return sum(len(chunk.tokens) // 4 for plan in sim.plans for chunk in plan.chunks)


def ask(sim, prompt, max_tokens=3, **sampling):
    """A request by itself, and how many of its tokens were computed."""
    before = computed(sim)
    request = sim.submit(prompt, max_tokens=max_tokens, **sampling)
    sim.finish()
    sim.check_output(request)
    return request, computed(sim) - before


def test_the_same_prompt_resumes_at_its_last_page_border():
    sim = simulation()
    prompt = list(range(30))
    assert [ask(sim, prompt)[1] for _ in range(3)] == [30, 2, 2]
    assert ask(sim, prompt)[0].cached_tokens == 28
    sim.run()


def test_a_fork_is_saved_by_the_second_prompt_and_used_by_the_third():
    sim = simulation()
    prefix = list(range(100, 141))
    costs = [ask(sim, [*prefix, *range(base, base + 20)])[1] for base in (200, 300, 400)]
    assert costs == [61, 61, 21]
    cache = sim.scheduler.prefix_cache
    assert (cache.num_hit_tokens, cache.num_recomputed_tokens) == (40, 40)
    sim.run()


def test_the_second_prompt_resumes_on_the_way_of_the_first():
    """States on the way are 8 * 2 tokens apart, at the ends of chunks of 20."""
    sim = simulation(max_step_tokens=20, state_interval=4, page_size=2)
    prefix = list(range(100, 175))
    assert [ask(sim, [*prefix, *range(base, base + 20)])[1] for base in (200, 300, 400)] == [95, 95 - 40, 95 - 74]
    sim.run()


def test_a_state_on_the_way_is_saved_where_a_turn_ends():
    stop = 7
    sim = simulation(max_step_tokens=50, state_interval=4, page_size=2, max_model_len=200, num_pages=400)
    system = [*range(100, 141), stop]
    ask(sim, [*system, *range(200, 270)], stop_token_ids=(stop,))
    assert ask(sim, [*system, *range(300, 370)], stop_token_ids=(stop,))[0].cached_tokens == 40
    sim.run()


def test_prompts_that_come_together_compute_their_common_prefix_once():
    sim = simulation(max_step_tokens=20, max_running=8)
    prefix = list(range(100, 141))
    requests = [sim.submit([*prefix, *range(base, base + 12)]) for base in (200, 300, 400, 500)]
    sim.finish()
    assert computed(sim) == 41 + 12 + 3 * 13
    assert [request.cached_tokens for request in requests] == [0, 40, 40, 40]
    sim.run()


def test_the_next_turn_resumes_near_the_answers_end():
    sim = simulation(num_pages=300, max_model_len=300)
    request, _ = ask(sim, list(range(30)), max_tokens=90)
    turn = [*request.prompt, *request.output, 7, 7, 7]
    _, cost = ask(sim, turn)
    assert cost <= len(turn) - 96, "states of the answer stand at multiples of 16, the last one at 96 or 112"
    sim.run()


@pytest.mark.parametrize("max_in_flight", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 3))])
def test_the_next_turn_resumes_near_the_answers_end_wherever_that_is(max_in_flight):
    """Also where the answer ends beside a page's end whose state a round in flight may write. A round has up to 4
    tokens, and what the last one commits is not kept. The prompt's state is at 28, the answer's first one at 48."""
    for length in range(20, 70):
        sim = simulation(num_pages=300, max_model_len=300, max_in_flight=max_in_flight)
        request, _ = ask(sim, list(range(30)), max_tokens=length)
        end = 30 + len(request.output)
        turn = [*request.prompt, *request.output, 7, 7, 7]
        _, cost = ask(sim, turn)
        assert cost <= len(turn) - (28 if end < 58 else (end - 10) // 16 * 16), f"an answer of {length} tokens"
        sim.run()


def test_a_request_that_is_taken_out_keeps_a_state_of_its_answer():
    """Whatever steps are in flight: at most an interval and three rounds are computed again."""
    for steps in range(12, 50):
        sim = simulation(num_pages=300, max_model_len=300)
        request = sim.submit(list(range(30)), max_tokens=200)
        for _ in range(steps):
            sim.step()
        known = [*request.prompt, *request.output]
        sim.scheduler.abort(request.request_id)
        sim.finish()
        _, cost = ask(sim, [*known, 7])
        assert cost <= 16 + 3 * 4 + 1 or len(known) < 60, f"{len(known)} tokens were known"
        sim.run()


def test_a_chunk_that_passes_a_fork_and_the_end_is_cut_at_the_fork():
    sim = simulation(max_step_tokens=200, max_model_len=200)
    ask(sim, [*range(100, 141), *range(200, 220)])
    first = len(sim.plans)
    ask(sim, [*range(100, 141), *range(300, 360)])
    assert [len(chunk.tokens) // 4 for plan in sim.plans[first:] for chunk in plan.chunks] == [40, 61]
    assert all(chunk.store_from == (40 if chunk.start == 0 else 0) for p in sim.plans[first:] for chunk in p.chunks)


def test_without_rows_every_prompt_is_computed_whole():
    sim = simulation(num_snapshots=0)
    assert [ask(sim, list(range(30)))[1] for _ in range(2)] == [30, 30]
    sim.run()


def test_a_failed_request_leaves_no_state():
    sim = simulation()
    request = sim.submit(list(range(30)), max_tokens=40)
    for _ in range(8):
        sim.step()
    sequence = sim.scheduler.queues.find(request.request_id)
    slot_pages = sim.scheduler.slot_pages
    slot_pages.drop_nan_pages(sequence.slot, sequence.known_tokens(), b"")
    sim.scheduler.queues.finish(sequence, FinishReason.ERROR, 0, 0.0)
    assert sim.scheduler.prefix_cache.snapshots.num_saved == 0
    check_queues(sim.scheduler.queues)


def test_few_rows_save_most_of_what_prompts_have_in_common():
    """Open loop, 40 % of the prompts with one of eight beginnings. The first with each has nothing to find; the
    second resumes at a state on the way of the first."""
    arrivals = prompt_heavy(rate=3.0, seconds=40.0)
    found = hits(arrivals, num_pages=40_000, num_snapshots=64)
    assert found.hit_tokens > 0.9 * possible_tokens(arrivals)


@pytest.mark.parametrize(
    "seed, page_size, lookahead",
    [
        (1, 4, 0),
        *slow((0, 1, 1), (2, 4, 1), (3, 16, 1)),
        *[pytest.param(s, p, a, marks=pytest.mark.slow) for s in range(4, 12) for p in sorted(POOLS) for a in (0, 1)],
    ],
)
def test_states_are_right_whatever_happens(seed, page_size, lookahead):
    """Random prompts, aborts, preemptions, crashes, few rows; conversations that go on from what was answered."""
    rng = random.Random(f"states-{seed}-{page_size}-{lookahead}")
    sim = Simulation(
        page_size=page_size,
        num_pages=POOLS[page_size],
        max_running=rng.choice([1, 3, 8]),
        max_step_tokens=rng.choice([3, 7, 32, 200]),
        max_waiting=None,
        lookahead=lookahead,
        speculative=rng.random() < 0.8,
        max_in_flight=rng.choice([1, 2, 2, 3]),
        num_snapshots=rng.choice([1, 3, 10]),
        state_interval=page_size * rng.choice([1, 2, 8]),
    )

    def submit(former: Sequence[Request]) -> Request:
        ended = [each for each in former if each.request_id in sim.finished and len(each.prompt) < 60]
        if ended and rng.random() < 0.5:
            last = rng.choice(ended[-4:])
            prompt = [*last.prompt, *last.output[: rng.randint(0, 40)], *random_prompt(rng, 9)][:60]
        else:
            prompt = random_prompt(rng, 60)
        return sim.submit(prompt, max_tokens=rng.randint(1, 38), speculative=rng.random() < 0.7)

    random_history(sim, rng, 50, submit)
    snapshots = sim.scheduler.prefix_cache.snapshots
    assert snapshots.num_lent == snapshots.num_saved == 0, "the cache is empty, and no request runs"
