"""Rows of the state pools that hold snapshots: which are free, and which snapshot goes when none is.

Owned by the prefix cache, in whose tree the snapshots hang. Pure Python; knows rows, no tensors. Counts in pages.
"""

from attention.kv_cache.radix_node import Node, Snapshot, SnapshotKind
from attention.kv_cache.reuse_rates import Group, ReuseRates

_REFRESH_TICKS = 16  # between estimates of the rates
_KEPT = 0.9934  # weight of what was seen before, at each of them: a tenth is forgotten in 256 ticks


class Snapshots:
    """Each row is free, lent to a running request that writes a state into it, or holds a snapshot of the tree.

    The snapshot goes that is expected to save the fewest pages per tick: those to compute again without it, times the
    uses per tick of snapshots like it (`ReuseRates`): of its kind and age, and with or without another one after it in
    the text. So rows go to the ends of conversations that may go on and to beginnings that many share, not to ends of
    prompts that never come again. Of a conversation that has gone on, the states before the last one go first. A tick
    is a use or a demand for a row: no clock is needed, and a load twice as fast changes nothing.
    `tests.support.simulation.states` compares this with what any choice could save.

    A row given back is lent again in later plans only (`plan_ended`): a step of the plan being built may still write
    it. Ranks execute plans in order, so later ones are safe.
    """

    def __init__(self, rows: range) -> None:
        self.rows = rows
        self.reset()

    def reset(self) -> None:
        """All rows are free."""
        self._free = list(reversed(self.rows))
        self._returned: list[int] = []
        self._saved: dict[int, Snapshot] = {}  # by row
        self._first: set[Snapshot] = set()  # those without one before them
        self._now = 0
        self._rates = ReuseRates()

    @property
    def num_saved(self) -> int:
        """Snapshots in the tree."""
        return len(self._saved)

    @property
    def num_lent(self) -> int:
        """Rows of running requests."""
        return len(self.rows) - len(self._free) - len(self._returned) - len(self._saved)

    def value(self, snapshot: Snapshot) -> float:
        """Pages that it is expected to save per tick."""
        return snapshot.cost * self._rates.rate(_group(snapshot), self._now - snapshot.since)

    def value_of_new(self, cost: int, kind: SnapshotKind) -> float:
        """Return the value of a new snapshot, the last in its text, that saves `cost` pages."""
        return cost * self._rates.rate(Group(kind, True), 0)

    def lend(self, cost: int, kind: SnapshotKind) -> tuple[int | None, Node | None]:
        """A row for a state that saves `cost` pages, and the node that lost a snapshot for it, if one did. None if the
        new one would be the first to go, or all rows are lent. With cost 0 only a free row."""
        row = node = None
        if self._free:
            row = self._free.pop()
        elif cost and self._saved:
            victim = min(self._saved.values(), key=self.value)
            if self.value(victim) <= self.value_of_new(cost, kind):
                self.drop(victim)
                self._returned.pop()  # no step of this plan writes the row of a snapshot, so it is lent at once
                row, node = victim.row, victim.node
        if cost:
            self._tick()
        return row, node

    def give_back(self, row: int) -> None:
        """A lent row is not needed any more."""
        self._returned.append(row)

    def plan_ended(self) -> None:
        """The plan is built: rows given back so far may be lent in the next one."""
        if self._returned:
            self._free += self._returned
            self._returned.clear()

    def use(self, snapshot: Snapshot) -> None:
        """A request resumes at it."""
        self._record(snapshot)
        self._rates.was_used(_group(snapshot), self._now - snapshot.since)
        self._tick()
        snapshot.since = snapshot.recorded = self._now

    def add(self, row: int, end: int, node: Node, kind: SnapshotKind) -> None:
        """A lent row holds the state after page number `end` of the path, which is in `node` and has no snapshot."""
        snapshot = Snapshot(row, end, node, kind, self._now)
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
        node.snapshots.sort(key=lambda each: each.end)

    def drop(self, snapshot: Snapshot) -> None:
        """A snapshot leaves the tree."""
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
            for each in self._saved.values():
                self._record(each)
            self._rates.refresh(_KEPT)

    def _record(self, snapshot: Snapshot | None) -> None:
        """Let the rates know how long it was there: at least before its group changes."""
        if snapshot is not None:
            since = snapshot.since
            self._rates.was_there(_group(snapshot), snapshot.recorded - since, self._now - since)
            snapshot.recorded = self._now


def _group(snapshot: Snapshot) -> Group:
    return Group(snapshot.kind, not snapshot.after)
