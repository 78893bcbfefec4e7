"""The order in which steps are captured. Used by `aerie.workers.runner.graphs.cuda_graph`.

Pure, with the same results on all ranks, because all ranks must have the same graphs: steps run collectives.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from aerie.workers.config import GraphCapture
from aerie.workers.runner.graphs.graph_keys import CHUNK_NEEDS, GraphKey, is_always_captured


@dataclass(frozen=True)
class CaptureCost:
    """Time and device memory of a capture. The memory includes what other processes allocate during the capture."""

    seconds: float
    num_bytes: int

    @staticmethod
    def total(costs: Iterable["CaptureCost"]) -> "CaptureCost":
        costs = tuple(costs)
        return CaptureCost(sum(cost.seconds for cost in costs), sum(cost.num_bytes for cost in costs))


class CaptureQueue:
    """Graphs that wait for capture, in this order:

    1. graphs that a start waits for;
    2. while serving, the graph whose absence has cost the most padding;
    3. the others, common steps first (`_priority`);
    4. graphs for grammars: at a start after all others; while serving only after the first request with a grammar.

    wanted: keys of all graphs, ordered so that each reuses the memory of earlier ones.
    first: keys of the graphs that a start waits for; None: those with `is_always_captured`.
    allowance: limits of time and memory.
    num_left_out: graphs dropped because of the memory limit.
    """

    def __init__(self, wanted: Sequence[GraphKey], first: Collection[GraphKey] | None, allowance: GraphCapture) -> None:
        chosen = {key for key in wanted if (is_always_captured(key) if first is None else key in first)}
        rest = [key for key in wanted if key not in chosen]
        # dicts, as ordered sets
        self._first = dict.fromkeys(key for key in wanted if key in chosen)
        self._rest = dict.fromkeys(sorted((key for key in rest if not key.needs.masked), key=_priority))
        self._masked = dict.fromkeys(key for key in rest if key.needs.masked)
        self._missed = dict[GraphKey, int]()  # padding rows so far because each graph was missing
        self._allowance = allowance
        self._seconds = 0.0  # time of captures after the first graphs
        self._num_bytes = 0  # memory of captured graphs to which the limit applies
        self.num_left_out = 0
        self._leave_out()

    @property
    def num_waiting(self) -> int:
        """Graphs still to capture."""
        return len(self._first) + len(self._rest)

    @property
    def missed_rows(self) -> int:
        """Number of padding rows that the most missed graph has caused so far."""
        return max(self._missed.values(), default=0)

    def record_miss(self, key: GraphKey, num_rows: int) -> None:
        """Add the padding rows of a step whose graph `key` is not captured. Ignored if `key` is not waiting."""
        if num_rows > 0 and key in self._rest:
            self._missed[key] = self._missed.get(key, 0) + num_rows

    def add_masked(self) -> None:
        """Add the graphs for grammars."""
        self._rest |= self._masked
        self._masked.clear()
        self._leave_out()

    def next_at_start(self) -> GraphKey | None:
        """Return the next graph to capture at the start; None if the start need not wait for more."""
        if self._first:
            return next(iter(self._first))
        if self._seconds >= self._allowance.limit_s:
            return None
        if not self._rest:
            self.add_masked()
        return next(iter(self._rest), None)

    def next(self) -> GraphKey | None:
        """Return the next graph to capture while serving; None if none is waiting."""
        if self._first:
            return next(iter(self._first))
        return max(self._missed, key=self._missed.__getitem__) if self._missed else next(iter(self._rest), None)

    def remove_captured(self, key: GraphKey, cost: CaptureCost) -> None:
        """Remove the next graph, `key`, after its capture. cost: the maximum over the ranks."""
        queue = self._first if self._first else self._rest
        assert key in queue, "another graph was next"
        del queue[key]
        self._missed.pop(key, None)
        if queue is self._rest:
            self._seconds += cost.seconds
        if not is_always_captured(key):
            self._num_bytes += cost.num_bytes
            self._leave_out()

    def remove_failed(self, key: GraphKey) -> None:
        """Remove the next graph, `key`, which cannot be captured."""
        self.remove_captured(key, CaptureCost(0.0, 0))

    def _leave_out(self) -> None:
        """Once the memory limit is reached, drop all graphs that it applies to."""
        if self._num_bytes < self._allowance.limit_gb * 1e9:
            return
        for queue in (self._first, self._rest, self._masked):
            for key in [key for key in queue if not is_always_captured(key)]:
                del queue[key]
                self._missed.pop(key, None)
                self.num_left_out += 1


def _priority(key: GraphKey) -> tuple[int, int]:
    """Return the sort key of graphs after the first ones:

    1. rounds with filters, which are common;
    2. mixed batches, those with the fewest requests first, because without a graph they have the most padding;
    3. greedy and random rounds of the remaining batch sizes;
    4. rounds with rare kinds of sampling.
    """
    if key.tokens:
        return 1, key.bucket
    if is_always_captured(key):
        return 2, 0
    return (0, 0) if key.needs == CHUNK_NEEDS else (3, 0)
