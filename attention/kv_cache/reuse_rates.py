"""Rates at which snapshots are used, by kind and age. Owned by `snapshots`. Pure Python, no clock."""

import math
from collections import defaultdict
from typing import NamedTuple

from aerie.attention.kv_cache.radix_node import SnapshotKind

NUM_AGES = 12  # classes of age: 0, 1, 2-3, 4-7, ... ticks; the last has no end
_PRIOR_USES, _PRIOR_TICKS = 0.5, 50.0  # prior counts of each group


class Group(NamedTuple):
    """Snapshots with the same expected use. is_last: no later snapshot in any text."""

    kind: SnapshotKind
    is_last: bool


def age_class(age: int) -> int:
    """Return the class of an age in ticks."""
    return min(NUM_AGES - 1, age.bit_length())


class ReuseRates:
    """Estimates the uses per tick of a snapshot, by group and age.

    The hazard of each age is estimated from uses and ticks at risk, so that evicted snapshots count until their
    eviction. The rate over the rest of a life is the hit density of Beckmann and Sanchez, "LHD: Improving Cache Hit
    Rate by Maximizing Hit Density" (NSDI 2018). Rarely seen ages use their group's mean. A use starts a new life at age
    0.
    """

    def __init__(self) -> None:
        self._uses: dict[Group, list[float]] = defaultdict(lambda: [0.0] * NUM_AGES)
        self._ticks: dict[Group, list[float]] = defaultdict(lambda: [0.0] * NUM_AGES)
        self._rates: dict[Group, list[float]] = {}  # as of the last `refresh`

    def record_presence(self, group: Group, start: int, end: int) -> None:
        """Record that a snapshot was in the group between ages `start` and `end`."""
        ticks = self._ticks[group]
        while start < end:
            age = age_class(start)
            until = end if age == NUM_AGES - 1 else min(end, 1 << age)
            ticks[age] += until - start
            start = until

    def record_use(self, group: Group, age: int) -> None:
        """Record that a snapshot of the group was used at this age."""
        self._uses[group][age_class(age)] += 1

    def refresh(self, keep: float) -> None:
        """Multiply all counts so far by `keep`, and let `rate` use the new counts."""
        for seen in (self._uses, self._ticks):
            for group, numbers in seen.items():
                seen[group] = [number * keep for number in numbers]
        self._rates.clear()

    def rate(self, group: Group, age: int) -> float:
        """Return the expected uses per tick."""
        rates = self._rates.get(group)
        if rates is None:
            rates = self._rates[group] = self._estimate(group)
        return rates[age_class(age)]

    def _estimate(self, group: Group) -> list[float]:
        uses, ticks = self._uses[group], self._ticks[group]
        mean = (sum(uses) + _PRIOR_USES) / (sum(ticks) + _PRIOR_TICKS)
        rates, is_used, lasts = [0.0] * NUM_AGES, 0.0, 0.0  # from the oldest age: chance of a use, expected ticks
        for age in range(NUM_AGES - 1, -1, -1):
            hazard = (uses[age] + _PRIOR_USES) / (ticks[age] + _PRIOR_USES / mean)
            survives = math.exp(-hazard * (1 << max(0, age - 1)))
            is_used = 1 - survives + survives * is_used
            lasts = (1 - survives) / hazard + survives * lasts
            rates[age] = is_used / lasts
        return rates
