"""How often a draft's first guess is the target's choice, by position in one long text, with windows and without.

    python -m tests.bench.window_by_position --held gsm8k/test.jsonl [--length 4096] [--texts 3]
                                             [--windows 0 1024 512 256] [--pair DIR] [--rope-theta 200000]

The embedded pair, or the one in a folder, reads chats that people wrote, other people's questions and answers one after
the other; at every position the head's first choice is compared with the target's. So nothing is generated, and a text
of 4,096 tokens takes a CPU seconds. The embedded target was trained on texts of a few hundred tokens: with its own
rotary base it loses its way after about 500, with one of 200,000 it reads on; its head is as it was trained. The
target's loss by position says how far either can be trusted. Window 0 is none. A Markdown table of shares, then one
JSON line.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedModel

import speculative.training.draft_model as draft_model
from speculative.training.draft_files import load_draft
from speculative.training.draft_model import BranchCache, Eagle3Head
from speculative.training.rows import read_conversations
from speculative.training.vocabulary import DraftVocabulary
from tests.bench.long_pair import pieces, stretched_target
from tests.bench.machine import git
from tests.support.prompts import MODELS

BLOCK = 256  # rows that attend at once
LOGITS = 512  # rows whose logits are there at once


def windowed_attention(window: int) -> Callable[[Tensor, BranchCache], Tensor]:
    """`draft_model.branch_attention` of a first step, in which a row sees the last `window` rows; 0 for all."""

    def attend(query: Tensor, cache: BranchCache) -> Tensor:
        (keys,), (values,) = cache.keys, cache.values
        length, parts = query.shape[3], []
        for first in range(0, length, BLOCK):
            low, high = max(0, first + 1 - window) if window else 0, min(first + BLOCK, length)
            row = torch.arange(first, high, device=query.device).unsqueeze(1)
            column = torch.arange(low, high, device=query.device)
            hidden = column > row
            if window:
                hidden |= column <= row - window
            scores = query[:, :, :, first:high] @ keys[:, :, None, low:high].transpose(-1, -2)
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
            parts.append(weights @ values[:, :, None, low:high])
        return torch.cat(parts, 3)

    return attend


@torch.no_grad()
def read(target: PreTrainedModel, head: Eagle3Head, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a text [1, T]: the target's choices [T] and losses [T - 1], and what the head reads of it."""
    out = target.base_model(input_ids=ids, output_hidden_states=True, use_cache=False)
    to_logits, choices, losses = target.get_output_embeddings(), [], []
    for rows, wanted in zip(out.last_hidden_state[0].split(LOGITS), ids[0].roll(-1).split(LOGITS), strict=True):
        logits = to_logits(rows)
        choices.append(logits.argmax(-1))
        losses.append(functional.cross_entropy(logits, wanted, reduction="none"))
    captured = torch.cat([out.hidden_states[layer] for layer in head.method.capture], dim=-1)
    return torch.cat(choices), torch.cat(losses)[:-1].cpu(), target.get_input_embeddings()(ids), captured


@torch.no_grad()
def agreement(head: Eagle3Head, vocabulary: DraftVocabulary, choices: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
    """[T - 1]: 1 where the guess of row n, of token n + 2, is the target's choice at n + 1."""
    states = head(*seen, 1)[0][0]
    guesses = torch.cat([vocabulary.target_ids[head.logits(rows).argmax(-1)] for rows in states.split(LOGITS)])
    return (guesses[:-1] == choices[1:]).float().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", nargs="+", required=True, help="rows that the pair has not read")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 1024, 512, 256])
    parser.add_argument("--pair", type=Path, default=MODELS, help="folder with `target` and `draft`")
    parser.add_argument("--rope-theta", type=float, help="of the target, in place of its own")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.pair / "target")
    target = stretched_target(arguments.pair / "target", arguments.length, arguments.rope_theta).eval()
    target = target.to("cuda" if torch.cuda.is_available() else "cpu")
    head, vocabulary = load_draft(arguments.pair / "draft", target)
    parts = pieces(read_conversations(arguments.held), tokenizer)
    edges = [0, *(1 << power for power in range(9, 20) if 1 << power < arguments.length), arguments.length]
    losses, shares = [], {window: [] for window in arguments.windows}
    for seed in range(arguments.texts):
        random.Random(seed).shuffle(parts)
        text = itertools.islice(itertools.chain([tokenizer.bos_token_id], *parts), arguments.length)
        choices, loss, *seen = read(target, head, torch.tensor([list(text)], device=target.device))
        losses.append(loss)
        for window in arguments.windows:
            draft_model.branch_attention = windowed_attention(window)
            shares[window].append(agreement(head, vocabulary, choices, (seen[0], seen[1])))
    spans = list(itertools.pairwise(edges))
    print("| positions | " + " | ".join(f"{low:,} to {high:,}" for low, high in spans) + " |")
    print("| --- |" + " --- |" * len(spans))
    found = {}
    for name, rows in (("target's loss", losses), *((window or "no window", shares[window]) for window in shares)):
        values = [float(torch.cat([row[low:high] for row in rows]).mean()) for low, high in spans]
        found[str(name)] = values
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |", flush=True)
    commit = git("rev-parse", "--short", "HEAD")
    print(json.dumps({"bench": "window_by_position", "commit": commit, "edges": edges, "found": found}))


if __name__ == "__main__":
    main()
