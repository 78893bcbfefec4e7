"""Shapes that follow the load on the embedded pair, whose acceptance is real: against every static shape and none.

    python -m tests.bench adaptive_pair --data eval/gsm8k.jsonl eval/mt_bench.jsonl [--device cuda] [--batches 1 8 32]

Greedy chat answers to the first turns of each file's questions (JSON lines with "turns"), without --data to held-out
prompts; local engines without Ray and HTTP, costs measured as a start measures them, the prefix cache off. A pass
answers all questions. The first pass of a batch size is told apart: the choice still learns in it. Then the engine runs
until it has had --warm-up steps, and of --passes more the best counts; arms take turns. Tokens/s while decoding (the
time of the answers less that of the same prompts with one token), acceptance length, steps by shape and by reason, what
the choice reaches of the best static shape and of none, and how many answers differ from those without a draft. A
Markdown table, then one JSON line.
"""

import argparse
import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.quality.decoding import Decoding
from tests.bench.round import commit, hardware
from tests.support.embedded import CHAIN, TREE, eos_token_ids, measured_spec
from tests.support.prompts import held_out_prompts, tokenized

SHAPES = {"chain": CHAIN, "tree": TREE}


@dataclasses.dataclass(frozen=True)
class Turn:
    """answers: token ids, of each prompt. steps: by shape and by reason."""

    tokens_per_s: float
    acceptance_length: float
    answers: list[list[int]]
    steps: Counter[str]


@dataclasses.dataclass(frozen=True)
class Row:
    """Figures by arm: tokens/s of the best pass and of the first one, acceptance length and steps of the best pass,
    and the number of answers that differ from those without a draft."""

    prompts: str
    batch: int
    tokens_per_s: dict[str, float]
    first_tokens_per_s: dict[str, float]
    acceptance_length: dict[str, float]
    steps: dict[str, dict[str, int]]
    different: dict[str, int]

    def reached(self, shapes: str) -> tuple[float, float, float]:
        """What the choice among these shapes reaches of the better of static and none, the same of the first pass, and
        what it reaches of none."""
        best, first = (
            rates[f"{shapes}, adaptive"] / max(rates["none"], rates[f"{shapes}, static"])
            for rates in (self.tokens_per_s, self.first_tokens_per_s)
        )
        return best, first, self.tokens_per_s[f"{shapes}, adaptive"] / self.tokens_per_s["none"]


def arms() -> dict[str, SpeculativeConfig | None]:
    found: dict[str, SpeculativeConfig | None] = {"none": None}
    for name, shape in SHAPES.items():
        found[f"{name}, static"] = dataclasses.replace(shape, adaptive=False)
        found[f"{name}, adaptive"] = dataclasses.replace(shape, adaptive=True)
    return found


def answers(engine: LocalEngine, prompts: list[list[int]], max_tokens: int, batch: int) -> Turn:
    sampling = SamplingParams(max_tokens, 0.0, stop_token_ids=eos_token_ids())
    decoded = Decoding()
    decoded.add(engine, prompts, sampling, batch)
    return Turn(
        decoded.tokens / decoded.wall_s,
        decoded.tokens_per_round,
        [list(request.output) for request in decoded.requests],
        decoded.steps + decoded.reasons,
    )


def measure(
    engines: dict[str, LocalEngine], name: str, prompts: list[list[int]], batch: int, arguments: argparse.Namespace
) -> Row:
    def turn(engine: LocalEngine) -> Turn:
        return answers(engine, prompts, arguments.max_tokens, batch)

    first = {}
    for arm, engine in engines.items():
        before = engine.scheduler.stats.num_steps
        first[arm] = turn(engine)
        while engine.scheduler.stats.num_steps < before + arguments.warm_up:
            turn(engine)
    passes = [{arm: turn(engine) for arm, engine in engines.items()} for _ in range(arguments.passes)]
    best = {arm: max((of[arm] for of in passes), key=lambda of: of.tokens_per_s) for arm in engines}
    expected = first["none"].answers
    return Row(
        name,
        batch,
        {arm: of.tokens_per_s for arm, of in best.items()},
        {arm: of.tokens_per_s for arm, of in first.items()},
        {arm: of.acceptance_length for arm, of in best.items()},
        {arm: dict(of.steps) for arm, of in best.items()},
        {arm: sum(a != b for a, b in zip(of.answers, expected, strict=True)) for arm, of in best.items()},
    )


def questions(paths: Sequence[Path], count: int) -> dict[str, list[list[int]]]:
    """Token ids of each file's first questions, as chat prompts."""
    if not paths:
        return {"held out": tokenized(held_out_prompts(count, seed=11))}
    return {
        path.stem: tokenized([json.loads(line)["turns"][0] for line in path.read_text().splitlines()[:count]])
        for path in paths
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", type=Path, default=[], help="JSON lines with `turns`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--questions", type=int, default=32, help="of each file")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=200, help="steps of each batch size before what is measured")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        most = max(arguments.batches)
        engines = {
            arm: stack.enter_context(local_engine(measured_spec(config, max_running=most, device=arguments.device)))
            for arm, config in arms().items()
        }
        for name, prompts in questions(arguments.data, arguments.questions).items():
            for batch in arguments.batches:
                asked = prompts if batch > 1 else prompts[: max(1, len(prompts) // 4)]
                rows.append(measure(engines, name, asked, batch, arguments))
                print(rows[-1], flush=True)
    reached_of = " | ".join(f"{shapes} of best, first, of none" for shapes in SHAPES)
    print(f"\n| prompts | batch | {' | '.join(arms())} | {reached_of} | different |")
    print("| --- " * (len(arms()) + 5) + "|")
    for row in rows:
        each = (f"{row.tokens_per_s[a]:.0f} ({row.acceptance_length[a]:.2f})" for a in arms())
        reached = ("{:.3f}, {:.3f}, {:.3f}".format(*row.reached(shapes)) for shapes in SHAPES)
        print(f"| {row.prompts} | {row.batch} | {' | '.join((*each, *reached))} | {sum(row.different.values())} |")
    found = [dataclasses.asdict(row) for row in rows]
    print(json.dumps({"bench": "adaptive_pair", "hardware": hardware(), "commit": commit(), "rows": found}))


if __name__ == "__main__":
    main()
