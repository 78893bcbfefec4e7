"""How steps become graphs that are replayed. Used by `workers.runner.graphs.cuda_graph`; tests record without a GPU."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Recorder(Protocol):
    """How rounds become graphs. `CudaRecorder` is the one that serves."""

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """A replay of what `function` does to tensors, and what it returned: tensors that each replay writes."""

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

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # thread_local: NCCL's watchdog thread queries events while this thread captures
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = function()
            finally:
                graph.capture_end()
        return graph.replay, output

    def run_apart(self, function: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def used_bytes(self) -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
