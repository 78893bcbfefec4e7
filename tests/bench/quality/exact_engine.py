"""Answers that differ from those of the same requests alone, free and `deterministic: true` side by side.

    python -m tests.bench exact_engine [--model llama-3.1-8b] [--quantization w4a16] [--modes free deterministic]
                                       [--prompts 200] [--longest 2048] [--output-tokens 64] [--batches 1 8 64]
                                       [--tensor-parallel 2] [--layers 8] [--adapters 2]

Dummy weights, whose best logits often nearly tie. Prompts of mixed lengths, every other request greedy, the others
seeded. Alone: one request at a time, without speculation, with an empty cache. Then the same requests at every batch
size and with the shapes `plain`, `suffix` (a chain copied from the text, many of whose tokens are accepted), `tree` (of
a draft head) and `mixed` (as `suffix`, half of the requests without speculation). The prefix cache is on, so later runs
of an engine find their prompts; it has room for a third of the largest batch, so that requests are preempted. `suffix`
and `mixed` share an engine. Models without a draft have no `tree`. --layers: only the model's first layers, for models
that do not fit, and shorter starts. --adapters: LoRA adapters of rank 16, which requests have in turn, every second one
also of embedding and head; one in so many and one more has none.

An answer counts as different from its first other id on; log-probabilities are compared to the bit up to there. Needs a
GPU; `--tiny` tries it on a CPU, where the option has no effect.
"""

import argparse
import dataclasses
import itertools
import json
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from aerie.attention.config import CacheConfig
from aerie.deploy.bench.figures import table
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import LoraConfig, SchedulerConfig
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.bench.kernels.gpu_time import hardware
from tests.bench.machine import commit
from tests.bench.models import configured
from tests.bench.prompts import random_prompts
from tests.bench.quality.exact_cost import MODES, of_mode
from tests.bench.round import (
    MODELS,
    QUANTIZATIONS,
    Setting,
    add_engine_options,
    engine_spec,
    has_draft,
    keep_layers,
    model_of,
    quantize_config,
    write_checkpoints,
)
from tests.bench.shapes.adapter_rounds import write_adapter

ENGINES = (("plain",), ("suffix", "mixed"), ("tree",))  # the shapes that each engine runs
SHAPES = tuple(shape for shapes in ENGINES for shape in shapes)
SUFFIX = SpeculativeConfig("", "suffix", 7, 1, 8, adaptive=False)


@dataclasses.dataclass
class Answer:
    """ids: of the tokens. logprobs: their log-probabilities, float32 as bytes."""

    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[bytes] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Differences:
    """answers: with another id. logprobs: of `compared` log-probabilities, those with other bits."""

    answers: int
    logprobs: int
    compared: int

    @classmethod
    def between(cls, expected: Sequence[Answer], found: Sequence[Answer]) -> "Differences":
        answers = logprobs = compared = 0
        for one, other in zip(expected, found, strict=True):
            pairs = list(zip(one.ids, other.ids, strict=False))
            equal = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))
            answers += one.ids != other.ids
            compared += equal
            logprobs += sum(one.logprobs[i] != other.logprobs[i] for i in range(equal))
        return cls(answers, logprobs, compared)


@dataclasses.dataclass(frozen=True)
class Run:
    """What one batch size of one engine answered. preempted: requests that started again. accepted: drafted tokens."""

    answers: list[Answer]
    preempted: int
    accepted: int


def prompts_of(spec: EngineSpec, count: int, longest: int) -> list[list[int]]:
    """Return prompts whose lengths are spread evenly over the powers of two up to `longest`; none is another's
    beginning."""
    generator = torch.Generator().manual_seed(1)
    lengths = (longest ** torch.rand(count, generator=generator)).ceil().long().tolist()
    whole = random_prompts(spec.worker.model, count, longest)
    return [prompt[:length] for prompt, length in zip(whole, lengths, strict=True)]


def sampling_of(number: int, output_tokens: int, speculative: bool = True, adapter: str = "") -> SamplingParams:
    temperature = float(number % 2)
    return SamplingParams(output_tokens, temperature, seed=number, logprobs=0, speculative=speculative, adapter=adapter)


def run(
    engine: LocalEngine,
    prompts: Sequence[list[int]],
    output_tokens: int,
    at_once: int,
    shape: str,
    adapters: Sequence[str] = ("",),
) -> Run:
    requests = [
        Request(
            f"r{i}", prompt, sampling_of(i, output_tokens, shape != "mixed" or i % 4 < 2, adapters[i % len(adapters)])
        )
        for i, prompt in enumerate(prompts)
    ]
    answers = {request.request_id: Answer() for request in requests}
    ends: dict[str, RequestOutput] = {}

    def listen(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            ends[output.request.request_id] = output
        mine = answers[output.request.request_id]
        mine.ids += output.tokens
        mine.logprobs += [struct.pack("f", each.logprob) for each in output.logprobs or ()]

    before = engine.scheduler.stats.num_preemptions
    engine.run(requests, at_once, listen)
    for request, answer in zip(requests, answers.values(), strict=True):
        sizes, end = (len(answer.ids), len(answer.logprobs)), ends[request.request_id]
        assert sizes == (output_tokens, output_tokens), (
            f"{request.request_id}, prompt of {len(request.prompt)}, {request.cached_tokens} cached: ids and "
            f"log-probabilities {sizes}, {end.finish_reason} {end.error}"
        )
    accepted = sum(i * n for request in requests for i, n in enumerate(request.acceptance_histogram))
    return Run(list(answers.values()), engine.scheduler.stats.num_preemptions - before, accepted)


def spec_of(
    folder: Path, shape: str, batch: int, longest: int, output_tokens: int, tensor_parallel: int = 1
) -> EngineSpec:
    """Return an engine for `batch` requests, with pages for a third of them, and for at least two of the longest."""
    setting = Setting(longest, output_tokens)
    spec = engine_spec(folder, "tree" if shape == "tree" else "plain", batch, setting, tensor_parallel, True)
    page_size = spec.worker.cache.page_size
    each = -(-(longest + output_tokens + 80) // page_size)
    pages = max(2 * each, batch * each // 12)  # the mean length is a quarter of the longest
    worker = replace(
        spec.worker,
        cache=CacheConfig(page_size, num_pages=pages + 8),
        scheduler=SchedulerConfig(max_running=batch, max_step_tokens=1024),
    )
    speculative = spec.speculative
    if speculative is not None:
        speculative = replace(speculative, synthetic_acceptance_length=None)
    return replace(spec, worker=worker, speculative=SUFFIX if shape in ("suffix", "mixed") else speculative)


def compare(
    engines: Sequence[tuple[EngineSpec, Sequence[str]]],
    num_prompts: int,
    longest: int,
    output_tokens: int,
    batches: Sequence[int],
) -> list[dict[str, object]]:
    """Run the shapes of each engine at every batch size; the first engine also answers the requests alone. Return a row
    for each shape and batch size."""
    alone: list[Answer] = []
    rows: list[dict[str, object]] = []
    for spec, shapes in engines:
        prompts = prompts_of(spec, num_prompts, longest)
        adapters = ("", *(spec.worker.lora.modules if spec.worker.lora is not None else ()))
        began_s = time.monotonic()
        with local_engine(spec) as engine:
            print(f"{', '.join(shapes) or 'alone'}: ready after {time.monotonic() - began_s:.1f} s", flush=True)
            if not alone:
                alone = run(engine, prompts, output_tokens, 1, "plain", adapters).answers
            for shape, batch in itertools.product(shapes, batches):
                began_s = time.monotonic()
                found = run(engine, prompts, output_tokens, batch, shape, adapters)
                differences = dataclasses.asdict(Differences.between(alone, found.answers))
                others = {"preempted": found.preempted, "accepted": found.accepted}
                rows.append({"shape": shape, "batch": batch, **differences, **others})
                print(rows[-1], f"{time.monotonic() - began_s:.1f} s", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["plain"], [1, 8, 64], configured.CONFIGS)
    parser.add_argument("--quantization", choices=("none", *QUANTIZATIONS), default="none", help="of the target")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--layers", type=int, help="keep only the target's first layers")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters; of models with a size in round.MODELS")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--runs", nargs="+", choices=SHAPES, default=list(SHAPES), help="shapes to compare")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest prompts")
    parser.add_argument("--output-tokens", type=int, default=64)
    arguments = parser.parse_args()
    count, longest, output_tokens, batches = (
        arguments.prompts, arguments.longest, arguments.output_tokens, arguments.batches
    )  # fmt: skip
    if arguments.tiny:
        count, longest, output_tokens, batches = 6, 48, 12, [1, 4]
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(arguments)
        write_checkpoints(Path(folder), model)
        if arguments.quantization != "none":
            quantize_config(Path(folder) / "target" / "config.json", arguments.quantization)
        if arguments.layers is not None:
            keep_layers(Path(folder), arguments.layers)
        lora = None
        if arguments.adapters:
            size = MODELS[model] if arguments.layers is None else replace(MODELS[model], layers=arguments.layers)
            paths = {
                f"a{i}": str(write_adapter(Path(folder) / f"a{i}", size, 16, i % 2 == 0))
                for i in range(arguments.adapters)
            }
            lora = LoraConfig(paths, len(paths), 16)
        wanted = {*arguments.runs} if has_draft(Path(folder)) else {*arguments.runs} - {"tree"}
        for mode in arguments.modes:
            engines = []
            for shapes in ENGINES:
                chosen = [shape for shape in shapes if shape in wanted]
                if chosen or not engines:
                    sizes = max(batches), longest, output_tokens, arguments.tensor_parallel
                    spec = of_mode(spec_of(Path(folder), shapes[0], *sizes), mode)
                    engines.append((replace(spec, worker=replace(spec.worker, lora=lora)), chosen))
            rows = compare(engines, count, longest, output_tokens, batches)
            results += [{"mode": mode, **row} for row in rows]
    heads = {"mode": "mode", "shape": "shape", "batch": "batch", "answers": f"other ids, of {count}"}
    heads |= {"logprobs": "other bits", "compared": "log-probabilities"} | {n: n for n in ("preempted", "accepted")}
    print(*table(list(heads.values()), [tuple(str(row[name]) for name in heads) for row in results]), sep="\n")
    print(
        json.dumps(
            {
                "bench": "exact_engine",
                "hardware": hardware(),
                "commit": commit(),
                "model": model,
                "quantization": arguments.quantization,
                "tensor_parallel": arguments.tensor_parallel,
                "layers": arguments.layers,
                "adapters": arguments.adapters,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
