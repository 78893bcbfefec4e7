"""What capturing rounds takes, by kind of sampling and batch, and what a kind's first request costs those that run.

    python -m tests.bench.capture [--model llama-3.1-8b] [--shapes plain chain] [--batches 64] [--streams 8]

An engine per shape and largest batch, with dummy weights, as `tests.bench.round` makes them. First table: seconds and
MB of GPU memory of each captured round, all of a kind and bucket together, in the order of capture: the first one of a
kind compiles its kernels, and the largest bucket makes the memory that smaller ones reuse. Second table: `--streams`
greedy requests decode while a request of each kind comes twice; `longest` is the longest time between two results of a
stream around its coming, `round` the median while it runs. "eager" is an engine whose allowance for captures is
nothing: such batches run without a graph there. Markdown tables, then one JSON line. Needs a GPU for figures that mean
anything; `--tiny` tries it on a CPU, where nothing is captured.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from msgspec.structs import replace

from speculative.build import EngineSpec
from speculative.local import local_engine
from tests.bench.round import (
    Setting,
    add_engine_options,
    commit,
    engine_spec,
    hardware,
    model_of,
    write_checkpoints,
)
from workers.config import GraphCapture
from workers.runner.graphs.cuda_graph import CaptureReport, GraphedDecoding
from workers.runner.local_engine import LocalEngine
from workers.runner.worker import Worker
from workers.sampling.sampler import CAPTURED_NEEDS, SamplingNeeds
from workers.scheduling.plan import SamplingParams
from workers.scheduling.request import Request

STREAM_TOKENS = 1024  # more than come until the request that arrives has its own
KINDS = {
    "greedy": SamplingParams(1, 0.0),
    "temperature": SamplingParams(1, 0.8, seed=1),
    "top-p": SamplingParams(1, 0.8, top_p=0.9, seed=1),
    "penalties": SamplingParams(1, 0.0, presence_penalty=0.5, frequency_penalty=0.2),
    "log-probabilities": SamplingParams(1, 0.0, logprobs=5),
}
ALLOWANCES = {"captured": GraphCapture(limit_s=1e9, limit_gb=1e9), "eager": GraphCapture(limit_gb=0.0)}


def name_of(needs: SamplingNeeds) -> str:
    """A captured kind, by what it has that the one before has not."""
    names = ("greedy", "random", "filters", "penalties", "log-probabilities")
    return names[CAPTURED_NEEDS.index(needs)]


def captures(report: CaptureReport) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds and MB by kind and bucket, all shapes together."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for key, taken in report.rounds.items():
        cell = found[name_of(key.needs)].setdefault(str(key.bucket), {"seconds": 0.0, "mb": 0.0, "graphs": 0})
        cell["seconds"] += taken.seconds
        cell["mb"] += taken.num_bytes / 1e6
        cell["graphs"] += 1
    return dict(found)


def gaps_ms(engine: LocalEngine, streams: int, arrival: Request) -> list[float]:
    """Milliseconds between results while `arrival` runs beside `streams` greedy requests, its coming included."""
    names = [f"stream-{i}-{arrival.request_id}" for i in range(streams)]
    for i, name in enumerate(names):
        prompt = [10 + (7 * i + j) % 50 for j in range(32)]
        engine.scheduler.submit(Request(name, prompt, SamplingParams(STREAM_TOKENS, 0.0)))
    for _ in range(24):
        engine.step()
    engine.scheduler.submit(arrival)
    stamps = [time.perf_counter()]
    finished = False
    while not finished:
        finished = any(out.request is arrival and out.finish_reason is not None for out in engine.step())
        stamps.append(time.perf_counter())
    for name in names:
        assert engine.scheduler.abort(name) is not None, "a stream ended before the request that came"
    while engine.executor.num_pending:
        engine.step()
    return [(later - sooner) * 1e3 for sooner, later in itertools.pairwise(stamps)]


def stalls(engine: LocalEngine, streams: int, tokens: int) -> dict[str, dict[str, float]]:
    """By kind: the longest gap when it comes first and again, for `tokens` tokens, and the median gap of the second
    time."""
    out = {}
    gaps_ms(engine, streams, Request("warm", [11] * 16, replace(KINDS["greedy"], max_tokens=tokens)))
    for name, kind in KINDS.items():
        first, again = (
            gaps_ms(engine, streams, Request(f"{name}-{i}", [11 + i] * 16, replace(kind, max_tokens=tokens)))
            for i in range(2)
        )
        out[name] = {"first_ms": max(first), "again_ms": max(again), "round_ms": statistics.median(again)}
    return out


def measure(spec: EngineSpec, streams: int, tokens: int) -> dict[str, object]:
    """Captures and stalls of one shape."""
    results: dict[str, object] = {}
    for name, allowance in ALLOWANCES.items():
        worker = dataclasses.replace(spec.worker, graph_capture=allowance)
        started_s = time.perf_counter()
        with local_engine(dataclasses.replace(spec, worker=worker)) as engine:
            ready_s = time.perf_counter() - started_s
            assert isinstance(engine.executor, Worker)
            graphs = engine.executor._strategy
            report = graphs.report if isinstance(graphs, GraphedDecoding) else CaptureReport({}, 0)
            results[name] = {
                "ready_s": ready_s,
                "capture_s": report.whole.seconds,
                "capture_mb": report.whole.num_bytes / 1e6,
                "captures": captures(report),
                "stalls": stalls(engine, streams, tokens),
            }
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results


def show(shape: str, batch: int, results: dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]]) -> None:
    """Both tables of one engine."""
    by_kind = results["captured"]["captures"]
    if by_kind:
        buckets = sorted({int(bucket) for row in by_kind.values() for bucket in row})
        print(f"\n| {shape}, {batch}: s and MB of rounds of | " + " | ".join(map(str, buckets)) + " | all |")
        print("| --- |" + " --- |" * (len(buckets) + 1))
        for kind, row in by_kind.items():
            cells = [row.get(str(bucket)) for bucket in buckets]
            whole = {name: sum(cell[name] for cell in row.values()) for name in ("seconds", "mb")}
            print(
                f"| {kind} | "
                + " | ".join(f"{cell['seconds']:.2f}, {cell['mb']:.0f}" if cell else "" for cell in [*cells, whole])
                + " |"
            )
    print(f"\n| {shape}, {batch}: ms | longest at first | longest again | round | the same, eager |")
    print("| --- | --- | --- | --- | --- |")
    for kind, row in results["captured"]["stalls"].items():
        eager = results["eager"]["stalls"][kind]
        figures = (f"{each['first_ms']:.1f} | {each['again_ms']:.1f} | {each['round_ms']:.2f}" for each in (row, eager))
        captured, without = figures
        print(f"| {kind} | {captured} | {without.replace(' | ', ', ')} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["plain", "chain"], [64])
    parser.add_argument("--streams", type=int, default=8, help="greedy requests that run when another comes")
    arguments = parser.parse_args()
    setting = Setting(64, STREAM_TOKENS)
    results: dict[str, dict[str, dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder), model_of(arguments))
        for shape in arguments.shapes:
            for batch in arguments.batches:
                streams = min(arguments.streams, batch - 1)
                spec = engine_spec(Path(folder), shape, batch, setting, 1, cuda_graphs=True)
                results.setdefault(shape, {})[str(batch)] = found = measure(spec, streams, 6 if arguments.tiny else 64)
                show(shape, batch, found)  # type: ignore[arg-type]
    print(
        json.dumps(
            {
                "bench": "capture",
                "hardware": hardware(),
                "commit": commit(),
                "model": arguments.model,
                "streams": arguments.streams,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
