"""Times by the GPU's own events, CUDA graphs of what is timed, and the rate at which memory is copied."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

COPY_BYTES = 2 << 30


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


def hardware() -> str:
    """The GPU's name, or "CPU"."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


class Clock:
    """Medians of replays that take turns, so that a change of the device's clock reaches all of them alike.

    rounds: how often everything is timed. Needs twice COPY_BYTES of GPU memory.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.source = torch.randn(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
        self.target = torch.empty_like(self.source)

    def medians(self, *runs: Callable[[], object]) -> tuple[list[float], float]:
        """Microseconds of each run, and the bytes per second of a copy, read and written, in the same turns."""
        timed: list[list[float]] = [[] for _ in range(len(runs) + 1)]
        for run in runs:
            run()
        for _ in range(self.rounds):
            for run, times in zip((*runs, lambda: self.target.copy_(self.source)), timed, strict=True):
                times.append(elapsed_us(run))
        *us, copy_us = (statistics.median(times) for times in timed)
        return us, 2 * COPY_BYTES / copy_us * 1e6


def random_memory(gigabytes: int) -> Tensor:
    """Random bfloat16 numbers on the GPU, for the KV of all layers: [gigabytes * 2^29]."""
    torch.manual_seed(0)
    memory = torch.empty(gigabytes << 29, dtype=torch.bfloat16, device="cuda")
    for part in memory.split(1 << 30):
        part.normal_()
    return memory
