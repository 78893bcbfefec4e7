"""Rows of the state pools that hold snapshots: which are free, and which snapshot goes when none is.

Owned by the prefix cache, in whose tree the snapshots hang. Pure Python; knows rows, no tensors. Counts in pages.
"""

from attention.kv_cache.radix_node import Node, Snapshot, SnapshotKind

_PRIOR = 4.0  # snapshots of a kind that count as saved and used once each before any was
_DECAY = 1 / 128  # of a kind's counts with each snapshot of it
_MIN_USES = 1 / 64  # expected of a kind, so that one that was useless is tried again when the load has changed


class Snapshots:
    """Each row is free, lent to a running request that writes a state into it, or holds a snapshot of the tree.

    The snapshot goes whose cost (pages to compute again without it), times the mean uses of its kind, plus the clock at
    its last use, is the least; the clock advances to that sum (GreedyDual: Young 1994, "The k-server dual and loose
    competitiveness for paging"). So the least recently used of equals goes, a dear one outlives many cheap ones, but
    not for ever, and the ends of prompts that never come again do not push out a beginning that many share. Own uses
    count for nothing: a conversation resumes at each of its states once (`tests.support.simulation.states`).

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
        self._clock = 0.0
        self._num_saved = dict.fromkeys(SnapshotKind, _PRIOR)
        self._num_used = dict.fromkeys(SnapshotKind, _PRIOR)

    @property
    def num_saved(self) -> int:
        """Snapshots in the tree."""
        return len(self._saved)

    @property
    def num_lent(self) -> int:
        """Rows of running requests."""
        return len(self.rows) - len(self._free) - len(self._returned) - len(self._saved)

    def value(self, snapshot: Snapshot) -> float:
        """The clock at which it goes if it is not used before."""
        return snapshot.used + snapshot.cost * self.expected_uses(snapshot.kind)

    def expected_uses(self, kind: SnapshotKind) -> float:
        """Uses of a snapshot of this kind, in the mean over the last ones."""
        return max(_MIN_USES, self._num_used[kind] / self._num_saved[kind])

    def lend(self, cost: int, kind: SnapshotKind) -> tuple[int | None, Node | None]:
        """A row for a state that costs `cost` pages, and the node that lost a snapshot for it, if one did. None if the
        new one would be the first to go, or all rows are lent."""
        if self._free:
            return self._free.pop(), None
        victim = min(self._saved.values(), key=self.value, default=None)
        if victim is None:
            return None, None
        value, own = self.value(victim), self._clock + cost * self.expected_uses(kind)
        self._clock = min(value, own)
        if value > own:
            return None, None
        self.drop(victim)
        self._returned.pop()  # no step of this plan writes the row of a snapshot, so it is lent at once
        return victim.row, victim.node

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
        snapshot.used = self._clock
        self._num_used[snapshot.kind] += 1

    def add(self, row: int, end: int, node: Node, kind: SnapshotKind) -> None:
        """A lent row holds the state after page number `end` of the path, which is in `node` and has no snapshot."""
        snapshot = Snapshot(row, end, node, kind)
        snapshot.used = self._clock
        self._num_used[kind] *= 1 - _DECAY
        self._num_saved[kind] = self._num_saved[kind] * (1 - _DECAY) + 1
        before = node.deepest(end)
        others = self._first if before is None else before.after
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
        snapshot.node.snapshots.remove(snapshot)
        others = self._first if snapshot.before is None else snapshot.before.after
        others.remove(snapshot)
        others |= snapshot.after
        for other in snapshot.after:
            other.before = snapshot.before
        del self._saved[snapshot.row]
        self._returned.append(snapshot.row)

    def check_integrity(self, nodes: list[Node], lent: list[int]) -> None:
        """Assert that rows, links and the tree agree. nodes: all of the tree. lent: rows of running requests."""
        hanging = [snapshot for node in nodes for snapshot in node.snapshots]
        assert {id(each) for each in hanging} == {id(each) for each in self._saved.values()}, (
            "snapshots outside the tree"
        )
        rows = [*self._free, *self._returned, *self._saved, *lent]
        assert sorted(rows) == list(self.rows), f"rows {sorted(rows)} of {self.rows}"
        for node in nodes:
            ends = [snapshot.end for snapshot in node.snapshots]
            assert ends == sorted(set(ends)) and all(node.depth < end <= node.end for end in ends), "misplaced"
            for snapshot in node.snapshots:
                assert snapshot.node is node and self._saved[snapshot.row] is snapshot
                assert snapshot.before is node.deepest(snapshot.end - 1), "another snapshot is before it"
                assert snapshot in (self._first if snapshot.before is None else snapshot.before.after)
        assert sum(len(each.after) for each in hanging) + len(self._first) == len(hanging), "linked twice"
