"""Records steps as CUDA graphs. Used by `workers.runner.graphs.cuda_graph`; tests use recorders that need no GPU."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from attention.backend import NewUnderCaptureError
from workers.runner.graphs.kernel_compilation import CompileAhead, no_new_kernels

MAX_DRY_RUNS = 8  # dry runs of one step: each but the last found a missing workspace

T = TypeVar("T")


class Recorder(Protocol):
    """Records functions as graphs. `CudaRecorder` is used for serving."""

    def record(self, function: Callable[[], T], was_run: bool = True) -> tuple[Callable[[], None], T]:
        """Return a replay of `function`, and its result: tensors that each replay writes.

        was_run: the function has run before, so that all it needs exists; else a missing piece raises
            NewUnderCaptureError.
        """

    def dry_run(self, function: Callable[[], object], ahead: CompileAhead) -> None:
        """Find the kernels that `function` launches without running it. `ahead` compiles those that are missing."""

    def run_apart(self, function: Callable[[], object]) -> None:
        """Run `function` on a stream of its own, so that what it leaves behind does not disturb a capture."""

    def used_bytes(self) -> int:
        """Memory in use on the device."""


class CudaRecorder:
    """Records graphs that share a memory pool, on one stream.

    Does not use `torch.cuda.graph`: it returns cached memory to the driver before each capture, and the next eager run
    allocates it again. That costs tens of milliseconds for each of more than a hundred captures.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        one = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        self.run_apart(lambda: one @ one)  # creates cuBLAS's handle and workspace, which no graph may own

    def record(self, function: Callable[[], T], was_run: bool = True) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        try:
            with contextlib.nullcontext() if was_run else no_new_kernels():
                output = self._capture(graph, function, self._pool)
        except NewUnderCaptureError:
            raise
        except Exception:
            self._pool = torch.cuda.graph_pool_handle()  # torch 2.11 believes that the old pool is still recording
            raise
        return graph.replay, output

    def dry_run(self, function: Callable[[], object], ahead: CompileAhead) -> None:
        for _ in range(MAX_DRY_RUNS):
            graph = torch.cuda.CUDAGraph(keep_graph=True)  # no graph is instantiated
            try:
                with ahead.dry_run():  # its memory is freed with the graph
                    self._capture(graph, function, torch.cuda.graph_pool_handle())
                return
            except NewUnderCaptureError as missing:
                if missing.make is None:
                    return
                missing.make()

    def _capture(self, graph: torch.cuda.CUDAGraph, function: Callable[[], T], pool: Any) -> T:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            # thread_local: NCCL's watchdog thread queries events while this thread captures
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = function()
            except BaseException:
                with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about an empty graph
                    graph.capture_end()
                raise
            graph.capture_end()
            return output

    def run_apart(self, function: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                function()
        finally:  # kernels launched before an error still write
            torch.cuda.current_stream().wait_stream(self._stream)

    def used_bytes(self) -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Garbage may include graphs of an ended engine, and freeing a graph breaks the current capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
