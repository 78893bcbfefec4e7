"""Speculation with the embedded pair on this CPU: tokens/s while decoding, with and without, and acceptance length.

Greedy answers to held-out prompts, local engines without Ray and HTTP, one thread per rank as the server has. Decoding
time is the time of the answers less that of the same prompts with max_tokens=1, the prefix cache off. The arms take
turns, so that a change of the machine's load reaches all; ratios are taken within a turn.
"""

import contextlib
import dataclasses
import statistics
from dataclasses import dataclass

import torch

from aerie.deploy.bench.figures import table
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.host.finding import Finding, Report
from tests.bench.quality.decoding import Decoding
from tests.support.embedded import BLOCK_TREE, CHAIN, TREE, eos_token_ids, measured_spec
from tests.support.prompts import held_out_prompts, tokenized

ARMS: dict[str, SpeculativeConfig | None] = {
    "off": None,
    "EAGLE-3 chain 3/1/4": CHAIN,
    "EAGLE-3 tree 5/4/16": TREE,
    "DSpark tree 8/4/16": BLOCK_TREE,
}
SERVED = "DSpark tree 8/4/16"  # what deploy/eagle.yaml asks for
REPEATS = 3
SPEEDUP = 1.3


@dataclass(frozen=True)
class Turn:
    """One arm's figures in one turn."""

    tokens_per_s: float
    acceptance_length: float


@dataclass(frozen=True)
class Case:
    """concurrency: requests that decode together."""

    tensor_parallel: int
    concurrency: int
    num_prompts: int
    max_tokens: int

    @property
    def name(self) -> str:
        return f"TP {self.tensor_parallel}, batch {self.concurrency}"


CASES = [Case(1, 1, 6, 96), Case(1, 8, 24, 96), Case(2, 1, 6, 96)]


def run(quick: bool) -> Report:
    """All cases; `quick`: a few tokens of the first."""
    cases = [Case(1, 1, 2, 8)] if quick else CASES
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = {case.name: measure(case, 1 if quick else REPEATS) for case in cases}
    finally:
        torch.set_num_threads(threads)
    rows = [
        (case, arm, figures["tokens_per_s"], figures["speedup"], figures["acceptance_length"])
        for case, arms in results.items()
        for arm, figures in arms.items()
    ]
    speedup = results["TP 1, batch 1"][SERVED]["speedup"]
    return Report(
        {"speculation_speedup": Finding(speedup, SPEEDUP, "x", at_least=True)},
        table(["engine", "speculation", "tokens/s", "x off", "acceptance length"], rows),
        results,
    )


def measure(case: Case, repeats: int) -> dict[str, dict[str, float]]:
    """Return by arm: medians of tokens_per_s and of speedup over "off" in the same turn; acceptance_length."""
    # Another seed than the tests', so that no threshold was tuned on these.
    prompts = tokenized(held_out_prompts(case.num_prompts, seed=11))
    turns: list[dict[str, Turn]] = []
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(local_engine(_spec(case, arm))) for name, arm in ARMS.items()}
        for engine in engines.values():
            Decoding().add(engine, prompts[:2], _sampling(4), case.concurrency)  # warm
        for _ in range(repeats):
            turns.append({name: _turn(engine, prompts, case) for name, engine in engines.items()})
    return {
        name: {
            "tokens_per_s": round(statistics.median(turn[name].tokens_per_s for turn in turns), 1),
            "speedup": round(statistics.median(t[name].tokens_per_s / t["off"].tokens_per_s for t in turns), 3),
            "acceptance_length": round(turns[0][name].acceptance_length, 3),
        }
        for name in ARMS
    }


def _spec(case: Case, arm: SpeculativeConfig | None) -> EngineSpec:
    draft = None if arm is None else dataclasses.replace(arm, draft_tp=1)
    return measured_spec(draft, case.tensor_parallel, measure_costs=False)


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, 0.0, stop_token_ids=eos_token_ids())


def _turn(engine: LocalEngine, prompts: list[list[int]], case: Case) -> Turn:
    decoded = Decoding()
    decoded.add(engine, prompts, _sampling(case.max_tokens), case.concurrency)
    return Turn(decoded.tokens / decoded.wall_s, decoded.tokens_per_round)
