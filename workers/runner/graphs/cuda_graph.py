"""A strategy's steps as CUDA graphs: one graph per (shapes, batch bucket, prompt tokens, kind of sampling)
(`workers.runner.graphs.graph_keys`).

`GraphedDecoding` wraps any `DecodingStrategy`, which it knows nothing about: what a step reads and writes lives in
device tensors by slot, so a captured round needs two inputs, the slots and those that draft, and its outputs are
tensors it always writes to the same place. A few graphs are captured at start, the others when a plan says so: while
nobody is there and, under load, now and then (`workers.scheduling.capture_pacing`). Steps whose graph is not there yet
are padded to a larger one. Steps that have none at all run eagerly: those with more prompt tokens or chunks than any
graph has room for, chunks beside requests with penalties or log-probabilities, and kinds for which the allowance for
captures (`workers.config.GraphCapture`) has no memory.

A step of requests with grammars is two graphs, cut where the target's pass ends: the masks of its rows come from the
host while that pass runs. What the first graph leaves for the second lies in memory of the graph, or if it is large in
memory that all such graphs share, since otherwise it would be kept for each.

Capturing changes no request's state: it runs rounds of the padding slot, which has finished, so commits keep its row
and count nothing, its KV goes to the dummy page, and nobody verifies the tree that is drafted for it.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.config import FEW_REQUESTS, GraphCapture, RoundShapes
from workers.distributed.tp_group import TPGroup
from workers.runner.batch import StepBatch, StepTensors
from workers.runner.decoding import CuttableStrategy, FillMasks
from workers.runner.graphs.capture_queue import CaptureQueue, Taken
from workers.runner.graphs.graph_inputs import StepInput
from workers.runner.graphs.graph_keys import CHUNK_NEEDS, RANDOM, GraphKey, GraphKeys, is_always_captured
from workers.runner.graphs.recorder import Recorder
from workers.sampling.sampler import Logprobs
from workers.scheduling.plan import GraphCount
from workers.slots.slot_table import SlotTable

logger = logging.getLogger(__name__)

_SHARED_BYTES = 1 << 18  # of a tensor between two graphs, from which on a copy costs less than keeping it for each
_FAILED = (
    "a step could not be captured while serving, and runs without a CUDA graph of its own (%s): %s; further ones are "
    "not logged"
)
_LEFT_OUT = (
    "graph_capture.limit_gb is used up, so that %d kinds of steps (with prompt chunks, filters, penalties or "
    "log-probabilities) have no CUDA graph of their own; raise it, or lower scheduler.max_running"
)
_EAGER_RUNS = 1  # before capture: it compiles kernels, chooses algorithms and makes workspaces


@dataclass
class _Captured:
    """A captured step.

    bucket: requests of its rounds.
    begin: replays it up to where masks join; None where none do.
    run: replays it, or the rest.
    output: what it emitted, at the same place after every replay.
    """

    bucket: int
    begin: Callable[[], None] | None
    run: Callable[[], None]
    input: StepInput
    output: StepTensors


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
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._keys = GraphKeys(inner.shapes, buckets, tokens)
        self._max_kv_len = max_kv_len
        self._recorder = recorder
        self._captured: dict[GraphKey, _Captured] = {}
        self._chosen: dict[GraphKey, _Captured | None] = {}  # what a step that wants a key runs; None: eagerly
        self._queue = CaptureQueue((), (), GraphCapture())
        self._shared: dict[str, Tensor] = {}
        self._warned: set[str] = set()
        self._outgrown: list[Tensor] = []  # what graphs write to that were captured before a larger one
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
        """How many there are, and how many are still to come."""
        return GraphCount(len(self._captured), self._queue.num_waiting)

    def first_graphs(self, measured: Iterable[tuple[int, int, int]]) -> frozenset[GraphKey]:
        """What a start waits for: the graphs of the steps that it measures, each (shape, requests that run a round,
        prompt tokens), so that their costs hold from then on; and rounds of one, a few and all requests with filters,
        which many clients send."""
        keys, most = self._keys, self._keys.buckets[-1]
        found = [
            keys.of_chunks(shape, count, tokens, CHUNK_NEEDS) if tokens else keys.of_rounds(shape, count, RANDOM)
            for shape, count, tokens in measured
        ]
        sizes = (1, min(FEW_REQUESTS, most), most)
        found += [keys.of_rounds(shape, size, CHUNK_NEEDS) for shape in self.shapes.unrestricted for size in sizes]
        return frozenset(key for key in found if key is not None)

    def capture(
        self,
        allowance: GraphCapture,
        group: TPGroup,
        first: Collection[GraphKey] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> CaptureReport:
        """Capture what a start waits for: `first`, or if that is None all greedy and random rounds, and as far as
        `allowance.limit_s` goes the others. The same on every rank of `group`. The rest is left to `capture_next`."""
        wanted, rounds = self._keys.wanted(), dict[GraphKey, Taken]()
        self._queue = CaptureQueue(wanted, first, allowance)
        while (key := self._queue.next_at_start()) is not None:
            rounds[key] = taken = self._measured(key, clock)
            self._queue.took(key, _most(taken, group, self._slots.device))
        self.report = CaptureReport(rounds, len(wanted) - len(rounds))
        self._warn_of_left_out(group)
        return self.report

    def capture_next(self, group: TPGroup, clock: Callable[[], float] = time.perf_counter) -> None:
        """Capture one of the steps that are waiting, if any is; to be called on every rank of `group` while none of its
        steps runs. One that fails on any of them is given up: its batches run without it, as they did before."""
        key = self._queue.next()
        if key is None:
            return
        taken, error = Taken(0.0, 0), None
        try:
            taken = self._measured(key, clock)
        except RuntimeError as failure:  # torch.OutOfMemoryError is one
            error = failure
        if _on_any_rank(error is not None, group, self._slots.device):
            self._captured.pop(key, None)
            self._queue.failed(key)
            self._warn_once(group, _FAILED, key, error or "another rank failed")
        else:
            self._queue.took(key, _most(taken, group, self._slots.device))
        self._chosen.clear()
        self._warn_of_left_out(group)

    def want_masked(self) -> None:
        """A request with a grammar has come: its steps are to be captured too. The same on every rank."""
        self._queue.add_masked()

    def _measured(self, key: GraphKey, clock: Callable[[], float]) -> Taken:
        """Capture `key`; what that took on this rank."""
        since_s, since_bytes = clock(), self._recorder.used_bytes()
        self._captured[key] = self._capture(key)
        num_bytes = self._recorder.used_bytes() - since_bytes
        return Taken(clock() - since_s, num_bytes)

    def _capture(self, key: GraphKey) -> _Captured:
        """Of a batch of padding that runs all that the batches of `key` may need."""
        given = StepInput(key.bucket, key.tokens, self._slots)

        def batch() -> StepBatch:
            return given.batch(key.shape, key.next_shape, self._max_kv_len, key.needs)

        def step() -> StepTensors:
            return self._inner.step(batch())

        for _ in range(_EAGER_RUNS):
            self._recorder.run_apart(step)
        if not key.needs.masked:
            run, output = self._recorder.record(step)
            return _Captured(key.bucket, None, run, given, output)
        self._recorder.run_apart(lambda: self._share(self._inner.forward(batch())))  # a capture must not allocate it
        begin, passed = self._recorder.record(lambda: self._share(self._inner.forward(batch())))
        run, output = self._recorder.record(lambda: self._inner.choose(batch(), passed))
        return _Captured(key.bucket, begin, run, given, output)

    def _share(self, passed: Any, path: str = "") -> Any:
        """What a first graph leaves, its large tensors in memory that all first graphs share: one is in use at a
        time."""
        if passed is None:
            return None
        if not isinstance(passed, Tensor):
            names = [field.name for field in dataclasses.fields(passed)]
            shared = {name: self._share(getattr(passed, name), f"{path}.{name}") for name in names}
            return dataclasses.replace(passed, **shared)
        if passed.nbytes < _SHARED_BYTES:
            return passed
        held = self._shared.get(path)
        if held is None or held.numel() < passed.numel():
            self._outgrown += [] if held is None else [held]
            held = self._shared[path] = torch.empty(passed.numel(), dtype=passed.dtype, device=passed.device)
        return held[: passed.numel()].view(passed.shape).copy_(passed)

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

    def _of_key(self, key: GraphKey) -> _Captured | None:
        """The graph of `key`, or the one that stands in for it; None if there is neither. Looked for among all once
        between two captures."""
        if key in self._captured:
            return self._captured[key]
        if key not in self._chosen:
            other = self._keys.stand_in(key, self._captured)
            self._chosen[key] = None if other is None else self._captured[other]
        return self._chosen[key]

    def _warn_once(self, group: TPGroup, message: str, *arguments: object) -> None:
        if group.rank == 0 and message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *arguments)

    def _warn_of_left_out(self, group: TPGroup) -> None:
        if self._queue.num_left_out:
            self._warn_once(group, _LEFT_OUT, self._queue.num_left_out)


def _on_any_rank(flag: bool, group: TPGroup, device: torch.device) -> bool:
    return bool(group.all_gather(torch.tensor([flag], dtype=torch.int32, device=device)).any())


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
