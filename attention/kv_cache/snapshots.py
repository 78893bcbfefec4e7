"""Allocates rows of the state pools to snapshots, and evicts the snapshots with the lowest expected use if no row is
free: `ReuseRates` estimates uses by kind and age. Owned by the prefix cache, whose tree has the snapshots. Pure Python,
without tensors and clock. Positions are counted in pages."""

import math
from collections import defaultdict
from typing import NamedTuple

from aerie.attention.kv_cache.radix_node import Node, Snapshot, SnapshotKind

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
        """Return, for each age, the chance of another use divided by the expected ticks until then."""
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


_REFRESH_TICKS = 16  # ticks between estimates of the rates
_DECAY = 0.9934  # decay of earlier counts at each estimate: a tenth in 256 ticks


class Snapshots:
    """Each row is free, lent to a running request that writes a state into it, or holds a snapshot of the tree.

    The snapshot with the lowest expected saving in pages per tick is evicted first. The saving is the number of pages
    to recompute without it, times the uses per tick of similar snapshots (`ReuseRates`): of the same kind and age, and
    with or without a later one in the text. So rows are kept for common prefixes and for the ends of conversations that
    may continue, not for the ends of prompts that do not return. In a continued conversation, states before the last
    one are evicted first. A tick is a use or a request for a row, so estimates need no clock and do not depend on the
    request rate. `tests.support.simulation.states` compares this with the best possible choice.

    A returned row is lent again only in later plans (`plan_ended`), because a step of the current plan may still write
    it. Ranks execute plans in order.
    """

    def __init__(self, rows: range) -> None:
        self.rows = rows
        self.reset()

    def reset(self) -> None:
        """Free all rows."""
        self._free = list(reversed(self.rows))
        self._returned: list[int] = []
        self._saved: dict[int, Snapshot] = {}  # by row
        self._first: set[Snapshot] = set()  # snapshots without an earlier one in their path
        self._now = 0
        self._rates = ReuseRates()

    @property
    def num_saved(self) -> int:
        """Number of snapshots in the tree."""
        return len(self._saved)

    @property
    def num_lent(self) -> int:
        """Number of rows of running requests."""
        return len(self.rows) - len(self._free) - len(self._returned) - len(self._saved)

    def value(self, snapshot: Snapshot) -> float:
        """Return the expected saving of a snapshot in pages per tick."""
        return snapshot.cost * self._rates.rate(_group(snapshot), self._now - snapshot.since)

    def value_of_new(self, cost: int, kind: SnapshotKind) -> float:
        """Return the value of a new snapshot, the last in its text, that saves `cost` pages."""
        return cost * self._rates.rate(Group(kind, True), 0)

    def lend(self, cost: int, kind: SnapshotKind) -> tuple[int | None, Node | None]:
        """Return a row for a state that saves `cost` pages, and the node that lost a snapshot for it, if any. None if
        the new state would be evicted first, or all rows are lent. With cost 0 only a free row is returned."""
        row = node = None
        if self._free:
            row = self._free.pop()
        elif cost and self._saved:
            victim = min(self._saved.values(), key=self.value)
            if self.value(victim) <= self.value_of_new(cost, kind):
                self.drop(victim)
                self._returned.pop()  # no step of this plan writes a snapshot's row, so it can be lent at once
                row, node = victim.row, victim.node
        if cost:
            self._tick()
        return row, node

    def give_back(self, row: int) -> None:
        """Give back a lent row."""
        self._returned.append(row)

    def plan_ended(self) -> None:
        """End the plan: rows returned so far may be lent in the next one."""
        if self._returned:
            self._free += self._returned
            self._returned.clear()

    def use(self, snapshot: Snapshot) -> None:
        """Record that a request resumes at a snapshot."""
        self._record(snapshot)
        self._rates.record_use(_group(snapshot), self._now - snapshot.since)
        self._tick()
        snapshot.since = snapshot.recorded = self._now

    def add(self, row: int, end: int, node: Node, kind: SnapshotKind) -> None:
        """Add the snapshot in a lent row: the state after page number `end` of the path. That page is in `node` and has
        no snapshot."""
        snapshot = Snapshot(row, end, node=node, kind=kind, since=self._now, recorded=self._now)
        before = node.deepest(end)
        others = self._first if before is None else before.after
        self._record(before)
        snapshot.before = before
        if node.children or (node.snapshots and node.snapshots[-1].end > end):
            snapshot.after = {other for other in others if other.end > end and other.node.is_below(node)}
        for other in snapshot.after:
            other.before = snapshot
        others -= snapshot.after
        others.add(snapshot)
        self._saved[row] = snapshot
        node.snapshots.append(snapshot)
        node.snapshots.sort(key=lambda saved: saved.end)

    def drop(self, snapshot: Snapshot) -> None:
        """Remove a snapshot from the tree."""
        self._record(snapshot)
        self._record(snapshot.before)
        snapshot.node.snapshots.remove(snapshot)
        others = self._first if snapshot.before is None else snapshot.before.after
        others.remove(snapshot)
        others |= snapshot.after
        for other in snapshot.after:
            other.before = snapshot.before
        del self._saved[snapshot.row]
        self._returned.append(snapshot.row)

    def _tick(self) -> None:
        self._now += 1
        if self._now % _REFRESH_TICKS == 0:
            for snapshot in self._saved.values():
                self._record(snapshot)
            self._rates.refresh(_DECAY)

    def _record(self, snapshot: Snapshot | None) -> None:
        """Record the time of a snapshot in its group. Must be called before its group changes."""
        if snapshot is not None:
            since = snapshot.since
            self._rates.record_presence(_group(snapshot), snapshot.recorded - since, self._now - since)
            snapshot.recorded = self._now


def _group(snapshot: Snapshot) -> Group:
    return Group(snapshot.kind, not snapshot.after)
