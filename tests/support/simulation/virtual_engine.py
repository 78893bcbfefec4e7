"""The real engine of the embedded pair on a virtual clock: regret of the choice of shapes without a machine's noise.

    python -m tests.support.simulation.virtual_engine [--data gsm8k.jsonl ...] [--draft dspark] [--batch 1] [--passes 3]

Models, texts, acceptance, scheduler, shape choice and step times are the real ones. Steps last as long as a table says,
so that every static shape and the choice are compared exactly. One kind of text follows the other; each is answered
`--passes` times. Prints each pass's rate over that of the best static shape, and where time was lost.
"""

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from aerie.speculative.build import plan_engine
from aerie.workers.runner.build import BuiltRank, build_rank
from aerie.workers.scheduling.plan import SamplingParams, StepPlan, StepResult
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.scheduler import Scheduler
from tests.bench.quality.draft_methods import texts
from tests.support.embedded import eos_token_ids, measured_spec
from tests.support.simulation.answers import Answers, Pair, PairRank
from tests.support.simulation.texts import DRAFTS, HOST_MS, costs_of


class VirtualRank(PairRank):
    """Runs plans on a real rank."""

    def __init__(self, pair: Pair, seed: int, built: BuiltRank) -> None:
        super().__init__(pair, seed)
        self._built = built

    def result(self, plan: StepPlan) -> StepResult:
        self._built.worker.submit(plan)
        return self._built.worker.take()


class VirtualEngine(Answers):
    """One arm on a built rank, which several arms may use one after the other. shape: the only one that it runs."""

    def __init__(self, built: BuiltRank, pair: Pair, seed: int = 0, shape: int | None = None) -> None:
        self._layout = built.layout
        choose = None if shape is None else lambda has_prompts: shape
        super().__init__(pair, seed, choose, lambda pair, seed: VirtualRank(pair, seed, built))

    def _new_scheduler(self, pair: Pair) -> Scheduler:
        return Scheduler.of(self._layout, self.rank.clock)

    def answer(self, prompts: Sequence[list[int]], max_tokens: int, batch: int) -> float:
        """Return tokens per ms of greedy answers."""
        sampling, started_s = SamplingParams(max_tokens, 0.0, stop_token_ids=eos_token_ids()), self.rank.clock.now
        requests = [Request(f"{self._num_requests + i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        self._num_requests += len(requests)
        self._engine.run(requests, batch)
        return sum(len(request.output) for request in requests) / (self.rank.clock.now - started_s) / 1e3


@dataclasses.dataclass(frozen=True)
class Pass:
    """tokens_per_ms: of the answers. leg_ms, leg_tokens: of its steps, by reason and shape."""

    tokens_per_ms: float
    leg_ms: dict[tuple[str, str], float]
    leg_tokens: dict[tuple[str, str], int]

    def lost(self, best: float) -> dict[str, float]:
        """Return each leg's milliseconds beyond what its tokens take at the best rate, as shares of all that time."""
        needed_ms = sum(self.leg_tokens.values()) / best
        found = {
            f"{reason} {shape}": (ms - self.leg_tokens[reason, shape] / best) / needed_ms
            for (reason, shape), ms in self.leg_ms.items()
        }
        return {leg: round(share, 3) for leg, share in sorted(found.items(), key=lambda each: -abs(each[1]))}


def passes(
    engine: VirtualEngine, asked: dict[str, list[list[int]]], max_tokens: int, batch: int, count: int
) -> dict[str, list[Pass]]:
    found: dict[str, list[Pass]] = {}
    for text, prompts in asked.items():
        for _ in range(count):
            ms, tokens = dict(engine.rank.leg_ms), Counter(engine.rank.leg_tokens)
            rate = engine.answer(prompts, max_tokens, batch)
            of_pass = {leg: now - ms.get(leg, 0.0) for leg, now in engine.rank.leg_ms.items() if now != ms.get(leg)}
            found.setdefault(text, []).append(Pass(rate, of_pass, engine.rank.leg_tokens - tokens))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", type=Path, default=[], help="JSON lines with `turns`")
    parser.add_argument("--draft", choices=DRAFTS, default="dspark")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=8, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.05, help="of a step's time, for the choice alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    spec = measured_spec(DRAFTS[given.draft])
    spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, measure_costs=False))
    built = build_rank(spec.worker, plan_engine(spec), 0, "")
    shapes, asked = built.layout.shapes, texts(given.data, given.prompts)
    pair = Pair(shapes, (), costs_of(shapes), HOST_MS, noise=0.0)
    static = [
        passes(VirtualEngine(built, pair, shape=shape), asked, given.tokens, given.batch, 1)
        for shape in range(len(shapes))
    ]
    chosen = passes(
        VirtualEngine(built, dataclasses.replace(pair, noise=given.noise)),
        asked, given.tokens, given.batch, given.passes,
    )  # fmt: skip
    for text, each in chosen.items():
        rates = [of[text][0].tokens_per_ms for of in static]
        best = max(range(len(shapes)), key=rates.__getitem__)
        print(text, {shape.name: round(rate, 4) for shape, rate in zip(shapes.shapes, rates, strict=True)})
        print("   static:", static[best][text][0].lost(rates[best]))
        for one in each:
            print(f"   {one.tokens_per_ms / rates[best]:.3f}", one.lost(rates[best]), flush=True)


if __name__ == "__main__":
    main()
