"""Captures a decoding strategy's steps as CUDA graphs and replays them. `GraphedDecoding` wraps a `CuttableStrategy`.

The state of requests is in device tensors, by slot. A captured round therefore has only two inputs, the slots that run
and the slots that draft. Each replay writes the same output tensors. A start captures some graphs; commands request the
others (`aerie.workers.scheduling.commands.command_queue`). A step whose graph is not captured yet is padded to a
larger graph. A step runs eagerly if there is no larger graph, and in these cases:

- more prompt tokens or chunks than any graph has;
- mixed batches with penalties or log-probabilities;
- chunks with log-probabilities of the prompt, or with inputs beside tokens (embeddings; images in models without
  M-RoPE);
- rounds with rotary positions of their own in a model without M-RoPE;
- drafts of another tree shape than the graph's (`GraphKeys.of`);
- graphs that would exceed the memory limit of `aerie.workers.config.GraphCapture`.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.workers.config import GraphCapture, RoundShapes
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.runner.batch import StepBatch, StepTensors
from aerie.workers.runner.decoding import CuttableStrategy, FillMasks
from aerie.workers.runner.graphs.capture_queue import CaptureCost, CaptureQueue
from aerie.workers.runner.graphs.graph_keys import GraphKey, GraphKeys, is_always_captured
from aerie.workers.runner.graphs.kernel_compilation import CompileAhead
from aerie.workers.runner.graphs.step_capture import BrokenStepError, CapturedStep, Recorder, StepCapture, on_any_rank
from aerie.workers.sampling import Logprobs
from aerie.workers.scheduling.plan import GraphCount
from aerie.workers.slots import SlotTable

logger = logging.getLogger(__name__)

_FAILED = (
    "could not capture a step while serving, which therefore runs without a CUDA graph of its own (%s): %s; further "
    "failures are not logged"
)
_LEFT_OUT = (
    "graph_capture.limit_gb is used up: %d kinds of steps (with prompt chunks, filters, penalties or "
    "log-probabilities) have no CUDA graph of their own; raise it, or lower scheduler.max_running"
)


@dataclass(frozen=True)
class CaptureReport:
    """The captures of a start.

    rounds: cost of each captured graph, in the order of capture.
    num_left_out: graphs that were not captured, because they come later or exceed the memory limit.
    """

    rounds: Mapping[GraphKey, CaptureCost]
    num_left_out: int

    @property
    def total(self) -> CaptureCost:
        return CaptureCost.total(self.rounds.values())


class GraphedDecoding:
    """Runs the steps of `inner` as CUDA graphs.

    buckets, tokens, expands: as in `GraphKeys`.
    max_kv_len: maximum KV length of a request, including the writes of its rounds in flight.
    has_states, has_row_index, image_values: as in `aerie.workers.runner.graphs.graph_inputs.ChunkInput`.
    report: the captures of the start.
    """

    def __init__(
        self,
        inner: CuttableStrategy,
        slots: SlotTable,
        buckets: Sequence[int],
        max_kv_len: int,
        recorder: Recorder,
        tokens: Sequence[int] = (),
        expands: bool = False,
        has_states: bool = False,
        has_row_index: bool = False,
        image_values: Tensor | None = None,
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._keys = GraphKeys(inner.shapes, buckets, tokens, expands, has_row_index)
        self._recorder = recorder
        self._step_capture = StepCapture(inner, slots, max_kv_len, recorder, has_states, has_row_index, image_values)
        self._has_inputs = image_values is not None
        self._captured: dict[GraphKey, CapturedStep] = {}
        self._fallbacks: dict[GraphKey, GraphKey | None] = {}  # graph to use for a missing one; None: run eagerly
        self._queue = CaptureQueue((), (), GraphCapture())
        self._capture_s = 0.0  # duration of all captures together
        self._warned: set[str] = set()
        self.report = CaptureReport({}, 0)

    @property
    def shapes(self) -> RoundShapes:
        return self._inner.shapes

    @property
    def captured(self) -> frozenset[GraphKey]:
        """The graphs captured so far."""
        return frozenset(self._captured)

    @property
    def num_always_captured(self) -> int:
        """Number of graphs exempt from the memory limit."""
        return sum(is_always_captured(key) for key in self._keys.wanted())

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Numbers of prompt tokens to which steps are padded now, ascending."""
        return tuple(sorted({key.tokens for key in self._captured if key.tokens}))

    @property
    def wanted_token_buckets(self) -> tuple[int, ...]:
        """The value of `token_buckets` when all graphs are captured."""
        return self._keys.tokens

    @property
    def graphs(self) -> GraphCount:
        """Counts by which the scheduler decides on the next capture."""
        num_captured, queue = len(self._captured), self._queue
        capture_ms = 1000 * self._capture_s / max(1, num_captured)
        return GraphCount(num_captured, queue.num_waiting, queue.missed_rows, capture_ms)

    def first_graphs(self, measured: Iterable[tuple[int, int, int, int]]) -> frozenset[GraphKey]:
        """Return the keys of the graphs that a start waits for (`GraphKeys.first`)."""
        return self._keys.first(measured)

    @torch.inference_mode()
    def dry_run(self, keys: Collection[GraphKey], ahead: CompileAhead, group: TPGroup) -> None:
        """Let `ahead` compile and load the kernels of these graphs, without running anything on the device.

        Records the largest step of each kind. If a kernel is missing in the disk cache of any rank, also records all
        other steps of `keys`, so that all kernels are compiled in parallel. Records steps with grammars last.
        """
        ordered = [key for key in self._keys.wanted() if key in keys]
        largest = {(key.tokens > 0, key.seen > 0, key.adapted): key for key in reversed(ordered)}.values()
        for key in largest:
            self._step_capture.dry_run(key, ahead)
        if on_any_rank(ahead.num_missing > 0, group, self._slots.device):
            for key in (key for key in ordered if key not in largest):
                ahead.load_compiled()  # otherwise later steps would count these kernels again
                self._step_capture.dry_run(key, ahead)
        for key in self._keys.first_masked():
            self._step_capture.dry_run(key, ahead)
        ahead.finish()

    def capture(
        self,
        allowance: GraphCapture,
        group: TPGroup,
        first: Collection[GraphKey] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> CaptureReport:
        """Capture the graphs of a start, the same on every rank. `capture_next` captures the rest.

        allowance: limits of time and memory.
        first: graphs to capture regardless of the time limit; None: all greedy and random rounds.
        advance: called after each capture with the number of captured graphs and the number expected so far.
        """
        wanted, rounds = self._keys.wanted(), dict[GraphKey, CaptureCost]()
        self._queue = CaptureQueue(wanted, first, allowance)
        while (key := self._queue.next_at_start()) is not None:
            rounds[key] = cost = self._capture_one(key, group, clock)
            self._queue.remove_captured(key, _max_over_ranks(cost, group, self._slots.device))
            advance(len(rounds), max(len(rounds), len(wanted if first is None else first)))
        self.report = CaptureReport(rounds, len(wanted) - len(rounds))
        self._warn_of_left_out(group)
        return self.report

    def capture_next(self, group: TPGroup, clock: Callable[[], float] = time.perf_counter) -> None:
        """Capture the next waiting graph, if any. Must be called on all ranks, while no step runs.

        A graph that fails on any rank is dropped on all ranks, and its batches run as before. Raises BrokenStepError if
        this rank failed within a collective step.
        """
        key = self._queue.next()
        if key is None:
            return
        cost, error = CaptureCost(0.0, 0), None
        try:
            cost = self._capture_one(key, group, clock)
        except BrokenStepError:
            raise
        except Exception as failure:  # out of memory, or from the capture or Triton; the engine serves without it
            error = failure
        if on_any_rank(error is not None, group, self._slots.device):
            self._captured.pop(key, None)
            self._queue.remove_failed(key)
            self._warn_once(group, _FAILED, key, error or "another rank failed")
        else:
            self._queue.remove_captured(key, _max_over_ranks(cost, group, self._slots.device))
        self._fallbacks.clear()
        self._warn_of_left_out(group)

    def want_masked(self) -> None:
        """Queue the graphs for grammars. Must be called on every rank in the same step."""
        self._queue.add_masked()

    def _capture_one(self, key: GraphKey, group: TPGroup, clock: Callable[[], float]) -> CaptureCost:
        """Capture `key`. Return the cost on this rank."""
        since_s, since_bytes = clock(), self._recorder.used_bytes()
        self._captured[key] = self._step_capture.capture(key, group)
        cost = CaptureCost(clock() - since_s, self._recorder.used_bytes() - since_bytes)
        self._capture_s += cost.seconds
        return cost

    def step(self, batch: StepBatch, fill_masks: FillMasks | None = None) -> StepTensors:
        has_inputs = batch.chunks is not None and batch.chunks.batch.inputs is not None
        key = self._keys.of(batch) if self._has_inputs or not has_inputs else None
        captured = self._graph_for(key) if key is not None else None
        if captured is None:
            return self._inner.step(batch, fill_masks)
        captured.input.fill(batch)
        if captured.begin is not None:
            captured.begin()
            if fill_masks is not None:
                fill_masks()
        captured.run()
        num_finals = batch.chunks.num_finals if batch.chunks is not None else 0
        return _entries(captured.output, batch.num_requests, captured.bucket, num_finals)

    def _graph_for(self, key: GraphKey) -> CapturedStep | None:
        """Return the graph of `key`, or else the smallest one that can run its batches; None without one. Counts the
        padding. The search is cached until the next capture."""
        if key in self._captured:
            return self._captured[key]
        if key not in self._fallbacks:
            self._fallbacks[key] = self._keys.fallback(key, self._captured)
        used = self._fallbacks[key]
        self._queue.record_miss(key, self._keys.padding_rows(key, used))
        return None if used is None else self._captured[used]

    def _warn_once(self, group: TPGroup, message: str, *arguments: object) -> None:
        if group.rank == 0 and message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *arguments)

    def _warn_of_left_out(self, group: TPGroup) -> None:
        if self._queue.num_left_out:
            self._warn_once(group, _LEFT_OUT, self._queue.num_left_out)


def _max_over_ranks(mine: CaptureCost, group: TPGroup, device: torch.device) -> CaptureCost:
    """Return the maximum seconds and bytes over the ranks, on every rank."""
    numbers = torch.tensor((mine.seconds, float(mine.num_bytes)), dtype=torch.float64, device=device)
    seconds, num_bytes = group.all_gather(numbers).amax(0).tolist()
    return CaptureCost(seconds, int(num_bytes))


def _entries(out: StepTensors, num_requests: int, bucket: int, num_finals: int) -> StepTensors:
    """Remove the padding from a captured step's output: keep the first `num_requests` of the `bucket` rounds, and the
    first `num_finals` of the chunks after them."""

    def valid(x: Tensor) -> Tensor:
        if num_finals == 0:
            return x[:num_requests]
        finals = x[bucket : bucket + num_finals]
        return finals if num_requests == 0 else torch.cat((x[:num_requests], finals))

    logprobs = out.logprobs
    if logprobs is not None:
        logprobs = Logprobs(valid(logprobs.chosen), valid(logprobs.top_ids), valid(logprobs.top))
    drafts = None if out.drafts is None else valid(out.drafts)
    matches = None if out.matches is None else valid(out.matches)
    entropies = None if out.min_entropies is None else valid(out.min_entropies)
    tokens, counts, finish, accepted = map(valid, (out.tokens, out.counts, out.finish, out.accepted))
    return StepTensors(
        tokens,
        counts,
        finish=finish,
        accepted=accepted,
        logprobs=logprobs,
        drafts=drafts,
        matches=matches,
        min_entropies=entropies,
    )
