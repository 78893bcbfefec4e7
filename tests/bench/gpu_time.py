"""Time on a GPU by its own events, what is timed as a CUDA graph, and how fast the memory is."""

import time
from collections.abc import Callable

import torch


def elapsed_us(run: Callable[[], object]) -> float:
    """Microseconds that the GPU takes for what `run` launches; waits for its end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a graph; it runs once before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def copy_bytes_per_s(num_bytes: int = 1 << 30, repeats: int = 10) -> float:
    """Read and written bytes per second of a copy of `num_bytes` from and to the GPU's own memory, the fastest of
    `repeats`; of a machine without a GPU its own memory's. A gigabyte is many times the largest L2 cache (50 MB)."""
    on_gpu = torch.cuda.is_available()
    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()
    seconds = min(elapsed_us(copy) * 1e-6 if on_gpu else _host_seconds(copy) for _ in range(repeats))
    return 2 * num_bytes / seconds


def _host_seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s
