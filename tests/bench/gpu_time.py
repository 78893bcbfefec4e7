"""Time on a GPU by its own events, and what is timed as a CUDA graph."""

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
