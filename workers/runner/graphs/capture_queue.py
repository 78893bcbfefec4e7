"""Which step of an engine is captured next, and which never. Pure, and the same on every rank of an engine, since all
that it is told is: steps run collectives, so that no rank may have a graph which another has not. Used by
`workers.runner.graphs.cuda_graph`.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from workers.config import GraphCapture
from workers.runner.graphs.graph_keys import CHUNK_NEEDS, GraphKey, is_always_captured


@dataclass(frozen=True)
class Taken:
    """What a capture took: seconds, and device memory; other processes' memory too, if they allocate meanwhile."""

    seconds: float
    num_bytes: int

    @staticmethod
    def together(each: Iterable["Taken"]) -> "Taken":
        each = tuple(each)
        return Taken(sum(taken.seconds for taken in each), sum(taken.num_bytes for taken in each))


class CaptureQueue:
    """The order of captures: the first ones, which a start waits for, then what steps have missed most, then what more
    requests need first. Those with grammars come last, and once an engine is ready only if a request has one.

    first: keys of `wanted`; None: all that are captured whatever they take. wanted: in the order in which graphs reuse
    each other's memory best, which is kept within a kind for what no step has missed.
    """

    def __init__(self, wanted: Sequence[GraphKey], first: Collection[GraphKey] | None, allowance: GraphCapture) -> None:
        chosen = {key for key in wanted if (is_always_captured(key) if first is None else key in first)}
        rest = [key for key in wanted if key not in chosen]
        # dicts for their order and for finding a key in them
        self._first = dict.fromkeys(key for key in wanted if key in chosen)
        self._rest = dict.fromkeys(sorted((key for key in rest if not key.needs.masked), key=_urgency))
        self._masked = dict.fromkeys(key for key in rest if key.needs.masked)
        self._missed = dict[GraphKey, int]()  # rows, of some of the rest
        self._allowance = allowance
        self._seconds = 0.0  # of the rest
        self._num_bytes = 0  # of all that are not always captured
        self.num_left_out = 0
        self._leave_out()

    @property
    def num_waiting(self) -> int:
        """Graphs that are still to come."""
        return len(self._first) + len(self._rest)

    @property
    def missed_rows(self) -> int:
        """By how many rows steps of the next one have been padded so far."""
        return max(self._missed.values(), default=0)

    def missed(self, key: GraphKey, num_rows: int) -> None:
        """A step of `key`, which is not captured, was padded by so many rows; forgotten if it is not waiting."""
        if num_rows > 0 and key in self._rest:
            self._missed[key] = self._missed.get(key, 0) + num_rows

    def add_masked(self) -> None:
        """Steps with grammars are wanted from now on."""
        self._rest |= self._masked
        self._masked.clear()
        self._leave_out()

    def next_at_start(self) -> GraphKey | None:
        """What a start captures next: all of the first ones, and more while seconds are left; None: it is done."""
        if self._first:
            return next(iter(self._first))
        if self._seconds >= self._allowance.limit_s:
            return None
        if not self._rest:
            self.add_masked()
        return next(iter(self._rest), None)

    def next(self) -> GraphKey | None:
        """What is captured next while an engine serves; None: nothing is waiting."""
        if self._first:
            return next(iter(self._first))
        return max(self._missed, key=self._missed.__getitem__) if self._missed else next(iter(self._rest), None)

    def took(self, key: GraphKey, taken: Taken) -> None:
        """`key`, which was next, has been captured. taken: on the rank where that is most."""
        queue = self._first if self._first else self._rest
        assert key in queue, "another step was to be captured"
        del queue[key]
        self._missed.pop(key, None)
        if queue is self._rest:
            self._seconds += taken.seconds
        if not is_always_captured(key):
            self._num_bytes += taken.num_bytes
            self._leave_out()

    def failed(self, key: GraphKey) -> None:
        """`key`, which was next, cannot be captured: its batches run without a graph, or in a larger one."""
        self.took(key, Taken(0.0, 0))

    def _leave_out(self) -> None:
        """Once memory is used up, only what is captured whatever it takes stays."""
        if self._num_bytes < self._allowance.limit_gb * 1e9:
            return
        for queue in (self._first, self._rest, self._masked):
            for key in [key for key in queue if not is_always_captured(key)]:
                del queue[key]
                self._missed.pop(key, None)
                self.num_left_out += 1


def _urgency(key: GraphKey) -> tuple[int, int]:
    """Rounds with filters, which many clients send, would run without a graph; then steps with prompts, beside few
    requests first, which would be padded most; then sizes between those of the first graphs; then what is rare."""
    if key.tokens:
        return 1, key.bucket
    if is_always_captured(key):
        return 2, 0
    return (0, 0) if key.needs == CHUNK_NEEDS else (3, 0)
