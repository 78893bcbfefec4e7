"""Accepted tokens a round of drafts that are copied from the text, alone and beside the embedded pair's EAGLE-3 head.

    python -m tests.bench copied_drafts [--prompts 24] [--tokens 96]

Every round verifies its whole shape, so the figures do not depend on the machine: tokens divided by rounds, of greedy
answers, rounds without a match included.
"""

import argparse
import sys
from dataclasses import replace

import torch

from aerie.deploy.bench.figures import table
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.support.embedded import CHAIN, TREE, embedded_spec, eos_token_ids
from tests.support.prompts import copying_prompts, held_out_prompts, tokenized

DRAFTS: dict[str, SpeculativeConfig | None] = {
    "none": None,
    "EAGLE-3 chain of 3": CHAIN,
    "EAGLE-3 tree of 16": TREE,
    "suffix 7": SpeculativeConfig(method="suffix", num_steps=7, num_draft_tokens=8),
    "suffix 15": SpeculativeConfig(method="suffix", num_steps=15, num_draft_tokens=16),
    "chain + suffix 8": replace(CHAIN, suffix_tokens=8),
    "tree + suffix 8": replace(TREE, suffix_tokens=8),
}


def texts(count: int) -> dict[str, list[list[int]]]:
    """Prompts as token ids, by kind."""
    problems = [text for i, text in enumerate(held_out_prompts(2 * count, seed=7)) if i % 4 != 3][:count]
    chats = [text for i, text in enumerate(held_out_prompts(4 * count, seed=8)) if i % 4 == 3][:count]
    return {"JSON to copy": copying_prompts(count), "word problems": tokenized(problems), "chat": tokenized(chats)}


def tokens_per_round(speculative: SpeculativeConfig | None, prompts: list[list[int]], max_tokens: int) -> float:
    """Return emitted tokens after the first of each answer, divided by the rounds that emitted them."""
    if speculative is not None:
        speculative = replace(speculative, adaptive=False)
    sampling = SamplingParams(max_tokens, 0.0, stop_token_ids=eos_token_ids())
    emitted: list[int] = []
    with local_engine(embedded_spec(speculative, debug=False)) as engine:
        requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
        engine.run(requests, 8, lambda output: emitted.append(len(output.tokens)))
    rounds = sum(count > 0 for count in emitted) - len(prompts)
    return (sum(emitted) - len(prompts)) / max(1, rounds)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench copied_drafts")
    parser.add_argument("--prompts", type=int, default=24, help="of each kind")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kinds, rows = texts(given.prompts), []
    for name, speculative in DRAFTS.items():
        found = [tokens_per_round(speculative, prompts, given.tokens) for prompts in kinds.values()]
        rows.append((name, *(f"{value:.2f}" for value in found)))
        print(rows[-1], flush=True)
    print(*table(["drafts", *kinds], rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
