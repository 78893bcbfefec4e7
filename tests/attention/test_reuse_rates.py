"""The rates at which snapshots are expected to be used, against lives of known hazards."""

import math
import random

import pytest

from aerie.attention.kv_cache.radix_node import SnapshotKind
from aerie.attention.kv_cache.snapshots import NUM_AGES, Group, ReuseRates, age_class

LAST = Group(SnapshotKind.ANSWER, True)


def lives(rates, rng, draw_use, draw_end, count=3000):
    """Each ends by a use or by an eviction, whichever comes first."""
    for _ in range(count):
        use, end = draw_use(rng), draw_end(rng)
        age = int(min(use, end))
        rates.record_presence(LAST, 0, age)
        if use <= end:
            rates.record_use(LAST, age)
    rates.refresh(1.0)


@pytest.mark.parametrize("mean_end", [20, 100, 2000])
def test_evictions_hide_no_uses(mean_end):
    """Uses come at 1 in 100 ticks whatever the age. However early others are evicted, the rate is that: 3,000 lives
    have at least 500 uses, so that 4 sigma of the mean are 18 %."""
    rates = ReuseRates()
    rng = random.Random(mean_end)
    lives(rates, rng, lambda r: r.expovariate(1 / 100), lambda r: r.expovariate(1 / mean_end))
    for age in (0, 3, 10):
        assert rates.rate(LAST, age) == pytest.approx(0.01, rel=0.35)


def test_a_state_is_worth_most_before_its_next_turn_and_little_after():
    """Turns come at age 200 to 500, and half of the conversations end."""
    rates = ReuseRates()
    lives(rates, random.Random(1), lambda r: r.uniform(200, 500) if r.random() < 0.5 else math.inf, lambda r: 1500)
    young, due, late = (rates.rate(LAST, age) for age in (1, 256, 1024))
    assert due > young > 5 * late


def test_nothing_is_known_before_the_next_refresh_and_old_lives_are_forgotten():
    rates = ReuseRates()
    before = rates.rate(LAST, 0)
    for _ in range(100):
        rates.record_presence(LAST, 0, 4)
        rates.record_use(LAST, 4)
    assert rates.rate(LAST, 0) == before
    rates.refresh(1.0)
    after = rates.rate(LAST, 0)
    assert after > 5 * before
    rates.refresh(0.001)
    assert before < rates.rate(LAST, 0) < after / 2
    assert rates.rate(Group(SnapshotKind.FORK, True), 0) == before, "another group's lives"


@pytest.mark.parametrize("start, end", [(0, 1), (0, 17), (5, 5), (3, 4096), (1000, 70_000), (5000, 5001)])
def test_all_ticks_are_counted_once_each_at_its_age(start, end):
    rates = ReuseRates()
    rates.record_presence(LAST, start, end)
    expected = [0.0] * NUM_AGES
    for age in range(start, end):
        expected[age_class(age)] += 1
    assert rates._ticks[LAST] == expected
