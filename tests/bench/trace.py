"""An engine's steps on a GPU as torch's profiler sees them: kernels, graph launches, copies to the host, idle time."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request


def submit(engine: LocalEngine, prompts: Sequence[list[int]], max_tokens: int) -> None:
    for i, prompt in enumerate(prompts):
        engine.scheduler.submit(Request(f"p{i}", prompt, SamplingParams(max_tokens, 0.0)))


def start(engine: LocalEngine, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Bring a request for each prompt into steady decoding: the prompts take fewer steps than this."""
    submit(engine, prompts, max_tokens)
    for _ in range(24):
        engine.step()


def profile(engine: LocalEngine, steps: int) -> list[dict[str, Any]]:
    """Trace events of `steps` steps."""
    return profiled(engine.step, steps)


def profiled(run: Callable[[], object], repeats: int) -> list[dict[str, Any]]:
    """Trace events of `repeats` runs."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:  # else torch 2.11 warns
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events: list[dict[str, Any]] = json.loads(Path(file.name).read_text())["traceEvents"]
    return events


def device_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]


def figures(events: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """Per step: wall_us, kernel_us (kernels that overlap count twice), kernels, graph_launches, copies_to_host; and
    idle_share, the part of the time in which nothing ran."""
    device = device_events(events)
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in device]
    wall_us = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return {
        "wall_us": wall_us / steps,
        "kernel_us": sum(e["dur"] for e in device) / steps,
        "idle_share": 1 - busy_us(spans) / wall_us,
        "kernels": len(device) / steps,
        "graph_launches": sum(e.get("name") == "cudaGraphLaunch" for e in events) / steps,
        "copies_to_host": sum("DtoH" in e["name"] for e in device) / steps,
    }


def by_kernel(events: list[dict[str, Any]]) -> list[tuple[str, list[float]]]:
    """Kernels and the microseconds of each of their runs after all kernels begun before had ended, the longest in sum
    first. A kernel launched early waits in its first part for the one before, so their durations overlap; these times
    add up to the time in which anything ran."""
    times: dict[str, list[float]] = defaultdict(list)
    end_so_far = 0.0
    for event in sorted(device_events(events), key=lambda event: (event["ts"], event["dur"])):
        end = event["ts"] + event["dur"]
        times[event["name"]].append(max(0.0, end - max(event["ts"], end_so_far)))
        end_so_far = max(end_so_far, end)
    return sorted(times.items(), key=lambda item: -sum(item[1]))


def kernel_lines(events: list[dict[str, Any]], steps: int, limit: int) -> list[str]:
    """The `limit` longest of `by_kernel`, a line each: time and runs per step, mean and longest time of a run, name."""
    return [
        f"{sum(times) / steps:9.1f} us {len(times) / steps:7.1f} x {sum(times) / len(times):8.2f} us (at most "
        f"{max(times):8.2f})  {name[:100]}"
        for name, times in by_kernel(events)[:limit]
    ]


def call_lines(events: list[dict[str, Any]], steps: int, limit: int) -> list[str]:
    """The `limit` longest calls of the CUDA runtime and driver by name, as `kernel_lines`: waits, copies, launches."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "dur" in event:
            times[event["name"]].append(event["dur"])
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:limit]
    return [
        f"{sum(each) / steps:9.1f} us {len(each) / steps:7.1f} x {sum(each) / len(each):8.2f} us  {name}"
        for name, each in longest
    ]


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Microseconds covered by at least one of the spans (start, end)."""
    total = end_so_far = 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, end_so_far))
        end_so_far = max(end_so_far, end)
    return total
