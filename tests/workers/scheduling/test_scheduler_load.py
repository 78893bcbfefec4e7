"""What each element of the policy brings under open-loop load, on a simulated H200 (`tests.support.simulation.load`).

Sizes are such that a load takes a second; the bounds leave room for other seeds' requests.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.support.simulation.closed_loop import Clients, serve, two_cores
from tests.support.simulation.graphs import SimulatedGraphs
from tests.support.simulation.load import (
    H200,
    SHAPES,
    TREE_H200,
    TREE_SHAPES,
    Policy,
    by_depth,
    padded,
    poisson_load,
    policies,
    simulate,
)
from tests.support.slow import slow

TARGET_MS = 25.0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_plans_just_in_time_and_deadlines_bring_first_tokens_sooner(seed):
    load = poisson_load(18.0, 8.0, seed)
    *_, budget, in_time, by_deadline = policies(TARGET_MS).values()
    runs = [simulate(load, policy, seed) for policy in (budget, in_time, by_deadline)]
    assert runs[0].milliseconds()["TTFT"][0] - 2.0 > runs[1].milliseconds()["TTFT"][0]
    short = [[s.times_s[0] - s.arrival.at_s for s in run.served if s.arrival.prompt_len < 512] for run in runs]
    assert 0.9 * np.mean(short[1]) > np.mean(short[2]), "short prompts wait for long ones"
    assert runs[2].idle < 0.002, "the device waited for plans that were held"
    assert runs[2].milliseconds()["TTFT"][1] < 1.3 * runs[1].milliseconds()["TTFT"][1], "long prompts pay too much"


def test_no_gap_is_longer_than_the_target():
    """But for 2 % of noise in a step's time, four times; and for the wait of a plan that came late."""
    run = simulate(poisson_load(14.0, 12.0, 5), Policy(config=replace(Policy.config, itl_target_ms=TARGET_MS)), 5)
    gaps = np.concatenate([np.diff(served.times_s) for served in run.served])
    assert gaps.max() * 1000 < 1.08 * TARGET_MS + 1.0
    assert np.quantile(gaps, 0.99) * 1000 > 0.9 * TARGET_MS, "there were no long steps, and nothing is shown"


def test_a_queue_of_long_prompts_does_not_grow_within_20_ms():
    """Prompts of 4,096 tokens at 60 % of what this device can serve, which is 8 a second."""
    load = poisson_load(4.8, 20.0, 3, prompt_mean=4096, sigma=0.0)
    run = simulate(load, Policy(config=replace(Policy.config, itl_target_ms=19.0)), 3)
    assert run.milliseconds()["ITL"][1] < 20.0
    first = [served.times_s[0] - served.arrival.at_s for served in run.served]
    thirds = [float(np.median(part)) for part in np.array_split(first, 3)]
    assert max(thirds) < 1.0


@pytest.mark.parametrize("rate", [12.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_an_engine_that_has_just_started_is_nearly_as_quick_as_later(rate: float) -> None:
    """Three quarters of its graphs are still to come, and no idle moment does."""
    costs, load = padded(H200), poisson_load(rate, 10.0, 0)
    started, warm = (
        simulate(load, Policy(costs=costs, graphs=partial(SimulatedGraphs, SHAPES, 128, 2048, warm=is_warm)))
        for is_warm in (False, True)
    )
    for name in ("TTFT", "TPOT"):
        assert started.milliseconds(8.0)[name][0] < 1.4 * warm.milliseconds(8.0)[name][0], name


def test_a_burst_is_worked_off_in_longer_steps():
    burst = [replace(arrival, at_s=arrival.at_s / 10) for arrival in poisson_load(8.0, 10.0, 1)]
    kept, may_stretch = (simulate(burst, policies(target)["+ prompts by deadline"], 1) for target in (TARGET_MS, None))
    assert may_stretch.milliseconds()["TTFT"][1] < 0.9 * kept.milliseconds()["TTFT"][1]
    assert may_stretch.milliseconds()["ITL"][1] > 1.5 * kept.milliseconds()["ITL"][1]


def test_beside_prompts_a_tree_gives_way_to_a_chain_and_not_to_plain_rounds():
    """At 20 requests/s prompts come all the time, so that what runs beside them is what runs."""
    load = poisson_load(20.0, 10.0, 0)
    tree, chain = (
        simulate(load, Policy(costs=costs, actual=costs, shapes=shapes, emitted=by_depth), 0).milliseconds()
        for costs, shapes in ((TREE_H200, TREE_SHAPES), (H200, SHAPES))
    )
    assert tree["TPOT"][0] < 1.1 * chain["TPOT"][0] and tree["TTFT"][0] < 1.1 * chain["TTFT"][0]


def test_padding_makes_stairs():
    stairs = padded(H200)
    for tokens, bucket in ((1, 16), (16, 16), (17, 64), (513, 640), (1025, 1536), (2048, 2048)):
        assert stairs.step_ms(1, 8, 0, tokens) == pytest.approx(H200.step_ms(1, 8, 0, bucket))


@pytest.mark.parametrize(("plain_ms", "chain_ms"), [(3.2, 9.5), *slow((8.0, 12.0))])
def test_a_burst_of_requests_makes_no_gap_of_a_stream_many_times_its_others(plain_ms: float, chain_ms: float) -> None:
    """28 requests at once beside four streams, where rounds of all take three to four times the target: drafts pay
    little or much. The batch grows, or the shape changes, in small steps; tokens per second are those without a bound,
    but for what steps of fewer requests cost."""
    streams, burst = Clients(4, 300), Clients(28, 30, (8.0, 8.5), 1.0)
    bounded, free = (serve([streams, burst], two_cores(plain_ms, chain_ms), ms, 15.0, 0) for ms in (100.0, 1e4))
    most = [
        max(a.excess(100.0) for a in served.answers if a.clients is streams and len(a.times_s) > 12)
        for served in (bounded, free)
    ]
    assert most[0] < 1.0 < most[1]
    assert bounded.num_tokens / bounded.seconds > 0.88 * free.num_tokens / free.seconds
    assert max(a.times_s[0] - a.sent_s for a in bounded.answers) < 10.0


def test_a_target_below_every_round_holds_no_request_for_long() -> None:
    """The batch grows while no request ends."""
    served = serve([Clients(4, 300), Clients(20, 100, (1.0, 2.0))], two_cores(8.0, 12.0), 3.0, 1.0, 0)
    assert served.max_rounds > 16
    assert max(a.times_s[0] - a.sent_s for a in served.answers) < 15.0
