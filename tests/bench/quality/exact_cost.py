"""The cost of `deterministic: true`: ms per round and ms per prompt beside the free mode, with dummy weights.

    python -m tests.bench exact_cost [--model llama-3.1-8b] [--shapes plain chain tree] [--batches 1 8 32]
                                     [--prompts 512 2048 8192] [--turns 1] [--modes free deterministic] [--layers 16]

Free and deterministic engines in turns; the best of each. A round: the median time between two results while all
requests run, prompts of 512 tokens. A prompt: the time of one request with max_tokens=1, in the engine of the first
shape; `--prompts` alone leaves them out. Starts take most of the time: an engine for each shape, mode and turn. Needs a
GPU; `--tiny` tries it on a CPU, where the option has no effect.
"""

import argparse
import dataclasses
import itertools
import json
import tempfile
import time
from pathlib import Path

import torch

from aerie.deploy.bench.figures import table
from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.kernels.gpu_time import hardware
from tests.bench.machine import commit
from tests.bench.models import configured
from tests.bench.prompts import random_prompts
from tests.bench.round import (
    Setting,
    add_engine_options,
    engine_spec,
    keep_layers,
    model_of,
    timed,
    write_checkpoints,
)

MODES = ("free", "deterministic")


def of_mode(spec: EngineSpec, mode: str) -> EngineSpec:
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, deterministic=mode == "deterministic"))


def spec_of(folder: Path, shape: str, batch: int, setting: Setting, longest: int) -> EngineSpec:
    """Return an engine for `batch` requests of a setting, and one prompt of `longest` tokens."""
    spec = engine_spec(folder, shape, batch, setting, 1, True)
    alone = engine_spec(folder, shape, 1, dataclasses.replace(setting, prompt_tokens=longest), 1, True).worker
    pages = max(worker.cache.num_pages or 0 for worker in (spec.worker, alone))
    lengths = (worker.model.max_model_len or 0 for worker in (spec.worker, alone))
    cache = dataclasses.replace(spec.worker.cache, num_pages=pages)
    model = dataclasses.replace(spec.worker.model, max_model_len=max(lengths))
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, cache=cache, model=model))


def round_times(engine: LocalEngine, spec: EngineSpec, batches: list[int], setting: Setting) -> dict[int, float]:
    """Return ms per round by batch size."""
    found = {}
    whole = SamplingParams(setting.output_tokens, 0.0)
    for batch in batches:
        prompts = random_prompts(spec.worker.model, batch, setting.prompt_tokens)
        timed(engine, prompts, SamplingParams(16, 0.0))
        found[batch] = min(timed(engine, prompts, whole).full_ms for _ in range(setting.repeats))
    return found


def prompt_times(engine: LocalEngine, spec: EngineSpec, lengths: list[int], repeats: int) -> dict[int, float]:
    """Return ms per prompt by its tokens, alone in the engine."""
    found = {}
    for length in lengths:
        prompts = random_prompts(spec.worker.model, 1, length)
        timed(engine, prompts, SamplingParams(1, 0.0))
        found[length] = min(timed(engine, prompts, SamplingParams(1, 0.0)).seconds for _ in range(repeats + 1)) * 1e3
    return found


def compared(kind: str, key: object, times: dict[str, float]) -> tuple[str, ...]:
    """Return a row of the table: both modes' ms and their ratio, "" for a mode that did not run."""
    free, exact = (times.get(mode) for mode in MODES)
    ratio = "" if free is None or exact is None else f"{exact / free:.3f}"
    return (kind, str(key), *("" if ms is None else f"{ms:.3f}" for ms in (free, exact)), ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["plain", "chain", "tree"], [1, 8, 32], configured.CONFIGS)
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 2048, 8192], help="tokens")
    parser.add_argument("--turns", type=int, default=1, help="engines of each mode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--layers", type=int, help="keep only the target's first layers")
    parser.add_argument("--output-tokens", type=int, default=192)
    arguments = parser.parse_args()
    setting = Setting(output_tokens=arguments.output_tokens)
    lengths = arguments.prompts
    if arguments.tiny:
        setting, lengths = Setting(40, 24), [16, 64]
    best: dict[tuple[str, int], dict[str, float]] = {}

    def keep(kind: str, mode: str, times: dict[int, float]) -> None:
        for key, ms in times.items():
            entry = best.setdefault((kind, key), {})
            entry[mode] = min(ms, entry.get(mode, ms))
        print(kind, mode, {key: round(ms, 3) for key, ms in times.items()}, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        model = model_of(arguments)
        write_checkpoints(Path(folder), model, max_position=16384)
        if arguments.layers is not None:
            keep_layers(Path(folder), arguments.layers)
        sizes = max(arguments.batches), setting, max(lengths, default=1)
        for _ in range(arguments.turns):
            for shape, mode in itertools.product(arguments.shapes, arguments.modes):
                spec = of_mode(spec_of(Path(folder), shape, *sizes), mode)
                began_s = time.monotonic()
                with local_engine(spec) as engine:
                    print(f"{shape} {mode}: ready after {time.monotonic() - began_s:.1f} s", flush=True)
                    keep(shape, mode, round_times(engine, spec, arguments.batches, setting))
                    if shape == arguments.shapes[0]:
                        keep("prompt", mode, prompt_times(engine, spec, lengths, setting.repeats))
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    rows = [compared(kind, key, times) for (kind, key), times in best.items()]
    print(*table(["shape or prompt", "batch or tokens", "free, ms", "deterministic, ms", "ratio"], rows), sep="\n")
    result = [{"kind": kind, "at": key, **times} for (kind, key), times in best.items()]
    heads = {"bench": "exact_cost", "hardware": hardware(), "commit": commit(), "model": model}
    print(json.dumps({**heads, "layers": arguments.layers, "results": result}))


if __name__ == "__main__":
    main()
