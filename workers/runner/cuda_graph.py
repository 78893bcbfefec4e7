"""A strategy's rounds as CUDA graphs: one graph per (round shape, batch bucket, kind of sampling).

`GraphedDecoding` wraps any `DecodingStrategy`, which it knows nothing about: what a step reads and writes lives in
device tensors by slot, so a captured round needs two inputs, the slots and those that draft, and its outputs are
tensors it always writes to the same place. Greedy and random rounds are captured at start. Those with filters,
penalties or log-probabilities are captured when the first batch wants them, on every rank in the same step, as all have
the same plan. Steps that carry prompt chunks run eagerly.

Capturing changes no request's state: it runs rounds of the padding slot, which has finished, so commits keep its row
and count nothing, its KV goes to the dummy page, and nobody verifies the tree that is drafted for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.config import RoundShapes
from workers.runner.batch import StepBatch, StepTensors
from workers.runner.decoding import DecodingStrategy
from workers.runner.slot_table import SlotTable
from workers.sampling.sampler import Logprobs, SamplingNeeds

_EAGER_RUNS = 2  # before capture: they compile kernels, choose algorithms and make workspaces


@dataclass(frozen=True)
class _Key:
    shape: int
    next_shape: int
    bucket: int
    needs: SamplingNeeds


@dataclass
class _Captured:
    """A graph, its inputs, and its output, which is at the same place after every replay."""

    graph: torch.cuda.CUDAGraph
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


def bucket_sizes(max_running: int) -> tuple[int, ...]:
    """Batch sizes that are captured: 1, 2, 4, 8, then multiples of 8 to 64, of 16 to 256, of 32 beyond; the largest is
    at least max_running."""
    sizes, size = [1, 2, 4], 8
    while size < max_running:
        sizes.append(size)
        size += 8 if size < 64 else 16 if size < 256 else 32
    return tuple([s for s in sizes if s < max_running] + [max_running])


class GraphedDecoding:
    """Runs `inner`'s pure rounds as graphs. max_kv_len: longest length that a request can have, with what its rounds in
    flight may write."""

    def __init__(
        self,
        inner: DecodingStrategy,
        slots: SlotTable,
        buckets: Sequence[int],
        max_kv_len: int,
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._buckets = tuple(sorted(buckets))
        self._max_kv_len = max_kv_len
        self._captured: dict[_Key, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def shapes(self) -> RoundShapes:
        return self._inner.shapes

    def capture(self, random: bool) -> None:
        """Capture every bucket of every shape, largest first so that smaller ones reuse its memory."""
        for bucket in reversed(self._buckets):
            for shape in range(len(self.shapes)):
                self._round(_Key(shape, shape, bucket, SamplingNeeds(random)))

    def _round(self, key: _Key) -> _Captured:
        """The graph of `key`, captured now if this is its first use; running requests wait for it."""
        if key not in self._captured:
            self._captured[key] = self._capture(key)
        return self._captured[key]

    def _capture(self, key: _Key) -> _Captured:
        # a graph that shapes logits must count tokens, and the counts' addresses must not change any more
        assert self._slots.output_counts is not None or not key.needs.shaping
        slots, draft_slots = (
            _SlotInput(key.bucket, self._slots.padding_slot, self._slots.device) for _ in ("slots", "draft_slots")
        )
        batch = StepBatch(
            slots.tensor, key.shape, key.next_shape, draft_slots.tensor, self._max_kv_len, None, key.needs
        )
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_EAGER_RUNS):
                self._inner.step(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread queries events while this thread captures
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._inner.step(batch)
        return _Captured(graph, slots, draft_slots, output)

    def step(self, batch: StepBatch) -> StepTensors:
        key = self._key(batch)
        if key is None:
            return self._inner.step(batch)
        captured, num_requests = self._round(key), batch.num_requests
        captured.slots.fill(batch.slots)
        captured.draft_slots.fill(batch.draft_slots)
        captured.graph.replay()
        return _first(captured.output, num_requests)

    def _key(self, batch: StepBatch) -> _Key | None:
        """Which graph runs `batch`, or None if it must run eagerly."""
        if batch.chunks is not None or batch.shape != batch.next_shape:
            return None
        bucket = next((size for size in self._buckets if size >= batch.num_requests), None)
        return None if bucket is None else _Key(batch.shape, batch.next_shape, bucket, batch.needs.captured)


def _first(out: StepTensors, count: int) -> StepTensors:
    """What the first `count` requests emitted."""
    logprobs = out.logprobs
    if logprobs is not None:
        logprobs = Logprobs(logprobs.chosen[:count], logprobs.top_ids[:count], logprobs.top[:count])
    return StepTensors(out.tokens[:count], out.counts[:count], out.finish[:count], out.accepted[:count], logprobs)
