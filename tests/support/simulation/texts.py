"""Replays real answers: drafts that the embedded pair accepted on four kinds of text, on the costs of a CPU.

    python -m tests.support.simulation.texts [--draft dspark] [--batch 1] [--seeds 2] [--orders 8]

The scheduler and the choice of shapes are the real ones. What a round of each shape accepts at each token was recorded
once (`tests.support.simulation.record_texts`): eight answers of each kind, of 64 tokens at most. One kind of text
follows the other. Prints each kind's rate over that of the best static shape, which runs the same answers in the same
order.
"""

import argparse
import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from aerie.speculative.tree_shape import TreeShape
from aerie.workers.config import PLAIN, RoundShapes
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from tests.support.embedded import BLOCK_TREE, DFLASH2_TREE, TREE
from tests.support.simulation.answers import Answers, Pair, PairRank, Slot
from tests.support.simulation.shapes import misread

RECORDED = Path(__file__).with_name("texts.json")
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
PER_NAT = 10  # digits of a recorded min-entropy are tenths of a nat
DRAFTS = {
    name: dataclasses.replace(config, adaptive=True)
    for name, config in {"dspark": BLOCK_TREE, "eagle3": TREE, "dflash2": DFLASH2_TREE}.items()
}
BATCHES = (1, 8, 32)
# CPU ms of a round at one request, as `python -m tests.bench draft_methods` had them on two machines
ROUND_MS = {
    "plain": 13.0, "2/1/3": 21.0, "4/1/5": 24.0, "8/4/16": 37.5, "3/1/4": 23.5, "4/2/8": 31.0, "5/4/16": 38.0,
}  # fmt: skip
# those of DFlash2, whose head is smaller than DSpark's
DFLASH2_MS = {"2/1/3": 19.4, "4/1/5": 23.0, "6/2/8": 27.5, "7/4/16": 32.0}
ROW_MS = 0.55, 0.8  # of each further request's row: up to 8 requests, and to 32
HOST_MS = 0.3


@dataclass(frozen=True)
class Answer:
    """kind: of its text. prompt_tokens: of its prompt. min_entropies: [tokens - 1] nats of the target after each token.
    accepted: [shapes - 1] of [tokens - 1], after each token."""

    kind: str
    prompt_tokens: int
    min_entropies: Sequence[float]
    accepted: Sequence[Sequence[int]]

    @property
    def num_tokens(self) -> int:
        return len(self.accepted[0]) + 1


@cache
def recorded(draft: str) -> dict[str, list[Answer]]:
    """Return recorded answers, by kind of text."""
    texts = json.loads(RECORDED.read_text())[draft]["texts"]
    return {
        kind: [
            Answer(
                kind,
                prompt,
                [DIGITS.index(digit) / PER_NAT for digit in entropies],
                [[DIGITS.index(digit) for digit in digits] for digits in accepted],
            )
            for prompt, entropies, *accepted in answers
        ]
        for kind, answers in texts.items()
    }


@cache
def recorded_shapes(draft: str) -> RoundShapes:
    """Return the shapes that were recorded, which may be fewer than the draft's engine chooses from now."""
    _, *names = json.loads(RECORDED.read_text())[draft]["shapes"]
    shapes, in_block = DRAFTS[draft].shapes, DRAFTS[draft].shape.in_block
    found = [TreeShape.of(*map(int, name.split("/")), in_block=in_block) for name in names]
    return dataclasses.replace(shapes, shapes=(PLAIN, *found), default=len(found))


def costs_of(shapes: RoundShapes) -> CostTable:
    rounds, round_ms = [], ROUND_MS | (DFLASH2_MS if shapes.drafted_by == "dflash2" else {})
    for shape in shapes.shapes:
        alone = round_ms[shape.name]
        at_8 = alone + 7 * ROW_MS[0] * shape.width
        rounds.append(RoundCosts(BATCHES, (alone, at_8, at_8 + 24 * ROW_MS[1] * shape.width), (1e-4,) * 3))
    default = rounds[shapes.default].ms
    chunks = tuple(tuple(ms + 0.6 * tokens for tokens in (16, 128, 512)) for ms in (8.0, *default))
    return CostTable(tuple(rounds), (0, *BATCHES), (16, 128, 512), chunks, (shapes.default,) * 4)


class TextRank(PairRank):
    """Accepts what was recorded of the answer that the last token of a prompt is the number of."""

    def __init__(self, pair: Pair, seed: int, answers: Sequence[Answer]) -> None:
        super().__init__(pair, seed)
        self._answers = answers

    def min_entropy(self, slot: Slot) -> float | None:
        nats = self._answers[slot.prompt].min_entropies
        return nats[min(slot.emitted, len(nats)) - 1] if slot.left > 0 else None

    def accepts(self, slot: Slot, shape: int, most: int) -> int:
        if shape == 0:
            return 0
        return min(most, self._answers[slot.prompt].accepted[shape - 1][slot.emitted - 1])


@dataclass(frozen=True)
class Texts:
    """One draft's engine, and the order of its answers. told: by what factor the start measured each shape too slow."""

    draft: str
    told: Sequence[float] = ()

    @property
    def shapes(self) -> RoundShapes:
        return recorded_shapes(self.draft)

    def engine(self, answers: Sequence[Answer], seed: int, shape: int | None = None) -> Answers:
        """An engine for these answers. shape: the only one that it runs."""
        shapes = self.shapes
        actual = costs_of(shapes)
        told = misread(actual, [(factor,) * len(BATCHES) for factor in self.told]) if self.told else None
        pair = Pair(shapes, (), actual, HOST_MS, told=told)
        return Answers(
            pair,
            seed,
            None if shape is None else lambda has_prompts: shape,
            lambda pair, seed: TextRank(pair, seed, answers),
        )

    def rates(
        self,
        answers: Sequence[Answer],
        groups: Sequence[Sequence[int]],
        batch: int,
        seed: int,
        shape: int | None = None,
    ) -> tuple[list[float], list[Counter[str]]]:
        """Return tokens per ms of groups of answers, by their numbers, one group after the other, and their steps."""
        engine, found, steps = self.engine(answers, seed, shape), list[float](), list[Counter[str]]()
        for group in groups:
            before = engine.steps
            asked = [([1] * (answers[i].prompt_tokens - 1) + [i], answers[i].num_tokens) for i in group]
            found.append(engine.rate(batch, asked))
            steps.append(engine.steps - before)
        return found, steps


def in_turn(answers: Sequence[Answer], order: Sequence[str]) -> list[list[int]]:
    """Return the numbers of each kind's answers, in an order of kinds."""
    return [[i for i, each in enumerate(answers) if each.kind == kind and each.num_tokens > 1] for kind in order]


def shares(
    of: Texts, answers: Sequence[Answer], groups: Sequence[Sequence[int]], batch: int, seed: int
) -> list[tuple[str, float, int, Counter[str]]]:
    """Return each group's kind, its rate over the best static one's, that shape, and its steps."""
    static = [of.rates(answers, groups, batch, seed, shape)[0] for shape in range(len(of.shapes))]
    adaptive, steps = of.rates(answers, groups, batch, seed)
    best = np.array(static)
    return [
        (answers[group[0]].kind, adaptive[i] / best[:, i].max(), int(best[:, i].argmax()), steps[i])
        for i, group in enumerate(groups)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", choices=DRAFTS, default="dspark")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=2, help="of each order of the kinds")
    parser.add_argument("--orders", type=int, default=8)
    parser.add_argument("--steps", action="store_true", help="print the steps of each group")
    given = parser.parse_args()
    of = Texts(given.draft)
    by_kind = recorded(given.draft)
    answers = [answer for some in by_kind.values() for answer in some]
    orders = list(itertools.permutations(by_kind))
    random.Random(1).shuffle(orders)
    found: dict[str, list[float]] = {kind: [] for kind in by_kind}
    after: dict[str, list[float]] = {kind: [] for kind in by_kind}
    for order, seed in itertools.product(orders[: given.orders], range(given.seeds)):
        for i, (kind, share, best, steps) in enumerate(shares(of, answers, in_turn(answers, order), given.batch, seed)):
            (after if i else found)[kind].append(share)
            if given.steps:
                print(i, kind, f"{share:.3f}", of.shapes.shapes[best].name, dict(steps))
    for name, each in (("first", found), ("after others", after)):
        for kind, values in each.items():
            if values:
                print(f"{name}, {kind}: mean {np.mean(values):.3f}, lowest {min(values):.3f}, of {len(values)}")


if __name__ == "__main__":
    main()
