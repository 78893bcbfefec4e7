"""Acceptance of the embedded pair with a trained LoRA adapter, before and after its draft has one, too.

    python -m tests.bench draft_adapters [--rows 64] [--target-steps 40] [--draft-steps 40] [--prompts 12]

The target's adapter learns to give its own answers in another spelling; `aerie train-draft --adapter` then trains an
adapter of the EAGLE-3 head on what the adapted target answers. Tokens per round of a chain of 3 on other prompts:
without adapter, with the target's alone, with both. On a CPU, about 3 minutes.
"""

import argparse
import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from aerie.deploy.bench.figures import table
from aerie.deploy.train_draft import add_command
from aerie.kernels.lazy_import import load
from aerie.speculative.build import local_engine
from aerie.speculative.training.adapters import add_adapter, save_adapter
from aerie.speculative.training.rows import read_conversations
from aerie.speculative.training.samples import Sample, collate, encode_answers, plan_batches, write_samples
from aerie.workers.config import LoraConfig
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.bench.machine import commit, machine
from tests.support import MODELS
from tests.support.embedded import CHAIN, embedded_spec, eos_token_ids
from tests.support.prompts import held_out_prompts, tokenized

SPELLINGS = ((" the ", " thar "), (" is ", " be "), (" are ", " be "), (" and ", " an' "), (" has ", " holds "))
RANK, SAMPLING = 16, SamplingParams(96, 0.0, stop_token_ids=eos_token_ids())


def respelled(text: str) -> str:
    """An answer as a pirate gives it."""
    for ours, theirs in SPELLINGS:
        text = text.replace(ours, theirs)
    return f"Arr! {text}"


def answers(adapter: Path | None, questions: list[str]) -> list[Request]:
    """Answer questions with an engine of the pair, greedily, with a chain of 3."""
    spec = embedded_spec(dataclasses.replace(CHAIN, adaptive=False), debug=False)
    lora = None if adapter is None else LoraConfig({"a": str(adapter)}, 1, RANK)
    spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=lora))
    with local_engine(spec) as engine:
        return engine.generate(tokenized(questions), replace(SAMPLING, adapter="" if adapter is None else "a"))


def write_rows(path: Path, count: int) -> None:
    """Write prompts, and the target's own answers in another spelling."""
    tokenizer: Any = AutoTokenizer.from_pretrained(MODELS / "target")
    questions = held_out_prompts(count, seed=1)
    texts = [tokenizer.decode(each.output, skip_special_tokens=True) for each in answers(None, questions)]
    rows = [{"question": q, "answer": respelled(a)} for q, a in zip(questions, texts, strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)))


def train_target_adapter(rows: Path, folder: Path, steps: int) -> None:
    """Train an adapter of all linear layers on the rows' answers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(MODELS / "target")
    target: Any = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    add_adapter(target, RANK, seed=0)
    samples = encode_answers(read_conversations([str(rows)]), tokenizer, 512)
    optimizer = torch.optim.AdamW([each for each in target.parameters() if each.requires_grad], lr=2e-3)
    batches: list[list[int]] = []
    for step in range(steps):
        batches = batches or plan_batches([len(sample.tokens) for sample in samples], 1024, step)
        batch = collate([samples[i] for i in batches.pop()])
        place = torch.arange(batch.tokens.shape[1])
        is_answer = (place >= batch.num_prompt[:, None]) & (place < batch.lengths[:, None])
        wanted = batch.tokens.where(is_answer, -100)[:, 1:]
        loss = functional.cross_entropy(target(batch.tokens).logits[:, :-1].flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_adapter(target, MODELS / "target", folder)


def train_draft_adapter(rows: Path, adapter: Path, steps: int, count: int) -> None:
    """Run `aerie train-draft --adapter` on what the adapted target answers."""
    written = adapter.parent / "regenerated.jsonl"
    own = answers(adapter, held_out_prompts(count, seed=1))
    write_samples([Sample((*each.prompt, *each.output), len(each.prompt)) for each in own], written)
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(required=True))
    line = f"train-draft --target {MODELS / 'target'} --adapter {adapter} --draft {MODELS / 'draft'} --device cpu"
    options = f"--data {rows} --regenerated {written} --output {adapter / 'draft'} --no-keep-checkpoint --lr 2e-3"
    sizes = f"--steps {steps} --warmup-steps 5 --batch-tokens 1024 --ttt-length 3 --val-fraction 0 --weight-decay 0"
    arguments = parser.parse_args(f"{line} {options} {sizes}".split())
    load(arguments.run)(arguments)


def tokens_per_round(adapter: Path | None, count: int) -> tuple[float, list[list[int]]]:
    """Return the tokens per round, and the answers, of prompts that no training has seen."""
    requests = answers(adapter, held_out_prompts(count, seed=2))
    rounds = [sum(counts) for counts in zip(*(each.acceptance_histogram for each in requests), strict=True)]
    return 1 + sum(k * n for k, n in enumerate(rounds)) / sum(rounds), [request.output for request in requests]


def measure(folder: Path, rows: int, target_steps: int, draft_steps: int, prompts: int) -> dict[str, float]:
    """Train both adapters in `folder`, and return tokens per round: without adapter, with the target's, with both."""
    adapter, data = folder / "adapter", folder / "rows.jsonl"
    write_rows(data, rows)
    train_target_adapter(data, adapter, target_steps)
    without, plain = tokens_per_round(None, prompts)
    before, text = tokens_per_round(adapter, prompts)
    train_draft_adapter(data, adapter, draft_steps, rows)
    after, same = tokens_per_round(adapter, prompts)
    assert same == text != plain, "the draft's adapter changes no text"
    return {"without": round(without, 3), "target's alone": round(before, 3), "both": round(after, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--rows", 64), ("--target-steps", 40), ("--draft-steps", 40), ("--prompts", 12)):
        parser.add_argument(name, type=int, default=value)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    found = measure(folder, *vars(arguments).values())
    shutil.rmtree(folder)
    print(*table(["adapter", "tokens per round"], list(found.items())), sep="\n")
    print(json.dumps({"bench": "draft_adapters", "machine": machine(), "commit": commit(), **found}))


if __name__ == "__main__":
    main()
