"""A strategy's steps as CUDA graphs: one graph per (shapes, batch bucket, prompt tokens, kind of sampling)
(`workers.runner.graphs.graph_keys`).

`GraphedDecoding` wraps any `DecodingStrategy`, which it knows nothing about: what a step reads and writes lives in
device tensors by slot, so a captured round needs two inputs, the slots and those that draft, and its outputs are
tensors it always writes to the same place. All graphs are captured at start. Steps that have none run eagerly: those
with more prompt tokens or chunks than any graph has room for, chunks beside requests with penalties or
log-probabilities, chunks whose own log-probabilities are wanted, and kinds that the allowance for captures
(`workers.config.GraphCapture`) did not reach. No request ever waits for a capture, which would hold up all others on
every rank.

A step of requests with grammars is two graphs, cut where the target's pass ends: the masks of its rows come from the
host while that pass runs. What the first graph leaves for the second lies in memory of the graph, or if it is large in
memory that all such graphs share, since otherwise it would be kept for each.

Capturing changes no request's state: it runs rounds of the padding slot, which has finished, so commits keep its row
and count nothing, its KV goes to the dummy page, and nobody verifies the tree that is drafted for it.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.config import GraphCapture, RoundShapes
from workers.distributed.tp_group import TPGroup
from workers.runner.batch import StepBatch, StepTensors
from workers.runner.decoding import CuttableStrategy, FillMasks
from workers.runner.graphs.graph_inputs import StepInput
from workers.runner.graphs.graph_keys import GraphKey, GraphKeys, is_always_captured
from workers.runner.graphs.recorder import Recorder
from workers.sampling.sampler import Logprobs
from workers.slots.slot_table import SlotTable

_SHARED_BYTES = 1 << 18  # of a tensor between two graphs, from which on a copy costs less than keeping it for each
_EAGER_RUNS = 1  # before capture: it compiles kernels, chooses algorithms and makes workspaces


@dataclass
class _Captured:
    """A captured step.

    begin: replays it up to where masks join; None where none do.
    run: replays it, or the rest.
    output: what it emitted, at the same place after every replay.
    """

    begin: Callable[[], None] | None
    run: Callable[[], None]
    input: StepInput
    output: StepTensors


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
        self._shared: dict[str, Tensor] = {}
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

    def capture(
        self, allowance: GraphCapture, group: TPGroup, clock: Callable[[], float] = time.perf_counter
    ) -> CaptureReport:
        """Capture greedy and random rounds, and as far as the allowance goes steps with prompt chunks and the rarer
        kinds of rounds. The same on every rank of `group`: steps run collectives, so that no rank may capture one which
        another leaves out."""
        wanted, rounds = self._keys.wanted(), dict[GraphKey, Taken]()
        for key in wanted:
            spent = Taken.together(taken for key, taken in rounds.items() if not is_always_captured(key))
            if not is_always_captured(key) and _is_used_up(allowance, spent, group, self._slots.device):
                break
            since_s, since_bytes = clock(), self._recorder.used_bytes()
            self._captured[key] = self._capture(key)
            num_bytes = self._recorder.used_bytes() - since_bytes
            rounds[key] = Taken(clock() - since_s, num_bytes)
        self.report = CaptureReport(rounds, len(wanted) - len(rounds))
        return self.report

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
            return _Captured(None, run, given, output)
        self._recorder.run_apart(lambda: self._share(self._inner.forward(batch())))  # a capture must not allocate it
        begin, passed = self._recorder.record(lambda: self._share(self._inner.forward(batch())))
        run, output = self._recorder.record(lambda: self._inner.choose(batch(), passed))
        return _Captured(begin, run, given, output)

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
        captured = self._captured.get(key) if key is not None else None
        if key is None or captured is None:
            return self._inner.step(batch, fill_masks)
        captured.input.fill(batch)
        if captured.begin is not None:
            captured.begin()
            if fill_masks is not None:
                fill_masks()
        captured.run()
        num_finals = batch.chunks.num_finals if batch.chunks is not None else 0
        return _entries(captured.output, batch.num_requests, key.bucket, num_finals)


def _is_used_up(allowance: GraphCapture, spent: Taken, group: TPGroup, device: torch.device) -> bool:
    """Whether any rank has spent the allowance; the same answer on all."""
    mine = torch.tensor((spent.seconds, float(spent.num_bytes)), dtype=torch.float64, device=device)
    seconds, num_bytes = group.all_gather(mine).amax(0).tolist()
    return bool(seconds >= allowance.limit_s or num_bytes >= allowance.limit_gb * 1e9)


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
