"""How one step becomes graphs: a batch of padding of its size, run and recorded. Used by
`workers.runner.graphs.cuda_graph`.

A step of requests with grammars is two graphs, cut where the target's pass ends: the masks of its rows come from the
host while that pass runs. What the first graph leaves for the second lies in memory of the graph, or if it is large in
memory that all such graphs share, since otherwise it would be kept for each.

Capturing changes no request's state: it runs rounds of the padding slot, which has finished, so commits keep its row
and count nothing, its KV goes to the dummy page, and nobody verifies the tree that is drafted for it.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from attention.backend import NewUnderCaptureError
from workers.distributed.tp_group import TPGroup
from workers.runner.batch import StepBatch, StepTensors
from workers.runner.decoding import CuttableStrategy
from workers.runner.graphs.graph_inputs import StepInput
from workers.runner.graphs.graph_keys import GraphKey
from workers.runner.graphs.kernel_compilation import CompileAhead
from workers.runner.graphs.recorder import Recorder
from workers.slots.slot_table import SlotTable

logger = logging.getLogger(__name__)

_SHARED_BYTES = 1 << 18  # of a tensor between two graphs, from which on a copy costs less than keeping it for each


class BrokenStepError(RuntimeError):
    """This rank failed within a step that the other ranks run: they wait in its next sum, so nothing can be agreed with
    them, and the rank must end for all to be restarted."""


class CaptureError(RuntimeError):
    """Another rank could not capture what this one could."""


class Outcome(IntEnum):
    """How far a rank's attempt to capture came; of several ranks the greatest counts."""

    CAPTURED = 0
    MISSING = 1  # something that an eager run of the step makes
    FAILED = 2  # memory has ended, or a kernel cannot be compiled: a run would fail too


@dataclass
class CapturedStep:
    """bucket: requests of its rounds.
    begin: replays it up to where masks join; None where none do.
    run: replays it, or the rest.
    output: what it emitted, at the same place after every replay.
    """

    bucket: int
    begin: Callable[[], None] | None
    run: Callable[[], None]
    input: StepInput
    output: StepTensors


class StepCapture:
    """Captures steps of one strategy. max_kv_len: longest length that a request can have."""

    def __init__(self, inner: CuttableStrategy, slots: SlotTable, max_kv_len: int, recorder: Recorder) -> None:
        self._inner = inner
        self._slots = slots
        self._max_kv_len = max_kv_len
        self._recorder = recorder
        self._kinds_run: set[GraphKey] = set()
        self._shared: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []  # what graphs write to that were captured before a larger one

    def rehearse(self, key: GraphKey, ahead: CompileAhead) -> None:
        """Let `ahead` compile what the step launches; nothing runs."""
        given, batch = self._padding(key)
        self._recorder.rehearse(lambda: self._inner.step(batch()), ahead)

    def capture(self, key: GraphKey, group: TPGroup) -> CapturedStep:
        """An eager run of each kind of step, on all ranks, makes what libraries make when they are first called; after
        that captures are tried straight away, and where one misses something the step runs eagerly too.

        Raises BrokenStepError where an eager run fails on this rank beside others; any other error is raised where this
        rank waits for no sum, so that the ranks can agree on it."""
        given, batch = self._padding(key)

        def step() -> StepTensors:
            return self._inner.step(batch())

        if key.needs.masked:
            return self._capture_halves(key, given, batch, group)
        if _kind(key) in self._kinds_run:
            recorded = self._try(step)
            worst = _worst_of_ranks(_outcome(recorded), group, self._slots.device)
            if worst is Outcome.FAILED:
                raise recorded if isinstance(recorded, Exception) else CaptureError("another rank failed")
            if worst is Outcome.CAPTURED:
                assert not isinstance(recorded, Exception)
                return CapturedStep(key.bucket, None, recorded[0], given, recorded[1])
        self._run(step, group)
        self._kinds_run.add(_kind(key))
        run, output = self._recorder.record(step)
        return CapturedStep(key.bucket, None, run, given, output)

    def _padding(self, key: GraphKey) -> tuple[StepInput, Callable[[], StepBatch]]:
        """The inputs of a step, and a batch of them that runs all that the batches of `key` may need, new for every
        run."""
        given = StepInput(key.bucket, key.tokens, key.seen or None, self._slots)
        return given, lambda: given.batch(key.shape, key.next_shape, self._max_kv_len, key.needs)

    def _run(self, step: Callable[[], object], group: TPGroup) -> None:
        """Run a step eagerly, on all ranks at once."""
        try:
            self._recorder.run_apart(step)
        except Exception as error:
            if group.size == 1:
                raise
            raise BrokenStepError(f"a step to be captured failed: {type(error).__name__}: {error}") from error

    def _try(self, step: Callable[[], StepTensors]) -> tuple[Callable[[], None], StepTensors] | Exception:
        """A recording, or why there is none: as a rule something that is not there yet."""
        try:
            return self._recorder.record(step, was_run=False)
        except Exception as error:  # Triton's are no RuntimeErrors
            if not isinstance(error, NewUnderCaptureError | torch.OutOfMemoryError):
                logger.warning("a step could not be captured before it had run: %s", error)
            return error

    def _capture_halves(
        self, key: GraphKey, given: StepInput, batch: Callable[[], StepBatch], group: TPGroup
    ) -> CapturedStep:
        """Two graphs. Always after an eager run, for what both leave and share must not be allocated by a capture."""
        self._run(lambda: self._inner.step(batch()), group)
        self._run(lambda: self._share(self._inner.forward(batch())), group)
        begin, passed = self._recorder.record(lambda: self._share(self._inner.forward(batch())))
        run, output = self._recorder.record(lambda: self._inner.choose(batch(), passed))
        return CapturedStep(key.bucket, begin, run, given, output)

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


def _outcome(recorded: object) -> Outcome:
    if not isinstance(recorded, Exception):
        return Outcome.CAPTURED
    is_missing = isinstance(recorded, RuntimeError) and not isinstance(recorded, torch.OutOfMemoryError)
    return Outcome.MISSING if is_missing else Outcome.FAILED


def _worst_of_ranks(mine: Outcome, group: TPGroup, device: torch.device) -> Outcome:
    """The same answer on every rank of `group`; waits for the device."""
    return Outcome(int(group.all_gather(torch.tensor([mine], dtype=torch.int32, device=device)).max()))


def on_any_rank(flag: bool, group: TPGroup, device: torch.device) -> bool:
    """The same answer on every rank of `group`; waits for the device."""
    return bool(group.all_gather(torch.tensor([flag], dtype=torch.int32, device=device)).any())


def _kind(key: GraphKey) -> GraphKey:
    """The same for all keys that differ in sizes only."""
    return dataclasses.replace(key, bucket=min(key.bucket, 1), tokens=min(key.tokens, 1), seen=min(key.seen, 1))
