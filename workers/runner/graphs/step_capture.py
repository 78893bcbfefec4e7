"""Captures one step as a CUDA graph, with a batch of padding: its rounds run in the padding slot and its KV goes to the
dummy page, so requests are not affected. Used by `aerie.workers.runner.graphs.cuda_graph`; tests use recorders that
need no GPU.

A step with grammars is two graphs, split after the target's pass, because the host fills masks during that pass. Small
outputs of the first graph stay in its memory; large ones are copied to memory that all such graphs share.
"""

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from aerie.attention.backend import NewUnderCaptureError
from aerie.workers.device import no_garbage_collection
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.runner.batch import StepBatch, StepTensors
from aerie.workers.runner.commands import InconsistentRankError
from aerie.workers.runner.decoding import CuttableStrategy
from aerie.workers.runner.graphs.graph_inputs import StepInput
from aerie.workers.runner.graphs.graph_keys import GraphKey
from aerie.workers.runner.graphs.kernel_compilation import CompileAhead, no_new_kernels
from aerie.workers.slots import SlotTable

MAX_DRY_RUNS = 8  # maximum dry runs of one step; each except the last stops at a missing workspace

T = TypeVar("T")


class Recorder(Protocol):
    """Records functions as CUDA graphs. Serving uses `CudaRecorder`."""

    def record(self, function: Callable[[], T], was_run: bool = True) -> tuple[Callable[[], None], T]:
        """Record `function`. Return a function that replays it, and its result, whose tensors each replay writes.

        was_run: whether `function` has run before, so that the kernels and workspaces that it needs exist. If not, the
            first missing one raises NewUnderCaptureError.
        """

    def dry_run(self, function: Callable[[], object], ahead: CompileAhead) -> None:
        """Find the kernels that `function` launches, without running them, and let `ahead` compile the missing ones."""

    def run_on_own_stream(self, function: Callable[[], object]) -> None:
        """Run `function` eagerly on the stream of the captures, so that its allocations do not disturb them."""

    def used_bytes(self) -> int:
        """Return the memory in use on the device, by all processes."""


class CudaRecorder:
    """Records graphs that share a memory pool, on one stream.

    `torch.cuda.graph` is not used, because it frees torch's cached memory before each capture, and the next eager run
    must allocate it again. That would cost tens of milliseconds in each of more than a hundred captures.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        one = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        # creates cuBLAS's handle and workspace, which must not belong to a graph
        self.run_on_own_stream(lambda: one @ one)

    def record(self, function: Callable[[], T], was_run: bool = True) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        try:
            with contextlib.nullcontext() if was_run else no_new_kernels():
                output = self._capture(graph, function, self._pool)
        except NewUnderCaptureError:
            raise
        except Exception:
            self._pool = torch.cuda.graph_pool_handle()  # torch 2.11 treats the old pool as still recording
            raise
        return graph.replay, output

    def dry_run(self, function: Callable[[], object], ahead: CompileAhead) -> None:
        for _ in range(MAX_DRY_RUNS):
            graph = torch.cuda.CUDAGraph(keep_graph=True)  # captured but not instantiated
            try:
                with ahead.dry_run():  # the pool is freed with the graph
                    self._capture(graph, function, torch.cuda.graph_pool_handle())
                return
            except NewUnderCaptureError as missing:
                if missing.make is None:
                    return
                missing.make()

    def _capture(self, graph: torch.cuda.CUDAGraph, function: Callable[[], T], pool: Any) -> T:
        """Capture `function` in a graph, and return its result. An exception ends the capture and is raised again."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream), no_garbage_collection():
            # thread_local: NCCL's watchdog thread queries events while this thread captures
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = function()
            except BaseException:
                with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of an empty graph
                    graph.capture_end()
                raise
            graph.capture_end()
            return output

    def run_on_own_stream(self, function: Callable[[], object]) -> None:
        """Run a function on the stream of the captures, between earlier and later work of the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                function()
        finally:  # kernels launched before the error may still write
            torch.cuda.current_stream().wait_stream(self._stream)

    def used_bytes(self) -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free


logger = logging.getLogger(__name__)

_MIN_SHARED_BYTES = 1 << 18  # smaller tensors between two graphs are not copied to the shared memory


class BrokenStepError(InconsistentRankError):
    """This rank failed within a collective step. The other ranks wait in the step's next collective, so this rank
    cannot tell them."""


class CaptureError(RuntimeError):
    """Another rank failed to capture."""


class Outcome(IntEnum):
    """Outcome of a rank's attempt to capture. All ranks act on the largest outcome."""

    CAPTURED = 0
    MISSING = 1  # a kernel or workspace does not exist yet; an eager run of the step creates it
    FAILED = 2  # out of memory, or a kernel cannot be compiled: an eager run would fail, too


@dataclass
class CapturedStep:
    """A captured step.

    bucket: number of its rounds.
    begin: replays the first graph, before the masks are needed; None without masks.
    run: replays the second or only graph.
    input: tensors to fill before a replay.
    output: tensors that each replay writes.
    """

    bucket: int
    begin: Callable[[], None] | None
    run: Callable[[], None]
    input: StepInput
    output: StepTensors


class StepCapture:
    """Captures steps of the strategy `inner`.

    max_kv_len: maximum KV length of a request, including the writes of its rounds in flight.
    has_states, has_row_index, image_values: as in `ChunkInput`.
    """

    def __init__(
        self,
        inner: CuttableStrategy,
        slots: SlotTable,
        max_kv_len: int,
        recorder: Recorder,
        has_states: bool = False,
        has_row_index: bool = False,
        image_values: Tensor | None = None,
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._max_kv_len = max_kv_len
        self._recorder = recorder
        self._per_chunk = has_states, has_row_index, image_values
        self._kinds_run: set[GraphKey] = set()
        self._shared: dict[tuple[str, torch.dtype], Tensor] = {}
        self._outgrown: list[Tensor] = []  # smaller buffers that earlier graphs still use

    def dry_run(self, key: GraphKey, ahead: CompileAhead) -> None:
        """Let `ahead` compile the kernels of a step, without running them."""
        _, batch = self._padding(key)
        self._recorder.dry_run(lambda: self._inner.step(batch()), ahead)

    def capture(self, key: GraphKey, group: TPGroup) -> CapturedStep:
        """Capture a step. Must be called on all ranks.

        The first step of each kind runs eagerly before its capture, so that libraries allocate their buffers. A later
        one runs eagerly only if a buffer or kernel is missing in its first capture.

        Raises BrokenStepError if an eager run fails and there are other ranks. After any other error the ranks can
        still communicate.
        """
        inputs, batch = self._padding(key)

        def step() -> StepTensors:
            return self._inner.step(batch())

        if key.needs.masked:
            return self._capture_two_graphs(key, inputs, batch, group)
        if _kind(key) in self._kinds_run:
            recorded = self._try(step)
            worst = _worst_of_ranks(_outcome(recorded), group, self._slots.device)
            if worst is Outcome.FAILED:
                raise recorded if isinstance(recorded, Exception) else CaptureError("another rank failed")
            if worst is Outcome.CAPTURED:
                assert not isinstance(recorded, Exception)
                return CapturedStep(key.bucket, None, recorded[0], inputs, recorded[1])
        self._run(step, group)
        self._kinds_run.add(_kind(key))
        run, output = self._recorder.record(step)
        return CapturedStep(key.bucket, None, run, inputs, output)

    def _padding(self, key: GraphKey) -> tuple[StepInput, Callable[[], StepBatch]]:
        """Return inputs of a step that are filled with padding, and a function that returns a new batch over them."""
        inputs = StepInput(key.bucket, key.tokens, key.seen or None, self._slots, *self._per_chunk)
        return inputs, lambda: inputs.batch(key.shape, key.next_shape, self._max_kv_len, key.needs, key.adapted)

    def _run(self, step: Callable[[], object], group: TPGroup) -> None:
        """Run a step eagerly, on all ranks at once."""
        try:
            self._recorder.run_on_own_stream(step)
        except Exception as error:
            if group.size == 1:
                raise
            raise BrokenStepError(f"a step to be captured failed: {type(error).__name__}: {error}") from error

    def _try(self, step: Callable[[], StepTensors]) -> tuple[Callable[[], None], StepTensors] | Exception:
        """Record a step that may not have run. Return the error if that fails."""
        try:
            return self._recorder.record(step, was_run=False)
        except Exception as error:  # Triton's errors are not RuntimeErrors
            if not isinstance(error, NewUnderCaptureError | torch.OutOfMemoryError):
                logger.warning("could not capture a step without an eager run before: %s", error)
            return error

    def _capture_two_graphs(
        self, key: GraphKey, inputs: StepInput, batch: Callable[[], StepBatch], group: TPGroup
    ) -> CapturedStep:
        """Capture a step as two graphs. It always runs eagerly before, because a capture must not allocate the shared
        memory."""
        self._run(lambda: self._inner.step(batch()), group)
        self._run(lambda: self._copy_to_shared(self._inner.forward(batch())), group)
        begin, passed = self._recorder.record(lambda: self._copy_to_shared(self._inner.forward(batch())))
        run, output = self._recorder.record(lambda: self._inner.choose(batch(), passed))
        return CapturedStep(key.bucket, begin, run, inputs, output)

    def _copy_to_shared(self, passed: Any, path: str = "") -> Any:
        """Copy large tensors of a first graph's output to memory that all first graphs share. Only one step at a time
        uses it."""
        if passed is None:
            return None
        if not isinstance(passed, Tensor):
            names = [field.name for field in dataclasses.fields(passed)]
            shared = {name: self._copy_to_shared(getattr(passed, name), f"{path}.{name}") for name in names}
            return dataclasses.replace(passed, **shared)
        if passed.nbytes < _MIN_SHARED_BYTES:
            return passed
        held = self._shared.get((path, passed.dtype))
        if held is None or held.numel() < passed.numel():
            self._outgrown += [] if held is None else [held]
            held = self._shared[path, passed.dtype] = torch.empty(
                passed.numel(), dtype=passed.dtype, device=passed.device
            )
        return held[: passed.numel()].view(passed.shape).copy_(passed)


def _outcome(recorded: object) -> Outcome:
    if not isinstance(recorded, Exception):
        return Outcome.CAPTURED
    is_missing = isinstance(recorded, RuntimeError) and not isinstance(recorded, torch.OutOfMemoryError)
    return Outcome.MISSING if is_missing else Outcome.FAILED


def _worst_of_ranks(mine: Outcome, group: TPGroup, device: torch.device) -> Outcome:
    """Return the largest outcome over the ranks. Waits for the device."""
    return Outcome(int(group.all_gather(torch.tensor([mine], dtype=torch.int32, device=device)).max()))


def on_any_rank(flag: bool, group: TPGroup, device: torch.device) -> bool:
    """Return whether `flag` is set on any rank of `group`. Waits for the device."""
    return bool(group.all_gather(torch.tensor([flag], dtype=torch.int32, device=device)).any())


def _kind(key: GraphKey) -> GraphKey:
    """Return the kind of the step: the key with sizes above 1 replaced by 1."""
    return dataclasses.replace(key, bucket=min(key.bucket, 1), tokens=min(key.tokens, 1), seen=min(key.seen, 1))
