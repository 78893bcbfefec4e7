"""Tokens a round of the embedded hybrid with its own module: chains, trees, and smaller heads of the draft.

    python -m tests.bench hybrid_acceptance

Every prompt is answered greedily and drawn, in float32 on a CPU; an answer that differs from the one without drafts is
an error. Rows are the most frequent tokens by `token_map.json`.
"""

import argparse
import json
from pathlib import Path

from aerie.deploy.bench.figures import table
from aerie.workers.scheduling.request import Request
from tests.speculative.drafts.test_trained_mtp import CHAIN, TREE, answers
from tests.support import ROOT

MODEL = ROOT / "tests" / "models" / "hybrid_tiny"
SHAPES = {"chain 3/1/4": CHAIN, "tree 3/2/6": (3, 2, 6), "tree 5/4/8": TREE}


def tokens_a_round(requests: list[Request]) -> float:
    """1 + accepted / rounds."""
    histograms = [request.acceptance_histogram for request in requests]
    accepted = sum(k * count for histogram in histograms for k, count in enumerate(histogram))
    return 1 + accepted / sum(map(sum, histograms))


def main() -> int:
    """Print a table and one JSON line; 1 if an answer differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench hybrid_acceptance")
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 256, 128, 64], help="of the draft's head; 0: all")
    parser.add_argument("--model", type=Path, default=MODEL)
    arguments = parser.parse_args()
    plain = [request.output for request in answers(None, model=arguments.model)]
    found: dict[str, list[float]] = {}
    num_different = 0
    for rows in arguments.rows:
        row = found[str(rows or "all")] = []
        for shape in SHAPES.values():
            requests = answers(shape, model=arguments.model, draft_vocab_size=rows)
            num_different += sum(a.output != b for a, b in zip(requests, plain, strict=True))
            row += [tokens_a_round(requests[::2]), tokens_a_round(requests[1::2])]
    heads = [f"{name}, {kind}" for name in SHAPES for kind in ("greedy", "drawn")]
    print(*table(["rows", *heads], [(rows, *(f"{n:.2f}" for n in row)) for rows, row in found.items()]), sep="\n")
    print(json.dumps({"columns": heads, "tokens_a_round": found, "different": num_different}))
    return 1 if num_different else 0
