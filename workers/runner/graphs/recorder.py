"""How steps become graphs that are replayed. Used by `workers.runner.graphs.cuda_graph`; tests record without a GPU."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from attention.backend import NewUnderCaptureError
from workers.runner.graphs.kernel_compilation import CompileAhead, nothing_new

MAX_REHEARSALS = 8  # of one step: each but the last has found a workspace missing

T = TypeVar("T")


class Recorder(Protocol):
    """How rounds become graphs. `CudaRecorder` is the one that serves."""

    def record(self, function: Callable[[], T], was_run: bool = True) -> tuple[Callable[[], None], T]:
        """A replay of what `function` does to tensors, and what it returned: tensors that each replay writes. was_run:
        it has run, so that what it needs is there; else NewUnderCaptureError is raised where something is not."""

    def rehearse(self, function: Callable[[], object], ahead: CompileAhead) -> None:
        """Find out what `function` launches without running it: what of that has to be compiled, `ahead` does."""

    def run_apart(self, function: Callable[[], object]) -> None:
        """Run `function` where it leaves nothing behind that a recording must not meet."""

    def used_bytes(self) -> int:
        """Memory in use on the device."""


class CudaRecorder:
    """Graphs that share one memory pool, recorded in one stream.

    Not by `torch.cuda.graph`, which gives all cached memory back to the driver before every capture, for the next eager
    run to ask for it again: tens of milliseconds each, and there are more than a hundred captures.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        one = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        self.run_apart(lambda: one @ one)  # cuBLAS makes a handle and this stream's workspace, which no graph may own

    def record(self, function: Callable[[], T], was_run: bool = True) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        try:
            with contextlib.nullcontext() if was_run else nothing_new():
                output = self._capture(graph, function, self._pool)
        except NewUnderCaptureError:
            raise
        except Exception:
            self._pool = torch.cuda.graph_pool_handle()  # torch 2.11 takes the former for one that is being recorded to
            raise
        return graph.replay, output

    def rehearse(self, function: Callable[[], object], ahead: CompileAhead) -> None:
        for _ in range(MAX_REHEARSALS):
            graph = torch.cuda.CUDAGraph(keep_graph=True)  # it is never made ready for a replay
            try:
                with ahead.rehearsing():  # in memory that is given back with the graph
                    self._capture(graph, function, torch.cuda.graph_pool_handle())
                return
            except NewUnderCaptureError as missing:
                if missing.make is None:
                    return
                missing.make()

    def _capture(self, graph: torch.cuda.CUDAGraph, function: Callable[[], T], pool: Any) -> T:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream), _nothing_collected():
            # thread_local: NCCL's watchdog thread queries events while this thread captures
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = function()
            except BaseException:
                with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that the graph is empty
                    graph.capture_end()
                raise
            graph.capture_end()
            return output

    def run_apart(self, function: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                function()
        finally:  # what was launched before an error still writes
            torch.cuda.current_stream().wait_stream(self._stream)

    def used_bytes(self) -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Garbage may be the graphs of an engine that has ended, and to free one ends the capture that is under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
