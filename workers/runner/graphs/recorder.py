"""Records steps as CUDA graphs. Used by `aerie.workers.runner.graphs.cuda_graph`; tests use recorders that need no
GPU."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from aerie.attention.backend import NewUnderCaptureError
from aerie.workers.runner.graphs.kernel_compilation import CompileAhead, no_new_kernels

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
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream), _no_garbage_collection():
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


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off. It might free graphs of a previous engine, which would break the current capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
