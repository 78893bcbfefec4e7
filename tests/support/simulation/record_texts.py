"""Record how many drafts every tree shape accepts at every token of real answers, and how sure the target is there.

    python -m tests.support.simulation.record_texts --data gsm8k.jsonl mt_bench.jsonl humaneval.jsonl

The embedded pair answers the first turns of each file's questions (JSON lines with "turns"), and prompts that end in
the beginning of a text to copy, greedily. Every round verifies its whole tree, but commits one token only, so that a
round starts at every token. So a replay (`tests.support.simulation.texts`) may run any shape at any token. Writes
`texts.json` beside this file; takes 4 CPU minutes.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from aerie.kernels.slots.commit import Commit
from aerie.kernels.tree import acceptance
from aerie.kernels.tree.acceptance import Accepted, Committed
from aerie.kernels.tree.nodes import Tree
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.bench.quality.draft_methods import texts
from tests.support.embedded import eos_token_ids, measured_spec
from tests.support.simulation.texts import DIGITS, DRAFTS, PER_NAT, RECORDED


@contextmanager
def roots_alone() -> Iterator[None]:
    """Commit one token a round meanwhile, and report what would have been accepted."""
    accept, committed, counts = acceptance.accept, acceptance.committed, list[Tensor]()

    def root_alone(tree: Tree, chosen: Tensor, enabled: Tensor, max_depth: int) -> Accepted:
        found = accept(tree, chosen, enabled, max_depth)
        counts.append(found.num_drafts)
        return Accepted(torch.zeros_like(found.path), torch.zeros_like(found.num_drafts), found.tokens)

    def reported(tree: Tree, accepted: Accepted, commit: Commit, length: Tensor) -> Committed:
        found = committed(tree, accepted, commit, length)
        return dataclasses.replace(found, reported=torch.where(found.reported >= 0, counts.pop(), -1))

    acceptance.accept, acceptance.committed = root_alone, reported
    try:
        yield
    finally:
        acceptance.accept, acceptance.committed = accept, committed


def accepted_by(engine: LocalEngine, prompts: list[list[int]], shape: int, max_tokens: int) -> list[tuple[str, str]]:
    """Return, for each prompt's answer, after each token but the last and a digit each: the target's min-entropy, and
    the drafts that a round of a shape accepts."""
    engine.scheduler.rounds.choose_shape = lambda shapes: shape
    before, found, nats = dict[str, list[int]](), dict[str, str](), dict[str, list[float]]()

    def noted(output: RequestOutput) -> None:
        request = output.request
        histogram, last = list(request.acceptance_histogram), before.get(request.request_id)
        before[request.request_id] = histogram
        nats.setdefault(request.request_id, []).extend(-of_token.logprob for of_token in output.logprobs or ())
        if last is not None:
            (accepted,) = (k for k, (old, new) in enumerate(zip(last, histogram, strict=True)) if new > old)
            found[request.request_id] = found.get(request.request_id, "") + DIGITS[accepted]

    sampling = SamplingParams(max_tokens, 0.0, stop_token_ids=eos_token_ids(), logprobs=0)
    requests = [Request(str(number), prompt, sampling) for number, prompt in enumerate(prompts)]
    with roots_alone():
        engine.run(requests, len(prompts), noted)
    told = [found.get(request.request_id, "") for request in requests]
    assert all(len(each) == len(request.output) - 1 for each, request in zip(told, requests, strict=True))
    entropies = ([min(round(PER_NAT * each), 35) for each in nats[request.request_id][1:]] for request in requests)
    return [("".join(map(DIGITS.__getitem__, each)), of) for each, of in zip(entropies, told, strict=True)]


def record(config: SpeculativeConfig, asked: dict[str, list[list[int]]], max_tokens: int) -> dict[str, object]:
    """Return an engine's shapes and, by text, each answer's prompt tokens, min-entropies, and accepted drafts by
    shape."""
    spec = measured_spec(config, max_running=max(map(len, asked.values())))
    spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, measure_costs=False))
    shapes, found = config.shapes, dict[str, list[list[object]]]()
    with local_engine(spec) as engine:
        for text, prompts in asked.items():
            started_s = time.process_time()
            by_shape = [accepted_by(engine, prompts, shape, max_tokens) for shape in range(1, len(shapes))]
            found[text] = [
                [len(prompt), told[0][0], *(accepted for _, accepted in told)]
                for prompt, *told in zip(prompts, *by_shape, strict=True)
            ]
            print(config.method, text, f"{time.process_time() - started_s:.0f} CPU s", flush=True)
    return {"shapes": [shape.name for shape in shapes.shapes], "texts": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", type=Path, required=True, help="JSON lines with `turns`")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--out", type=Path, default=RECORDED)
    given = parser.parse_args()
    torch.set_num_threads(1)
    asked = texts(given.data, given.prompts)
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.drafts:
        found[name] = record(DRAFTS[name], asked, given.tokens)
        given.out.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
