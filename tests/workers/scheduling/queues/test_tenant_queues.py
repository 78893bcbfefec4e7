"""Tenants share an engine by the tokens that it computes: simulated loads on the costs of one or two H200.

python -m tests.workers.scheduling.queues.test_tenant_queues   # first tokens beside a flood, of all simulated engines
"""

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.latency_budget import LatencyBudget
from aerie.workers.scheduling.queues.tenants import PRIORITY_TOKENS, RECENT_S, Tenants
from aerie.workers.scheduling.request import FinishReason, Owner, QueueFullError, Request
from aerie.workers.scheduling.scheduler import Scheduler
from aerie.workers.scheduling.step_time import StepTime
from tests.support.simulation.bursts import ENGINES
from tests.support.simulation.load import Arrival, LoadFigures, simulate
from tests.support.simulation.scheduler import Simulation, random_history, random_prompt
from tests.support.slow import covering, slow

FLOOD = [Arrival(0.001 * i, 900 + i % 200, 220 + i % 70, tenant="flood") for i in range(600)]
COSTS = CostTable(
    (RoundCosts((1, 8), (10.0, 12.0), (0.0, 0.0)), RoundCosts((1, 8), (11.0, 20.0), (0.0, 0.0))),
    (0, 1, 8),
    (1, 100),
    ((6.0, 30.0), (12.0, 40.0), (20.0, 50.0)),
    (1,) * 3,
)


def steady(prompt: int, count: int = 12, every_s: float = 0.83) -> list[Arrival]:
    """Requests of another tenant, one after the other."""
    return [Arrival(0.5 + every_s * i, prompt + 7 * i, 200, tenant="steady") for i in range(count)]


def run(engine: str, *loads: Sequence[Arrival], seed: int = 1) -> LoadFigures:
    arrivals = sorted((arrival for load in loads for arrival in load), key=lambda arrival: arrival.at_s)
    return simulate(arrivals, ENGINES[engine], seed)


def first_ms(figures: LoadFigures, tenant: str) -> list[float]:
    return [1000 * (s.times_s[0] - s.arrival.at_s) for s in figures.served if s.arrival.tenant == tenant]


def served(figures: LoadFigures, until_s: float) -> Counter[str]:
    """Prompt and output tokens of each tenant's requests up to a time; a prompt counts with its first token."""
    found: Counter[str] = Counter()
    for each in figures.served:
        in_time = [tokens for at_s, tokens in zip(each.times_s, each.tokens, strict=True) if at_s <= until_s]
        found[each.arrival.tenant] += sum(in_time) + (each.arrival.prompt_len if in_time else 0)
    return found


def target_ms(engine: str) -> float:
    policy = ENGINES[engine]
    assert policy.costs is not None
    return LatencyBudget.of(policy.config, StepTime(policy.costs, 128)).target_ms


@pytest.mark.parametrize(
    ("engine", "prompt", "ratio"), [("8B", 3000, 1.3), *slow(("8B chain", 1000, 2.0)), ("70B", 1000, 1.3)]
)
def test_beside_a_flood_a_first_token_waits_for_the_running_step_alone(engine: str, prompt: int, ratio: float) -> None:
    """All slots are full, and hundreds wait. In order of arrival it took tens of seconds."""
    others = steady(prompt)
    alone, beside = (first_ms(run(engine, *loads), "steady") for loads in ([others], [FLOOD, others]))
    assert statistics.median(beside) <= ratio * statistics.median(alone)
    assert np.quantile(np.subtract(beside, alone), 0.9) <= 1.6 * target_ms(engine)


@pytest.mark.slow
def test_a_flood_ends_no_later_for_another_tenant_with_few_requests() -> None:
    """It gives up what the other's tokens take, and up to a fifth for shorter steps."""
    others = steady(1000)
    alone_s, beside_s = (
        max(s.times_s[-1] for s in run("8B", *loads).served if s.arrival.tenant == "flood")
        for loads in ([FLOOD], [FLOOD, others])
    )
    share = 12 * 1240 / sum(arrival.prompt_len + arrival.max_tokens for arrival in FLOOD)
    assert beside_s <= alone_s * (1.2 + share)


@pytest.mark.parametrize("weights", [(1.0, 3.0), *slow(((1.0, 1.0),), ((2.0, 0.5),))])
@pytest.mark.parametrize("shapes", [((1000, 250), (1000, 250)), ((200, 400), (2000, 60))], ids=["alike", "different"])
def test_shares_of_tenants_that_flood_are_their_weights(
    weights: tuple[float, float], shapes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    loads = [
        [Arrival(0.001 * i, prompt, answer, tenant=name, weight=weight) for i in range(900)]
        for name, weight, (prompt, answer) in zip("ab", weights, shapes, strict=True)
    ]
    figures = run("8B", *loads)
    end_s = min(
        max(s.arrival.at_s + (s.times_s[0]) for s in figures.served if s.arrival.tenant == name) for name in "ab"
    )
    until, before = served(figures, 0.9 * end_s), served(figures, 0.1 * end_s)
    got = (until["a"] - before["a"]) / (until["b"] - before["b"])
    assert got == pytest.approx(weights[0] / weights[1], rel=0.05)


@pytest.mark.slow
def test_idleness_saves_nothing_up_and_no_tenant_starves() -> None:
    """The late one shares equally from its return on; three tenants with a weight of 1 : 1000 : 1000 all go on."""
    late = [replace(arrival, at_s=20.0 + arrival.at_s, tenant="late") for arrival in FLOOD]
    flood = [*FLOOD, *(replace(arrival, at_s=1.0) for arrival in FLOOD), *(replace(each, at_s=2.0) for each in FLOOD)]
    figures = run("8B", flood, late)
    until, before = served(figures, 40.0), served(figures, 22.0)
    assert (until["late"] - before["late"]) / (until["flood"] - before["flood"]) == pytest.approx(1.0, rel=0.1)
    loads = [
        [replace(each, tenant=name, weight=weight) for each in FLOOD]
        for name, weight in zip("abc", (1.0, 1e3, 1e3), strict=True)
    ]
    first_s = {each.arrival.tenant: each.times_s[0] for each in reversed(run("8B", *loads).served)}
    assert first_s["a"] < 3.0


def test_one_tenant_is_served_as_if_there_were_no_tenants() -> None:
    """Event by event, whatever its name and weight, also after another one left long ago."""
    load = FLOOD[:150]
    plain = run("8B chain", [replace(each, tenant="") for each in load])
    named = run("8B chain", [replace(each, tenant="ann", weight=7.0) for each in load])
    assert [s.times_s for s in plain.served] == [s.times_s for s in named.served]
    first = [Arrival(0.0, 50, 5, tenant="bob")]
    later = run("8B chain", first, [replace(each, at_s=each.at_s + 2 * RECENT_S) for each in load])
    assert len(later.served) == 151 and all(s.times_s for s in later.served)


@pytest.mark.slow
def test_priority_borrows_from_the_tenants_later_turns() -> None:
    """Among a tenant's own requests it is a time, among tenants' a number of tokens; shares stay what they are."""
    both = [
        [Arrival(0.001 * i, 1000, 250, tenant=name, priority=-(name == "b") * 5) for i in range(800)] for name in "ab"
    ]
    figures = run("8B", *both)
    got = served(figures, 25.0)
    assert got["b"] / got["a"] == pytest.approx(1.0, rel=0.1)
    assert got["b"] - got["a"] >= 0.5 * 5 * PRIORITY_TOKENS
    own = [Arrival(0.001 * i, 1000, 250, tenant="a", priority=i % 2) for i in range(600)]
    waits = [[s.times_s[0] for s in run("8B", own).served if s.arrival.priority == level] for level in (0, 1)]
    assert statistics.mean(waits[0]) + 5.0 < statistics.mean(waits[1])


def test_the_expected_wait_of_each_tenant_is_true() -> None:
    """A flood that waits for a minute, and tenants of several weights with fewer requests: within 15 %, or 0.3 s."""
    rng = random.Random(3)
    flood = [Arrival(0.0, rng.randint(500, 1500), rng.randint(100, 400), tenant="flood") for _ in range(900)]
    light = [
        Arrival(8.0, rng.randint(500, 1500), rng.randint(100, 400), tenant="light", weight=3.0) for _ in range(400)
    ]
    late = [Arrival(8.5, 1000, 250, tenant="flood"), Arrival(8.5, 1000, 250, tenant="light", weight=3.0)]
    one = [Arrival(8.6, 1000, 250, tenant="one")]
    told: dict[int, float] = {}
    requests: list[Request] = []

    def asked(scheduler: Scheduler, request: Request) -> None:
        tenant = scheduler.queues.tenants.of(request.owner)
        wait_s = scheduler.admission.wait_s(tenant)
        assert wait_s is not None
        told[len(requests)] = wait_s
        requests.append(request)

    simulate([*flood, *light, *late, *one], ENGINES["8B"], 1, asked)
    count = len(flood) + len(light)
    for index in (count, count + 1, count + 2):
        assert told[index] == pytest.approx(requests[index].queue_s, rel=0.15, abs=0.3)
    assert told[count] > 2 * told[count + 1] > 20 * told[count + 2]


def test_a_full_queue_has_room_for_a_tenant_without_its_share() -> None:
    sim = Simulation(max_waiting=6, max_running=1)
    for _ in range(6):
        sim.submit([1, 2, 3], owner=Owner("flood"))
    with pytest.raises(QueueFullError, match="max_waiting=6"):
        sim.submit([1, 2, 3], owner=Owner("flood"))
    for _ in range(3):
        sim.submit([1, 2, 3], owner=Owner("other"))
    with pytest.raises(QueueFullError, match="max_waiting=6"):
        sim.submit([1, 2, 3], owner=Owner("other"))
    sim.run()


@pytest.mark.parametrize("seed,page_size,lookahead", covering(list(range(6)), [1, 4, 16], [0, 1]))
def test_every_request_of_any_tenant_gets_its_script(seed: int, page_size: int, lookahead: int) -> None:
    """Slots and pages are taken from tenants above their share, and rounds give way, in random histories."""
    rng = random.Random(f"tenants {seed}-{page_size}-{lookahead}")
    sim = Simulation(
        page_size=page_size,
        num_pages={1: 110, 4: 30, 16: 12}[page_size],
        max_running=rng.choice([2, 3, 8]),
        max_step_tokens=rng.choice([7, 32, 200]),
        max_waiting=10,
        lookahead=lookahead,
        speculative=rng.random() < 0.8,
        prefix_cache=rng.random() < 0.8,
        max_in_flight=rng.choice([1, 2, 3]),
        costs=COSTS if rng.random() < 0.8 else None,
    )
    weights = {name: rng.choice([0.5, 1.0, 3.0]) for name in "abc"}

    def submit(former: Sequence[Request]) -> Request:
        name = rng.choice("aaabc")
        return sim.submit(
            random_prompt(rng, 60),
            max_tokens=rng.randint(1, 45),
            owner=Owner(name, weights[name], rng.choice([0, 0, 0, -3, 3])),
            speculative=rng.random() < 0.7,
        )

    num_aborted = random_history(sim, rng, 40, submit)
    assert sim.scheduler.stats.finished.get(FinishReason.ABORT.value, 0) == num_aborted


@pytest.mark.slow
def test_two_tenants_never_preempt_each_other_in_turn() -> None:
    """Both have more requests than slots: a few preemptions until each has its share, then none."""
    loads = [[Arrival(0.0 if name == "a" else 3.0, 300, 600, tenant=name) for _ in range(400)] for name in "ab"]
    counts: list[int] = []

    def counted(scheduler: Scheduler, request: Request) -> None:
        counts.append(scheduler.stats.num_preemptions)

    probes = [Arrival(4.0 + i, 10, 1, tenant="a") for i in range(10)]
    simulate(sorted([*loads[0], *loads[1], *probes], key=lambda each: each.at_s), ENGINES["8B"], 0, counted)
    assert 1 <= counts[-1] <= 4


def test_counters_rise_to_the_last_chosen_when_a_tenant_returns() -> None:
    tenants = Tenants()
    first, second = tenants.of(Owner("a", 2.0)), tenants.of(Owner("b"))
    tenants.record_return(first)
    first.charge(3000)
    tenants.record_start(first)
    first.charge(500)
    assert (first.served, second.served) == (1750.0, 0.0)
    tenants.record_return(second)
    assert second.served == 1500.0 and tenants.of(Owner("c")).served == 1500.0
    assert tenants.counter(first, waits=False) == 1750.0
    assert tenants.of(Owner("a", 3.0)) is first and first.weight == 3.0


def _table() -> Iterator[str]:
    for engine in ENGINES:
        for prompt in (200, 1000, 3000):
            alone, beside = (
                first_ms(run(engine, *loads), "steady") for loads in ([steady(prompt)], [FLOOD, steady(prompt)])
            )
            ratio = statistics.median(beside) / statistics.median(alone)
            cells = [f"{statistics.median(each):.0f} / {max(each):.0f}" for each in (alone, beside)]
            yield f"| {engine} | {prompt} | {' | '.join(cells)} | {ratio:.2f} |"


if __name__ == "__main__":
    print("| engine | prompt | alone p50 / max ms | beside a flood | ratio |\n| --- | --- | --- | --- | --- |")
    for line in _table():
        print(line, flush=True)
