"""Where a round's time goes on a GPU: kernels by name, graph launches, copies to the host and idle time per round.

    python -m tests.bench.profile_round --shape chain --batch 1 [--model llama-3.1-8b] [--rounds 30] [--prefill]

With --prefill the steps of the batch's prompts instead, all figures per step.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from speculative.local import local_engine
from tests.bench.round import MODELS, SHAPES, Setting, engine_spec, hardware, write_checkpoints
from workers.local import LocalEngine
from workers.plan import SamplingParams
from workers.request import Request


def submit(engine: LocalEngine, batch: int, setting: Setting, max_tokens: int) -> None:
    for i in range(batch):
        prompt = [10 + (7 * i + j) % 50 for j in range(setting.prompt_tokens)]
        engine.scheduler.submit(Request(f"p{i}", prompt, SamplingParams(max_tokens, 0.0)))


def start(engine: LocalEngine, batch: int, setting: Setting) -> None:
    """Bring `batch` requests into steady decoding."""
    submit(engine, batch, setting, setting.output_tokens)
    for _ in range(24):
        engine.step()


def profile(engine: LocalEngine, rounds: int) -> list[dict[str, Any]]:
    """Trace events of `rounds` steps."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(rounds):
            engine.step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events: list[dict[str, Any]] = json.loads(Path(file.name).read_text())["traceEvents"]
    return events


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Microseconds covered by at least one of the spans (start, end)."""
    total = end_so_far = 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, end_so_far))
        end_so_far = max(end_so_far, end)
    return total


def report(events: list[dict[str, Any]], rounds: int) -> dict[str, float]:
    """Print kernels by time; return the figures per round."""
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    launches = [e for e in events if e.get("name") == "cudaGraphLaunch"]
    to_host = [e for e in device if "DtoH" in e["name"]]
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in device:
        by_name[event["name"]].append(event["dur"])
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]:
        total_us, count = sum(times), len(times)
        print(f"{total_us / rounds:9.1f} us {count / rounds:7.1f} x {total_us / count:8.2f} us  {name[:110]}")
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in device]
    wall_us = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return {
        "wall_us": wall_us / rounds,
        "kernel_us": sum(e["dur"] for e in device) / rounds,
        "idle_share": 1 - busy_us(spans) / wall_us,
        "kernels": len(device) / rounds,
        "graph_launches": len(launches) / rounds,
        "copies_to_host": len(to_host) / rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="chain")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--prefill", action="store_true", help="the prompts' steps instead of rounds")
    arguments = parser.parse_args()
    setting = Setting()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder), arguments.model)
        spec = engine_spec(Path(folder), arguments.shape, arguments.batch, setting, 1, cuda_graphs=True)
        with local_engine(spec) as engine:
            rounds = arguments.rounds
            if arguments.prefill:
                rounds = -(-arguments.batch * setting.prompt_tokens // spec.worker.scheduler.max_step_tokens)
                engine.generate([[10] * setting.prompt_tokens] * arguments.batch, SamplingParams(1, 0.0),
                                arguments.batch)
                submit(engine, arguments.batch, setting, 1)
            else:
                start(engine, arguments.batch, setting)
            events = profile(engine, rounds)
    figures = report(events, rounds)
    print(json.dumps({"bench": "profile_round", "hardware": hardware(), "shape": arguments.shape,
                      "batch": arguments.batch, **figures}))


if __name__ == "__main__":
    main()
