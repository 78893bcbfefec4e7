"""A strategy's steps as CUDA graphs: one graph per (shapes, batch bucket, prompt tokens, kind of sampling)
(`workers.runner.graphs.graph_keys`).

`GraphedDecoding` wraps any `DecodingStrategy`, which it knows nothing about: what a step reads and writes lives in
device tensors by slot, so a captured round needs two inputs, the slots and those that draft, and its outputs are
tensors it always writes to the same place. A few graphs are captured at start, the others when a plan says so: while
nobody is there and, under load, once they have been missed enough (`workers.scheduling.capture_pacing`). Steps whose
graph is not there yet are padded to a larger one. Steps that have none at all run eagerly: those with more prompt
tokens or chunks than any graph has room for, chunks beside requests with penalties or log-probabilities, chunks whose
own log-probabilities are wanted, and kinds for which the allowance for captures (`workers.config.GraphCapture`) has no
memory.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.config import GraphCapture, RoundShapes
from workers.distributed.tp_group import TPGroup
from workers.runner.batch import StepBatch, StepTensors
from workers.runner.decoding import CuttableStrategy, FillMasks
from workers.runner.graphs.capture_queue import CaptureQueue, Taken
from workers.runner.graphs.graph_keys import GraphKey, GraphKeys, is_always_captured
from workers.runner.graphs.kernel_compilation import CompileAhead
from workers.runner.graphs.recorder import Recorder
from workers.runner.graphs.step_capture import BrokenStepError, CapturedStep, StepCapture, on_any_rank
from workers.sampling.sampler import Logprobs
from workers.scheduling.plan import GraphCount
from workers.slots.slot_table import SlotTable

logger = logging.getLogger(__name__)

_FAILED = (
    "a step could not be captured while serving, and runs without a CUDA graph of its own (%s): %s; further ones are "
    "not logged"
)
_LEFT_OUT = (
    "graph_capture.limit_gb is used up, so that %d kinds of steps (with prompt chunks, filters, penalties or "
    "log-probabilities) have no CUDA graph of their own; raise it, or lower scheduler.max_running"
)


@dataclass(frozen=True)
class CaptureReport:
    """What a start has captured.

    rounds: what each captured round took, in their order.
    num_left_out: how many more were wanted, and do not fit or come later.
    """

    rounds: Mapping[GraphKey, Taken]
    num_left_out: int

    @property
    def whole(self) -> Taken:
        return Taken.together(self.rounds.values())


class GraphedDecoding:
    """Runs `inner`'s steps as graphs.

    buckets: numbers of requests in a round.
    tokens: numbers of prompt tokens in a step; empty if steps with prompt chunks are not captured.
    expands: of `GraphKeys`.
    max_kv_len: longest length that a request can have, with what its rounds in flight may write.
    report: of its captures.
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
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._keys = GraphKeys(inner.shapes, buckets, tokens, expands)
        self._recorder = recorder
        self._step_capture = StepCapture(inner, slots, max_kv_len, recorder)
        self._captured: dict[GraphKey, CapturedStep] = {}
        self._stand_ins: dict[GraphKey, GraphKey | None] = {}  # what runs a step that has no graph; None: eagerly
        self._queue = CaptureQueue((), (), GraphCapture())
        self._capture_s = 0.0  # of all captures
        self._warned: set[str] = set()
        self.report = CaptureReport({}, 0)

    @property
    def shapes(self) -> RoundShapes:
        return self._inner.shapes

    @property
    def captured(self) -> frozenset[GraphKey]:
        """The steps that have graphs."""
        return frozenset(self._captured)

    @property
    def num_always_captured(self) -> int:
        """Graphs that are captured whatever they take."""
        return sum(is_always_captured(key) for key in self._keys.wanted())

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Numbers of prompt tokens that captured steps are padded to, ascending."""
        return tuple(sorted({key.tokens for key in self._captured if key.tokens}))

    @property
    def wanted_token_buckets(self) -> tuple[int, ...]:
        """The same once all are captured."""
        return self._keys.tokens

    @property
    def graphs(self) -> GraphCount:
        """How many there are, how many are still to come, and what speaks for the next of those."""
        num_captured, queue = len(self._captured), self._queue
        capture_ms = 1000 * self._capture_s / max(1, num_captured)
        return GraphCount(num_captured, queue.num_waiting, queue.missed_rows, capture_ms)

    def first_graphs(self, measured: Iterable[tuple[int, int, int, int]]) -> frozenset[GraphKey]:
        """What a start waits for: see `GraphKeys.first`."""
        return self._keys.first(measured)

    @torch.inference_mode()
    def rehearse(self, keys: Collection[GraphKey], ahead: CompileAhead, group: TPGroup) -> None:
        """Let `ahead` compile what the steps of `keys` launch: a step of each kind, and unless all of their kernels are
        in the disk cache on all ranks of `group`, all others; and what those of grammars launch. Nothing runs, on no
        rank."""
        ordered = [key for key in self._keys.wanted() if key in keys]
        largest = {(key.tokens > 0, key.seen > 0): key for key in reversed(ordered)}.values()
        for key in largest:
            self._step_capture.rehearse(key, ahead)
        if on_any_rank(ahead.num_missing > 0, group, self._slots.device):
            for key in (key for key in ordered if key not in largest):
                ahead.take_done()  # what is there is not asked for again
                self._step_capture.rehearse(key, ahead)
        for key in self._keys.first_masked():
            self._step_capture.rehearse(key, ahead)
        ahead.finish()

    def capture(
        self,
        allowance: GraphCapture,
        group: TPGroup,
        first: Collection[GraphKey] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> CaptureReport:
        """Capture what a start waits for: `first`, or if that is None all greedy and random rounds, and as far as
        `allowance.limit_s` goes the others. The same on every rank of `group`. The rest is left to `capture_next`.
        advance: hears how many are captured, and how many a start waits for at least."""
        wanted, rounds = self._keys.wanted(), dict[GraphKey, Taken]()
        self._queue = CaptureQueue(wanted, first, allowance)
        while (key := self._queue.next_at_start()) is not None:
            rounds[key] = taken = self._measured(key, group, clock)
            self._queue.took(key, _most(taken, group, self._slots.device))
            advance(len(rounds), max(len(rounds), len(wanted if first is None else first)))
        self.report = CaptureReport(rounds, len(wanted) - len(rounds))
        self._warn_of_left_out(group)
        return self.report

    def capture_next(self, group: TPGroup, clock: Callable[[], float] = time.perf_counter) -> None:
        """Capture one of the steps that are waiting, if any is; to be called on every rank of `group` while none of its
        steps runs. One that fails on any of them is given up: its batches run without it, as they did before. Raises
        BrokenStepError where this rank cannot agree with the others any more."""
        key = self._queue.next()
        if key is None:
            return
        taken, error = Taken(0.0, 0), None
        try:
            taken = self._measured(key, group, clock)
        except BrokenStepError:
            raise
        except Exception as failure:  # of memory, of the capture, of Triton's compiler: the engine serves without it
            error = failure
        if on_any_rank(error is not None, group, self._slots.device):
            self._captured.pop(key, None)
            self._queue.failed(key)
            self._warn_once(group, _FAILED, key, error or "another rank failed")
        else:
            self._queue.took(key, _most(taken, group, self._slots.device))
        self._stand_ins.clear()
        self._warn_of_left_out(group)

    def want_masked(self) -> None:
        """A request with a grammar has come: its steps are to be captured too. The same on every rank."""
        self._queue.add_masked()

    def _measured(self, key: GraphKey, group: TPGroup, clock: Callable[[], float]) -> Taken:
        """Capture `key`; what that took on this rank."""
        since_s, since_bytes = clock(), self._recorder.used_bytes()
        self._captured[key] = self._step_capture.capture(key, group)
        taken = Taken(clock() - since_s, self._recorder.used_bytes() - since_bytes)
        self._capture_s += taken.seconds
        return taken

    def step(self, batch: StepBatch, fill_masks: FillMasks | None = None) -> StepTensors:
        key = self._keys.of(batch)
        captured = self._of_key(key) if key is not None else None
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

    def _of_key(self, key: GraphKey) -> CapturedStep | None:
        """The graph of `key`, or the one that stands in for it, which is looked for among all once between two
        captures; None if there is neither."""
        if key in self._captured:
            return self._captured[key]
        if key not in self._stand_ins:
            self._stand_ins[key] = self._keys.stand_in(key, self._captured)
        used = self._stand_ins[key]
        self._queue.missed(key, self._keys.padding_rows(key, used))
        return None if used is None else self._captured[used]

    def _warn_once(self, group: TPGroup, message: str, *arguments: object) -> None:
        if group.rank == 0 and message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *arguments)

    def _warn_of_left_out(self, group: TPGroup) -> None:
        if self._queue.num_left_out:
            self._warn_once(group, _LEFT_OUT, self._queue.num_left_out)


def _most(mine: Taken, group: TPGroup, device: torch.device) -> Taken:
    """Of what the ranks' captures took, each the most; the same answer on all."""
    numbers = torch.tensor((mine.seconds, float(mine.num_bytes)), dtype=torch.float64, device=device)
    seconds, num_bytes = group.all_gather(numbers).amax(0).tolist()
    return Taken(seconds, int(num_bytes))


def _entries(out: StepTensors, num_requests: int, bucket: int, num_finals: int) -> StepTensors:
    """Of what a captured step emitted for rounds of `bucket` requests and then for chunks: the first `num_requests` of
    the former and the first `num_finals` of the latter."""

    def taken(x: Tensor) -> Tensor:
        if num_finals == 0:
            return x[:num_requests]
        finals = x[bucket : bucket + num_finals]
        return finals if num_requests == 0 else torch.cat((x[:num_requests], finals))

    logprobs = out.logprobs
    if logprobs is not None:
        logprobs = Logprobs(taken(logprobs.chosen), taken(logprobs.top_ids), taken(logprobs.top))
    drafts = None if out.drafts is None else taken(out.drafts)
    return StepTensors(taken(out.tokens), taken(out.counts), taken(out.finish), taken(out.accepted), logprobs, drafts)
