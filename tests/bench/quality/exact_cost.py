"""The cost of `deterministic: true`: ms per round and ms per prompt beside the free mode, with dummy weights.

    python -m tests.bench exact_cost [--model llama-3.1-8b] [--shapes plain chain tree] [--batches 1 8 32]
                                     [--prompts 512 2048 8192] [--turns 1]

Free and deterministic engines in turns; the best of each. A round: the median time between two results while all
requests run, prompts of 512 tokens. A prompt: the time of one request with max_tokens=1. Needs a GPU; `--tiny` tries it
on a CPU, where the option has no effect.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import torch

from aerie.deploy.bench.figures import table
from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.kernels.gpu_time import hardware
from tests.bench.machine import commit
from tests.bench.models import configured
from tests.bench.prompts import random_prompts
from tests.bench.round import Setting, add_engine_options, engine_spec, model_of, timed, write_checkpoints

MODES = ("free", "deterministic")


def of_mode(spec: EngineSpec, mode: str) -> EngineSpec:
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, deterministic=mode == "deterministic"))


def round_times(spec: EngineSpec, batches: list[int], setting: Setting) -> dict[int, float]:
    """Return ms per round by batch size."""
    found = {}
    whole = SamplingParams(setting.output_tokens, 0.0)
    with local_engine(spec) as engine:
        for batch in batches:
            prompts = random_prompts(spec.worker.model, batch, setting.prompt_tokens)
            timed(engine, prompts, SamplingParams(16, 0.0))
            found[batch] = min(timed(engine, prompts, whole).full_ms for _ in range(setting.repeats))
    return found


def prompt_times(spec: EngineSpec, lengths: list[int], repeats: int) -> dict[int, float]:
    """Return ms per prompt by its tokens, alone in the engine."""
    found = {}
    with local_engine(spec) as engine:
        for length in lengths:
            prompts = random_prompts(spec.worker.model, 1, length)
            timed(engine, prompts, SamplingParams(1, 0.0))
            found[length] = (
                min(timed(engine, prompts, SamplingParams(1, 0.0)).seconds for _ in range(repeats + 1)) * 1e3
            )
    return found


def compared(kind: str, key: object, times: dict[str, float]) -> tuple[str, ...]:
    free, exact = (times[mode] for mode in MODES)
    return (kind, str(key), f"{free:.3f}", f"{exact:.3f}", f"{exact / free:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["plain", "chain", "tree"], [1, 8, 32], configured.CONFIGS)
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 2048, 8192], help="tokens")
    parser.add_argument("--turns", type=int, default=1, help="engines of each mode")
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
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    with tempfile.TemporaryDirectory() as folder:
        model = model_of(arguments)
        write_checkpoints(Path(folder), model, max_position=16384)
        for _ in range(arguments.turns):
            for shape in arguments.shapes:
                for mode in MODES:
                    spec = engine_spec(Path(folder), shape, max(arguments.batches), setting, 1, True)
                    keep(shape, mode, round_times(of_mode(spec, mode), arguments.batches, setting))
            for mode in MODES if lengths else ():
                spec = engine_spec(
                    Path(folder), "plain", 1, dataclasses.replace(setting, prompt_tokens=max(lengths)), 1, True
                )
                keep("prompt", mode, prompt_times(of_mode(spec, mode), lengths, setting.repeats))
    rows = [compared(kind, key, times) for (kind, key), times in best.items()]
    print(*table(["shape or prompt", "batch or tokens", "free, ms", "deterministic, ms", "ratio"], rows), sep="\n")
    result = [{"kind": kind, "at": key, **times} for (kind, key), times in best.items()]
    print(
        json.dumps(
            {"bench": "exact_cost", "hardware": hardware(), "commit": commit(), "model": model, "results": result}
        )
    )


if __name__ == "__main__":
    main()
