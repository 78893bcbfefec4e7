"""CUDA graphs of an engine that has just started, simulated: keys, queue and first graphs are the real ones; a step
that has no graph yet is padded to the one that stands in for it, and a capture takes its time."""

import math

from aerie.workers.config import GraphCapture, RoundShapes
from aerie.workers.runner.costs.cost_points import ProbeExtent, measured_steps
from aerie.workers.runner.graphs.capture_queue import CaptureCost, CaptureQueue
from aerie.workers.runner.graphs.graph_keys import RANDOM, GraphKey, GraphKeys, bucket_sizes, token_buckets
from aerie.workers.scheduling.plan import GraphCount

CAPTURE_MS = 30.0  # of an 8B model on an H200


class SimulatedGraphs:
    """shapes: of rounds of up to max_running requests. max_step_tokens: prompt tokens of a step. warm: all graphs are
    there."""

    def __init__(self, shapes: RoundShapes, max_running: int, max_step_tokens: int, warm: bool = False) -> None:
        tokens = token_buckets(max_step_tokens)
        self._shapes = shapes
        self._keys = GraphKeys(shapes, bucket_sizes(max_running), tokens)
        extent = ProbeExtent(shapes, max_running, max_step_tokens, tokens, 8192, 1 << 17, growth=2, page_size=16)
        first, allowance = self._keys.first(measured_steps(extent)), GraphCapture(limit_s=math.inf if warm else 0.0)
        self._queue = CaptureQueue(self._keys.wanted(), first, allowance)
        self._captured: list[GraphKey] = []
        while key := self._queue.next_at_start():
            self._took(key)

    @property
    def count(self) -> GraphCount:
        return GraphCount(len(self._captured), self._queue.num_waiting, self._queue.missed_rows, CAPTURE_MS)

    def capture(self) -> None:
        """What is next."""
        key = self._queue.next()
        assert key is not None
        self._took(key)

    def padded(self, shape: int, num_requests: int, num_tokens: int) -> tuple[int, int] | None:
        """Requests and prompt tokens that such a step is padded to; None: it runs eagerly."""
        if num_tokens:
            shape = shape if num_requests else self._shapes.default
            key = self._keys.chunk_key(shape, num_requests, num_tokens, RANDOM)
        else:
            key = self._keys.round_key(shape, num_requests, RANDOM)
        if key is None:
            return None
        used = self._keys.fallback(key, self._captured)
        self._queue.record_miss(key, self._keys.padding_rows(key, used))
        return None if used is None else (used.bucket, used.tokens)

    def _took(self, key: GraphKey) -> None:
        self._queue.remove_captured(key, CaptureCost(CAPTURE_MS / 1000, 0))
        self._captured.append(key)
