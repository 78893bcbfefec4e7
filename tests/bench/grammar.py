"""The cost of grammars per round, and the gain of drafts that follow them.

    python -m tests.bench grammar [--model llama-3.1-8b] [--shapes chain tree] [--batches 1 8 32] [--repeats 3]
                                  [--schemas 64]

First milliseconds per round with all requests under a grammar, beside the same engine without.

As `tests.bench.round` measures: dummy weights, acceptance length 3.0, prompts of 512 tokens, 256 output tokens, greedy,
steps as graphs. The grammar is a long JSON array of strings: almost every drafted token is allowed, so that all nodes
of all trees get masks. Synthetic acceptance ignores masks; a request that leaves the grammar starts it again. fill_ms
is what the host takes to fill the masks of a step and to write its guides, which the target's pass should hide. The
target is 1.03 times.

Then, of the embedded pair at 32 streams, tokens of a round of as many requests as `--schemas` says, each under a JSON
schema of its own, and of the same requests without one; forced is the share of the accepted drafts that stand within
texts which the grammar demands. Markdown, then one JSON line.
Needs a GPU for figures that mean anything; `--tiny` tries it on a CPU.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aerie.speculative.build import local_engine
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import Grammar, SamplingParams
from aerie.workers.scheduling.request import Request
from aerie.workers.structured_output.slot_grammars import SlotGrammars
from tests.bench.prompts import random_prompts
from tests.bench.quality.decoding import accepted_tokens
from tests.bench.round import (
    MODELS,
    Setting,
    add_engine_options,
    commit,
    engine_spec,
    hardware,
    model_of,
    timed,
    write_checkpoints,
)
from tests.support.embedded import CHAIN, TREE, embedded_spec, eos_token_ids
from tests.support.prompts import held_out_prompts, tokenized
from tests.support.structured_output.sampled import grammar_of, schemas

END = 1
SCHEMA = '{"type":"array","items":{"type":"string"},"minItems":1000}'
GRAMMAR = Grammar("json_schema", SCHEMA, (END,), any_whitespace=False)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of so many tokens: bytes, then words of the letters a to z."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    number = 0
    while len(words) < vocab_size:
        letters, rest = "", number
        for _ in range(5):
            letters, rest = chr(ord("a") + rest % 26) + letters, rest // 26
        words.append(letters)
        number += 7  # spread over the alphabet
    vocabulary = {word: token for token, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def grammars_of(engine: LocalEngine) -> SlotGrammars:
    """Return the grammars of the only rank's slots."""
    worker = engine.executor
    assert isinstance(worker, Worker) and worker._grammars is not None
    return worker._grammars


def measure(engine: LocalEngine, prompts: Sequence[list[int]], setting: Setting) -> dict[str, float]:
    """Milliseconds per round without and with, in turns so that both see the same machine; the best of each."""
    free = SamplingParams(setting.output_tokens, 0.0)
    kinds = {"free": free, "grammar": replace(free, grammar=GRAMMAR)}
    grammars, best = grammars_of(engine), dict.fromkeys(kinds, float("inf"))
    for sampling in kinds.values():
        timed(engine, prompts, replace(sampling, max_tokens=16))
    fill_s, num_fills = grammars.fill_s, grammars.num_fills
    for _ in range(setting.repeats):
        for name, sampling in kinds.items():
            best[name] = min(best[name], timed(engine, prompts, sampling).full_ms)
    fill_ms = (grammars.fill_s - fill_s) / max(1, grammars.num_fills - num_fills) * 1e3
    return {
        "free_ms": best["free"],
        "grammar_ms": best["grammar"],
        "ratio": best["grammar"] / best["free"],
        "fill_ms": fill_ms,
    }


def acceptance(shape: str, count: int) -> dict[str, float]:
    """Tokens of a round of the embedded pair, free and under grammars, eagerly."""
    spec = embedded_spec({"chain": CHAIN, "tree": TREE}[shape], max_running=32, debug=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = dataclasses.replace(spec.worker.model, device=device)
    spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, model=model, cuda_graphs=False))
    sampling = SamplingParams(40, 0.0, stop_token_ids=eos_token_ids())
    prompts, found = tokenized(held_out_prompts(count)), dict[str, float]()
    for kind in ("free", "grammar"):
        asked = [
            Request(str(i), prompt, replace(sampling, grammar=grammar_of(schema) if kind == "grammar" else None))
            for i, (prompt, schema) in enumerate(zip(prompts, schemas(count, seed=1), strict=True))
        ]
        with local_engine(spec) as engine:
            engine.run(asked, 32)
            forced = grammars_of(engine).num_forced
        accepted = accepted_tokens(asked)
        found[f"{kind}_tokens"] = 1 + accepted / sum(request.num_rounds for request in asked)
    return found | {"forced": forced / max(1, accepted)}


def print_acceptance(shapes: Sequence[str], count: int) -> dict[str, dict[str, float]]:
    """Print what `acceptance` finds for each shape, as a table too."""
    names, results = ("free_tokens", "grammar_tokens", "forced"), dict[str, dict[str, float]]()
    print(f"\n| shape | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}")
    for shape in shapes:
        results[shape] = acceptance(shape, count)
        print(f"| {shape} | " + " | ".join(f"{results[shape][name]:.3g}" for name in names) + " |", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["chain", "tree"], [1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3, help="the best of how many runs is taken")
    parser.add_argument("--schemas", type=int, default=64, help="0 leaves acceptance out")
    arguments = parser.parse_args()
    setting = Setting(40, 48) if arguments.tiny else Setting(repeats=arguments.repeats)
    model, results = model_of(arguments), dict[str, dict[str, Any]]()
    names = ("free_ms", "grammar_ms", "ratio", "fill_ms")
    print(f"| shape, batch | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder), model)
        write_tokenizer(Path(folder) / "target", MODELS[model].vocab if not arguments.tiny else 300)
        for shape in arguments.shapes:
            for batch in arguments.batches:
                spec = engine_spec(Path(folder), shape, batch, setting, 1, cuda_graphs=True)
                prompts = random_prompts(spec.worker.model, batch, setting.prompt_tokens)
                with local_engine(spec) as engine:
                    found = measure(engine, prompts, setting)
                results.setdefault(shape, {})[str(batch)] = found
                print(f"| {shape}, {batch} | " + " | ".join(f"{found[name]:.4g}" for name in names) + " |", flush=True)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    drafts = print_acceptance(arguments.shapes, arguments.schemas) if arguments.schemas else {}
    whole = {"bench": "grammar", "hardware": hardware(), "commit": commit(), "model": model}
    print(json.dumps(whole | {"results": results, "acceptance": drafts}))


if __name__ == "__main__":
    main()
