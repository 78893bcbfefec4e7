"""Simulates texts that copy and do not, by turns, and an engine that drafts from matches (`suffix_shapes`).

Compares the choice of a shape with each static shape. Round times come from a table; everything is seeded.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aerie.speculative.tree_shape import suffix_shapes
from aerie.workers.scheduling.shapes.shape_choice import Load, ShapeChoice
from aerie.workers.scheduling.step_time import Step, StepTime
from tests.support.simulation.shapes import CHAIN_MS, CPU_PLAIN_MS, PLAIN_MS, between, table

SHAPES = suffix_shapes(15, adaptive=True)
WIDE_MS = (5.6, 8.5, 17.0, 30.0, 56.0, 108.0)  # 16 rows of a request, as estimated for Qwen3-8B on an H200
COSTS = {
    "gpu": table(PLAIN_MS, CHAIN_MS, between(CHAIN_MS, WIDE_MS, 0.4), WIDE_MS),
    # a CPU, where rows cost what they compute
    "cpu": table(CPU_PLAIN_MS, *(tuple(ms * f for ms in CPU_PLAIN_MS) for f in (1.6, 2.3, 3.8)), kv_ms=1e-4),
}
IN_FLIGHT = 2
Ints = npt.NDArray[np.int64]


@dataclass
class CopiedTexts:
    """One request in each of `batch` slots.

    copied, free: tokens of a stretch of either kind. Copied tokens have a match of 12 and are right with chance 0.97;
    free ones have one of 2 with chance 0.3, right with 0.2.
    """

    copied: int
    free: int
    batch: int
    costs: str
    seed: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.choice = ShapeChoice(SHAPES, self.batch)
        self.step_time = StepTime(COSTS[self.costs], self.batch)
        self.slots = np.arange(self.batch)
        self.done = self.slots * (self.copied + self.free) // self.batch  # tokens of each text
        self.length = np.zeros(self.batch, np.int64)
        self.late: deque[tuple[Ints, Ints, Ints, Step, float]] = deque()

    def rate(self, num_tokens: int, fixed: int | None = None) -> float:
        """Return tokens per millisecond of about so many tokens of each text. fixed: the shape of all rounds."""
        tokens = ms = 0.0
        speculative = np.ones(self.batch, np.bool_)
        while tokens < num_tokens * self.batch:
            verifies = np.full(self.batch, bool(self.late) and self.late[-1][3].shape > 0)
            load = Load(self.slots, self.slots, speculative, 0, verifies=verifies)
            shape = self.choice.choose(load, self.step_time) if fixed is None else fixed
            known = self.choice.acceptance.classes(self.slots, self.slots)
            counts, num_correct = self.round(SHAPES[shape].depth)
            took = COSTS[self.costs].round_ms(shape, self.batch)
            matches = np.stack((num_correct, self.length), 1)
            self.late.append((known, counts, matches, Step(shape, self.batch), took * self.random.lognormal(0, 0.02)))
            self.seen[SHAPES[shape].name] += 1
            tokens, ms = tokens + counts.sum(), ms + took
            if len(self.late) == IN_FLIGHT and fixed is None:
                known, counts, matches, ran, noisy = self.late.popleft()
                self.step_time.observe(ran, noisy)
                self.choice.acceptance.record_matches(
                    self.slots, self.slots, known, counts.astype(np.int32), matches.astype(np.int32)
                )
        return tokens / ms

    def round(self, depth: int) -> tuple[Ints, Ints]:
        """Return the emitted tokens and the number of right drafts, -1 without a match; then draw the next matches."""
        ahead = self.done[:, None] + np.arange(depth + 1)
        copies = ahead % max(1, self.copied + self.free) < self.copied
        right = np.where(copies, 0.97, np.where(copies[:, :1], 0.0, 0.2)) * (self.length > 0)[:, None]
        equal = (self.random.random(right.shape) < right).cumprod(1).sum(1)
        counts = np.minimum(equal, depth) + 1
        num_correct = np.where(self.length > 0, equal, -1)
        self.done = self.done + counts
        copies_next = self.done % max(1, self.copied + self.free) < self.copied
        self.length = np.where(copies_next, 12, 2 * (self.random.random(self.batch) < 0.3))
        return counts, num_correct


def share(copied: int, free: int, batch: int, costs: str, seed: int) -> tuple[float, float, Counter[str]]:
    """Return the choice's rate over the best static shape's and over plain decoding's, after a warm-up, and its
    steps."""
    num_tokens = -(-600 // (copied + free)) * (copied + free)
    texts = CopiedTexts(copied, free, batch, costs, seed)
    texts.rate(num_tokens)
    texts.seen.clear()
    rate = texts.rate(num_tokens)
    static = [CopiedTexts(copied, free, batch, costs, seed).rate(num_tokens, shape) for shape in range(len(SHAPES))]
    return rate / max(static), rate / static[0], texts.seen
