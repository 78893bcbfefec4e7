"""What saved states of bfloat16 cost in text, on the embedded hybrid and a CPU.

    python -m tests.bench saved_states --data gsm8k/test.jsonl [--rows 200]

texts    every prompt is answered greedily, then asked again with saved states of each type: how many answers differ
         from the first ones, which were computed without a cache.
loss     nats a token of the second halves of GSM8K's rows, after the state has been rounded once in their middle, and
         after it has been rounded every 64 tokens, as many turns of a conversation would do.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from aerie.attention.config import CacheConfig
from aerie.deploy.bench.figures import table
from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.quality.word_problems import read_problems
from tests.support import ROOT

MODEL = ROOT / "tests" / "models" / "hybrid_tiny"
ANSWER, MAX_TOKENS, CONCURRENCY, TURN = 128, 384, 8, 64


def chats(data: Path, count: int) -> list[tuple[list[int], list[int]]]:
    """Tokens of the first rows of `data`, as the model's chat template has them: questions, and whole rows."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return encoded[:MAX_TOKENS]

    asked = ((f"<|bos|><|user|>{row.question}<|end|><|assistant|>", row.answer) for row in read_problems(data))
    rows = [(ids(question), ids(f"{question}{answer}<|end|>")) for question, answer in asked]
    return [row for row in rows if len(row[0]) + ANSWER <= MAX_TOKENS][:count]


def answers(prompts: list[list[int]], dtype: str | None) -> list[list[int]]:
    """Greedy answers of prompts that resume at states of `dtype`; None: without a cache."""
    kept = {} if dtype is None else {"state_snapshots": 2 * len(prompts), "state_snapshot_dtype": dtype}
    cache = CacheConfig(16, num_pages=32 * len(prompts), prefix_cache=dtype is not None, **kept)  # type: ignore[arg-type]
    scheduler = SchedulerConfig(max_running=CONCURRENCY, max_step_tokens=256)
    worker = WorkerConfig(ModelSource(str(MODEL), device="cpu"), cache, scheduler, measure_costs=False)
    with local_engine(EngineSpec(worker, None)) as engine:
        if dtype is not None:
            engine.generate(prompts, SamplingParams(1, 0.0), CONCURRENCY)
        requests = engine.generate(prompts, SamplingParams(ANSWER, 0.0), CONCURRENCY)
        assert dtype is None or all(request.cached_tokens for request in requests if len(request.prompt) > 16)
        return [request.output for request in requests]


def _round(cache: Any, dtype: torch.dtype | None) -> None:
    for layer in cache.layers:
        for states in getattr(layer, "recurrent_states", {}).values():
            states.copy_(torch.zeros_like(states) if dtype is None else states.to(dtype))


@torch.no_grad()
def losses(model: Any, tokens: list[int], borders: list[int], dtype: torch.dtype | None) -> Tensor:
    """Cross-entropy of tokens borders[0] + 1 onwards, where the state is rounded to `dtype` at each border; None: is
    set to zero there."""
    text, cache, found = torch.tensor([tokens]), None, []
    for start, end in pairwise([0, *borders, len(tokens) - 1]):
        out = model(text[:, start:end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        _round(cache, dtype)
        if start >= borders[0]:
            found.append(
                torch.nn.functional.cross_entropy(out.logits[0], text[0, start + 1 : end + 1], reduction="none")
            )
    return torch.cat(found)


def main() -> int:
    """Print two tables, and one JSON line."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(prog="python -m tests.bench saved_states")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's rows that the model was not trained on")
    parser.add_argument("--rows", type=int, default=200, help="of --data")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = chats(arguments.data, arguments.rows)
    prompts = [prompt for prompt, _ in rows]
    expected = answers(prompts, None)
    different = {
        dtype: sum(ours != theirs for ours, theirs in zip(answers(prompts, dtype), expected, strict=True))
        for dtype in ("float32", "bfloat16")
    }
    print(*table(["saved states", "texts", "differ"], [(t, len(rows), n) for t, n in different.items()]), sep="\n")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    found: dict[str, list[Tensor]] = {"never": [], "once": [], f"every {TURN} tokens": [], "to zero": []}
    for _, tokens in rows:
        half = len(tokens) // 2
        turns = list(range(half, len(tokens) - 1, TURN))
        found["never"].append(losses(model, tokens, [half], torch.float32))
        found["once"].append(losses(model, tokens, [half], torch.bfloat16))
        found[f"every {TURN} tokens"].append(losses(model, tokens, turns, torch.bfloat16))
        found["to zero"].append(losses(model, tokens, [half], None))
    means = {when: float(torch.cat(each).mean()) for when, each in found.items()}
    print(*table(["rounded", "nats a token"], [(when, f"{mean:.5f}") for when, mean in means.items()]), sep="\n")
    print(json.dumps({"texts": len(rows), "different": different, "loss": means}))
    return 0
