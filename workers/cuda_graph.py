"""A strategy's rounds as CUDA graphs: one graph per (round shape, batch bucket, whether any request is random).

`GraphedDecoding` wraps any `DecodingStrategy`, which it knows nothing about: what a step reads and writes lives in
device tensors by slot, so a captured round needs one input, the slots, and its outputs are tensors it always writes to
the same place. Steps that carry prompt chunks, or need whole logits (filters, penalties, log-probabilities), run
eagerly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.config import RoundShape
from workers.decoding import DecodingStrategy, StepBatch, StepTensors
from workers.sampler import SamplingNeeds
from workers.slots import SlotTable

_EAGER_RUNS = 2  # before capture: they compile kernels, choose algorithms and make workspaces


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    slots: Tensor
    output: StepTensors


def bucket_sizes(max_running: int) -> tuple[int, ...]:
    """Batch sizes that are captured: 1, 2, 4, 8, then multiples of 8 to 64, of 16 to 256, of 32 beyond; the largest is
    at least max_running."""
    sizes, size = [1, 2, 4], 8
    while size < max_running:
        sizes.append(size)
        size += 8 if size < 64 else 16 if size < 256 else 32
    return tuple([s for s in sizes if s < max_running] + [max_running])


class GraphedDecoding:
    """Runs `inner`'s pure rounds as graphs. max_kv_len: longest length that a request can have, tail included."""

    def __init__(
        self, inner: DecodingStrategy, slots: SlotTable, buckets: Sequence[int], max_kv_len: int
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._buckets = tuple(sorted(buckets))
        self._max_kv_len = max_kv_len
        self._captured: dict[tuple[int, int, bool], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def shapes(self) -> Sequence[RoundShape]:
        return self._inner.shapes

    def capture(self, random: bool) -> None:
        """Capture every bucket of every shape, largest first so that smaller ones reuse its memory."""
        for bucket in reversed(self._buckets):
            for shape in range(len(self.shapes)):
                self._captured[shape, bucket, random] = self._capture(shape, bucket, random)

    def _capture(self, shape: int, bucket: int, random: bool) -> _Captured:
        slots = torch.full((bucket,), self._slots.padding_slot, dtype=torch.int64, device=self._slots.device)
        needs = SamplingNeeds(random=random, full_logits=False, shaping=False, num_logprobs=-1)
        batch = StepBatch(slots, (), shape, self._max_kv_len, None, needs, speculates=shape > 0)
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
        return _Captured(graph, slots, output)

    def step(self, batch: StepBatch) -> StepTensors:
        captured = self._find(batch)
        if captured is None:
            return self._inner.step(batch)
        num_requests, out = batch.num_requests, captured.output
        captured.slots[:num_requests] = batch.slots
        captured.slots[num_requests:] = self._slots.padding_slot
        captured.graph.replay()
        return StepTensors(
            out.tokens[:num_requests], out.counts[:num_requests], out.finish[:num_requests],
            out.accepted[:num_requests], None,
        )

    def _find(self, batch: StepBatch) -> _Captured | None:
        """The graph that runs `batch`, or None if it must run eagerly."""
        if batch.chunks is not None or batch.needs.full_logits:
            return None
        if batch.speculates != (batch.shape > 0) and len(self.shapes) > 1:
            return None
        bucket = next((size for size in self._buckets if size >= batch.num_requests), None)
        if bucket is None:
            return None
        exact = self._captured.get((batch.shape, bucket, batch.needs.random))
        return exact or self._captured.get((batch.shape, bucket, True))
