"""A strategy's rounds as CUDA graphs: one graph per (round shape, batch bucket, kind of sampling).

`GraphedDecoding` wraps any `DecodingStrategy`, which it knows nothing about: what a step reads and writes lives in
device tensors by slot, so a captured round needs two inputs, the slots and those that draft, and its outputs are
tensors it always writes to the same place. All graphs are captured at start. Steps that have none run eagerly: those
that carry prompt chunks, and rounds of a kind that the allowance for captures (`workers.config.GraphCapture`) did not
reach. No request ever waits for a capture, which would hold up all others on every rank.

Capturing changes no request's state: it runs rounds of the padding slot, which has finished, so commits keep its row
and count nothing, its KV goes to the dummy page, and nobody verifies the tree that is drafted for it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from workers.config import GraphCapture, RoundShapes
from workers.distributed.tp_group import TPGroup
from workers.runner.batch import StepBatch, StepTensors
from workers.runner.decoding import DecodingStrategy
from workers.runner.slot_table import SlotTable
from workers.sampling.sampler import CAPTURED_NEEDS, Logprobs, SamplingNeeds

T = TypeVar("T")

_EAGER_RUNS = 2  # before capture: they compile kernels, choose algorithms and make workspaces


class Recorder(Protocol):
    """How rounds become graphs. `CudaRecorder` is the one that serves."""

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """A replay of what `function` does to tensors, and what it returned: tensors that each replay writes."""

    def run_apart(self, function: Callable[[], object]) -> None:
        """Run `function` where it leaves nothing behind that a recording must not meet."""

    def used_bytes(self) -> int:
        """Memory in use on the device."""


class CudaRecorder:
    """Graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread queries events while this thread captures
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function()
        return graph.replay, output

    def run_apart(self, function: Callable[[], object]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)

    def used_bytes(self) -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free


@dataclass(frozen=True)
class GraphKey:
    """What one graph serves: batches of up to `bucket` requests in a round that verifies `shape` and drafts
    `next_shape`, with these needs or fewer."""

    shape: int
    next_shape: int
    bucket: int
    needs: SamplingNeeds


@dataclass
class _Captured:
    """A captured round.

    run: replays it.
    slots, draft_slots: its inputs.
    output: what it emitted, at the same place after every replay.
    """

    run: Callable[[], None]
    slots: "_SlotInput"
    draft_slots: "_SlotInput"
    output: StepTensors


class _SlotInput:
    """An input of a graph: [bucket] int64 slots."""

    def __init__(self, bucket: int, padding_slot: int, device: torch.device) -> None:
        self.tensor = torch.full((bucket,), padding_slot, dtype=torch.int64, device=device)
        self._padding_slot = padding_slot
        self._filled: Tensor | None = None

    def fill(self, slots: Tensor) -> None:
        """Take over a batch's slots, which nobody changes in place: the same tensor need not be copied again."""
        if self._filled is not slots:
            self.tensor[: slots.shape[0]] = slots
            self.tensor[slots.shape[0] :] = self._padding_slot
            self._filled = slots


@dataclass(frozen=True)
class Taken:
    """What a capture took: seconds, and device memory; other processes' memory too, if they allocate meanwhile."""

    seconds: float
    num_bytes: int

    @staticmethod
    def together(each: Iterable["Taken"]) -> "Taken":
        each = tuple(each)
        return Taken(sum(taken.seconds for taken in each), sum(taken.num_bytes for taken in each))


@dataclass(frozen=True)
class CaptureReport:
    """rounds: what each captured round took, in their order.
    num_left_out: how many more were wanted.
    """

    rounds: Mapping[GraphKey, Taken]
    num_left_out: int

    @property
    def whole(self) -> Taken:
        return Taken.together(self.rounds.values())


def bucket_sizes(max_running: int) -> tuple[int, ...]:
    """Batch sizes that are captured: 1, 2, 4, 8, then multiples of 8 to 64, of 16 to 256, of 32 beyond; the largest is
    at least max_running."""
    sizes, size = [1, 2, 4], 8
    while size < max_running:
        sizes.append(size)
        size += 8 if size < 64 else 16 if size < 256 else 32
    return tuple([s for s in sizes if s < max_running] + [max_running])


def is_always_captured(needs: SamplingNeeds) -> bool:
    """Whether rounds of this kind are captured whatever it takes: greedy and plainly random ones."""
    return not needs.full_logits


def buckets_of(needs: SamplingNeeds, buckets: Sequence[int]) -> tuple[int, ...]:
    """The buckets, ascending, that rounds of a kind are captured for: all of them, or, of the kinds that fewer requests
    have, powers of two and the largest, so that a batch is padded to twice its size at most."""
    if is_always_captured(needs):
        return tuple(buckets)
    return tuple(size for size in buckets if size & (size - 1) == 0 or size == buckets[-1])


class GraphedDecoding:
    """Runs `inner`'s pure rounds as graphs. max_kv_len: longest length that a request can have, with what its rounds in
    flight may write. report: of its captures."""

    def __init__(
        self,
        inner: DecodingStrategy,
        slots: SlotTable,
        buckets: Sequence[int],
        max_kv_len: int,
        recorder: Recorder,
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._buckets = tuple(sorted(buckets))
        self._max_kv_len = max_kv_len
        self._recorder = recorder
        self._captured: dict[GraphKey, _Captured] = {}
        self.report = CaptureReport({}, 0)

    @property
    def shapes(self) -> RoundShapes:
        return self._inner.shapes

    @property
    def captured(self) -> frozenset[GraphKey]:
        """The rounds that have graphs."""
        return frozenset(self._captured)

    def capture(
        self, allowance: GraphCapture, group: TPGroup, clock: Callable[[], float] = time.perf_counter
    ) -> CaptureReport:
        """Capture all rounds, the rarer kinds as far as the allowance goes. The same on every rank of `group`: rounds
        run collectives, so that no rank may capture one which another leaves out."""
        wanted, rounds = self._keys(), dict[GraphKey, Taken]()
        for key in wanted:
            spent = Taken.together(taken for key, taken in rounds.items() if not is_always_captured(key.needs))
            if not is_always_captured(key.needs) and _is_used_up(allowance, spent, group, self._slots.device):
                break
            since_s, since_bytes = clock(), self._recorder.used_bytes()
            self._captured[key] = self._capture(key)
            num_bytes = self._recorder.used_bytes() - since_bytes
            rounds[key] = Taken(clock() - since_s, num_bytes)
        self.report = CaptureReport(rounds, len(wanted) - len(rounds))
        return self.report

    def _keys(self) -> list[GraphKey]:
        """What is to be captured, in this order: kinds that more requests have first, and of each the largest bucket
        first, so that smaller ones reuse its memory."""
        return [
            GraphKey(shape, shape, bucket, needs)
            for needs in CAPTURED_NEEDS
            for bucket in reversed(buckets_of(needs, self._buckets))
            for shape in range(len(self.shapes))
        ]

    def _capture(self, key: GraphKey) -> _Captured:
        """Of a batch of padding that runs all that the batches of `key` may need."""
        padding = key.bucket, self._slots.padding_slot, self._slots.device
        slots, draft_slots = _SlotInput(*padding), _SlotInput(*padding)
        batch = StepBatch(
            slots.tensor, key.shape, key.next_shape, draft_slots.tensor, self._max_kv_len, None, key.needs
        )
        for _ in range(_EAGER_RUNS):
            self._recorder.run_apart(lambda: self._inner.step(batch))
        run, output = self._recorder.record(lambda: self._inner.step(batch))
        return _Captured(run, slots, draft_slots, output)

    def step(self, batch: StepBatch) -> StepTensors:
        captured = self._captured_for(batch)
        if captured is None:
            return self._inner.step(batch)
        captured.slots.fill(batch.slots)
        captured.draft_slots.fill(batch.draft_slots)
        captured.run()
        return _first(captured.output, batch.num_requests)

    def _captured_for(self, batch: StepBatch) -> _Captured | None:
        """The graph that runs `batch`; None if it must run eagerly."""
        if batch.chunks is not None or batch.shape != batch.next_shape:
            return None
        needs = batch.needs.captured
        sizes = buckets_of(needs, self._buckets)
        bucket = next((size for size in sizes if size >= batch.num_requests), None)
        return None if bucket is None else self._captured.get(GraphKey(batch.shape, batch.next_shape, bucket, needs))


def _is_used_up(allowance: GraphCapture, spent: Taken, group: TPGroup, device: torch.device) -> bool:
    """Whether any rank has spent the allowance; the same answer on all."""
    mine = torch.tensor((spent.seconds, float(spent.num_bytes)), dtype=torch.float64, device=device)
    seconds, num_bytes = group.all_gather(mine).amax(0).tolist()
    return bool(seconds >= allowance.limit_s or num_bytes >= allowance.limit_gb * 1e9)


def _first(out: StepTensors, count: int) -> StepTensors:
    """What the first `count` requests emitted."""
    logprobs = out.logprobs
    if logprobs is not None:
        logprobs = Logprobs(logprobs.chosen[:count], logprobs.top_ids[:count], logprobs.top[:count])
    return StepTensors(out.tokens[:count], out.counts[:count], out.finish[:count], out.accepted[:count], logprobs)
