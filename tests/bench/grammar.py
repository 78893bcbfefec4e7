"""What grammars cost a round: milliseconds per round with all requests under one, beside the same engine without.

    python -m tests.bench.grammar [--model llama-3.1-8b] [--shapes chain tree] [--batches 1 8 32] [--repeats 3]

As `tests.bench.round` measures: dummy weights, acceptance length 3.0, prompts of 512 tokens, 256 output tokens, greedy,
steps as graphs. The grammar is a long JSON array of strings: almost every drafted token is allowed, so that all nodes
of all trees get masks. Synthetic acceptance heeds no mask; a request that leaves the grammar begins it anew. fill_ms is
what the host takes to fill the masks of a step, which the target's pass should hide. Markdown, then one JSON line. The
target is 1.03 times.
Needs a GPU for figures that mean anything; `--tiny` tries it on a CPU.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from speculative.local import local_engine
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
from workers.runner.local_engine import LocalEngine
from workers.runner.worker import Worker
from workers.scheduling.plan import Grammar, SamplingParams
from workers.structured_output.slot_grammars import SlotGrammars

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
    """Of the one rank's slots."""
    worker = engine.executor
    assert isinstance(worker, Worker) and worker._grammars is not None
    return worker._grammars


def measure(engine: LocalEngine, batch: int, setting: Setting) -> dict[str, float]:
    """Milliseconds per round without and with, in turns so that both see the same machine; the best of each."""
    free = SamplingParams(setting.output_tokens, 0.0)
    kinds = {"free": free, "grammar": replace(free, grammar=GRAMMAR)}
    grammars, best = grammars_of(engine), dict.fromkeys(kinds, float("inf"))
    for sampling in kinds.values():
        timed(engine, batch, setting, replace(sampling, max_tokens=16))
    fill_s, num_fills = grammars.fill_s, grammars.num_fills
    for _ in range(setting.repeats):
        for name, sampling in kinds.items():
            best[name] = min(best[name], timed(engine, batch, setting, sampling).full_ms)
    fill_ms = (grammars.fill_s - fill_s) / max(1, grammars.num_fills - num_fills) * 1e3
    return {
        "free_ms": best["free"],
        "grammar_ms": best["grammar"],
        "ratio": best["grammar"] / best["free"],
        "fill_ms": fill_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["chain", "tree"], [1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3, help="the best of how many runs is taken")
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
                with local_engine(spec) as engine:
                    found = measure(engine, batch, setting)
                results.setdefault(shape, {})[str(batch)] = found
                print(f"| {shape}, {batch} | " + " | ".join(f"{found[name]:.4g}" for name in names) + " |", flush=True)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    print(
        json.dumps({"bench": "grammar", "hardware": hardware(), "commit": commit(), "model": model, "results": results})
    )


if __name__ == "__main__":
    main()
