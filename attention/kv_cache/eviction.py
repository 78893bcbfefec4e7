"""The order in which the prefix cache evicts the leaves of its radix tree. Used by `prefix_cache` alone."""

import heapq

from aerie.attention.kv_cache.radix_node import EvictionKey, Node


class EvictionQueue:
    """A heap of leaves: first those that end in pages after the path's last snapshot, then the least recently used.

    A use does not move a leaf: its key is corrected when it is popped. So `match` and `insert` cost nothing here, and
    the heap may have stale entries.
    """

    def __init__(self, has_snapshots: bool) -> None:
        """has_snapshots: whether there are recurrent layers; then pages after the last snapshot save no computation."""
        self._has_snapshots = has_snapshots
        self._heap: list[tuple[EvictionKey, int, Node]] = []
        self._num_pushed = 0

    def clear(self) -> None:
        """Forget all leaves."""
        self._heap.clear()
        self._num_pushed = 0

    def push(self, leaf: Node) -> None:
        """Add a leaf, or move it forward if it is now evicted earlier."""
        key = self._key(leaf)
        if leaf.queued is None or key < leaf.queued:
            leaf.queued = key
            self._num_pushed += 1
            heapq.heappush(self._heap, (key, self._num_pushed, leaf))

    def pop(self) -> Node | None:
        """Remove and return the leaf to evict next; None if there is none."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if key != node.queued:  # another entry replaced this one
                continue
            node.queued = None
            if node.children or not node.pages:  # not a leaf any more
                continue
            if key == self._key(node):
                return node
            self.push(node)  # used since it was pushed
        return None

    def num_useless(self, leaf: Node) -> int:
        """Pages of a leaf after its last snapshot, which save no computation; 0 without recurrent layers."""
        if not self._has_snapshots:
            return 0
        return leaf.end - leaf.snapshots[-1].end if leaf.snapshots else len(leaf.pages)

    def _key(self, leaf: Node) -> EvictionKey:
        return self.num_useless(leaf) == 0, leaf.stamp
