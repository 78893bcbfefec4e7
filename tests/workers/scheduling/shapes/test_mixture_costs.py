"""The choice of a shape on the costs of a mixture of experts whose verified rows read experts of their own, so that a
chain costs more than twice a plain round: adaptive is never below no speculation.

Milliseconds are those that Qwen3.6-35B-A3B is to take on one H200 (goals, not measurements): plain 1.9, 5.6, 13.0, a
chain of three 4.6, 14, 22 at 1, 8 and 32 requests. Shorter chains lie between, a tree of eight rows beyond by half of a
chain's extra.
"""

import itertools

import numpy as np
import pytest

from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from tests.support.simulation.shapes import Engine, chances_of, misread
from tests.support.slow import slow

BATCHES = (1, 8, 32)
NUM_SEEDS = 4
PLAIN, CHAIN = (1.9, 5.6, 13.0), (4.6, 14.0, 22.0)
CHAIN_3 = SpeculativeConfig("", "mtp", 3, 1, 4).shapes
TREE_8 = SpeculativeConfig("", "mtp", 4, 4, 8).shapes
KV_MS = 22_528 / 4.0e12 * 1e3
MEANS = ((1.0001, 2.0, 3.0), pytest.param((1.5, 2.5, 3.5), marks=pytest.mark.slow))


def costs_of(shapes: RoundShapes) -> CostTable:
    """Costs in proportion to a round's rows after the first; a chain of three has three."""
    rounds = []
    for shape in shapes.shapes:
        extra = min(shape.width - 1, 3) / 3 + max(0, shape.width - 4) / 8
        ms = tuple(plain + (chain - plain) * extra for plain, chain in zip(PLAIN, CHAIN, strict=True))
        rounds.append(RoundCosts(BATCHES, ms, (KV_MS,) * 3))
    return CostTable(tuple(rounds), (0,), (16,), ((5.0,),), (len(rounds) - 1,))


@pytest.mark.parametrize("means", MEANS, ids=str)
@pytest.mark.parametrize("batch", [32, *slow(1, 8)])
@pytest.mark.parametrize(
    "shapes, of_none, of_best", [*slow((CHAIN_3, 0.985, 0.97)), (TREE_8, 0.975, 0.965)], ids=["chain", "tree"]
)
def test_adaptive_is_never_below_no_speculation(
    shapes: RoundShapes, of_none: float, of_best: float, batch: int, means: tuple[float, ...]
) -> None:
    """Requests of 80 steps follow each other, whatever a round accepts. After 200 steps a chain is at least 0.985 of
    none, which is what probes may cost; with the first 200 steps, 0.95. At one request a tree takes 3.1 plain rounds,
    so that probes of it cost more (0.981 at 2.0 tokens a round).

    Shares of the best shape are means over seeds: one request at 2.5 tokens a round has a standard deviation of 0.021
    (of 12 seeds, from 0.939 to 0.98), because none is within 6 % of the best shape there, and a round's tokens vary by
    half."""
    costs, short = costs_of(shapes), []
    for mean in means:
        shares = []
        for seed in range(NUM_SEEDS):
            seed = batch + 100 * seed
            engine = Engine(shapes, batch, 1024, chances_of(shapes, mean), seed, actual=costs, request_steps=80)
            plain = engine.static(0)
            engine.rate(200)
            rate = engine.rate(800)
            whole = engine.tokens / engine.ms
            shares.append(rate / engine.best())
            if rate < of_none * plain or whole < 0.95 * plain:
                short.append((mean, seed, rate / plain, whole / plain, engine.seen))
        if np.mean(shares) < (0.95 if shapes is TREE_8 and batch == 1 else of_best):
            short.append((mean, shares))
    assert not short, "\n".join(map(str, short))


def test_where_a_start_took_chains_for_cheap_none_is_found_again() -> None:
    """The table says that a chain costs half of what it does."""
    found = {}
    for batch, mean in itertools.product(BATCHES, (1.0001, 2.0)):
        costs = costs_of(CHAIN_3)
        told = misread(costs, ((1.0,) * 3, (0.5,) * 3, (0.5,) * 3))
        engine = Engine(CHAIN_3, batch, 1024, chances_of(CHAIN_3, mean), batch, actual=costs, told=told)
        engine.rate(300)
        found[batch, mean] = engine.rate(700) / engine.static(0)
    assert min(found.values()) > 0.985, found


def test_a_load_that_grows_ends_speculation_in_time() -> None:
    """2.2 tokens a round pay at 32 requests (22 ms for 13), hardly at one and at 8."""
    engine = Engine(CHAIN_3, 1, 1024, chances_of(CHAIN_3, 2.2), actual=costs_of(CHAIN_3), request_steps=80)
    for batch in (1, 8, 32, 8, 1):
        engine.batch = batch
        engine.rate(150)
        assert engine.rate(500) > 0.985 * engine.static(0), (batch, engine.seen)
