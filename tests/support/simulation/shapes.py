"""Simulates an engine to compare the choice of tree shapes with each static shape. Round times come from a table,
drafts are accepted at random.

The choice may start from wrong costs, as after a start on a loaded machine. Steps have noise; requests end and others
follow; batch, acceptance and the machine's speed may change at any time.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.shapes.shape_choice import Load, ShapeChoice
from aerie.workers.scheduling.shapes.shape_rates import verified_shape
from aerie.workers.scheduling.step_time import Step, StepTime

Floats, Ints = npt.NDArray[np.float64], npt.NDArray[np.int64]

BATCHES = (1, 8, 32, 64, 128, 256)
# milliseconds of a round on one H200, Llama-3.1-8B; at 256, and trees from 128 on, as between the two before
PLAIN_MS = (4.2, 4.4, 5.1, 5.7, 7.7, 11.7)
CHAIN_MS = (4.9, 5.3, 6.9, 9.6, 17.1, 32.1)
TREE_MS = (5.4, 6.0, 10.4, 16.7, 29.3, 54.5)
KV_MS = 131072 / 4.0e12 * 1e3  # of a token: its bytes over the memory's rate
CHAIN = SpeculativeConfig("", "eagle3", 3, 1, 4).shapes
TREE = SpeculativeConfig("", "eagle3", 5, 4, 16).shapes

_DRAFTING_SHARE = 0.2  # of a round, measured for EAGLE-3's trees on a CPU; the choice assumes a value for all drafts


def between(low: tuple[float, ...], high: tuple[float, ...], share: float) -> tuple[float, ...]:
    """Milliseconds of a shape that is a share of the way from one to another."""
    return tuple(a + (b - a) * share for a, b in zip(low, high, strict=True))


def table(*rounds: tuple[float, ...], kv_ms: float = KV_MS) -> CostTable:
    """A table by shape: milliseconds of a round at each of `BATCHES`."""
    costs = tuple(RoundCosts(BATCHES, ms, (kv_ms,) * len(BATCHES)) for ms in rounds)
    return CostTable(costs, (0,), (16,), ((5.0,),), (len(rounds) - 1,))


GPU = {
    CHAIN: table(PLAIN_MS, between(PLAIN_MS, CHAIN_MS, 0.4), CHAIN_MS),
    TREE: table(PLAIN_MS, CHAIN_MS, between(CHAIN_MS, TREE_MS, 0.4), TREE_MS),
}
# the embedded pair on a CPU, where a batch's rows cost what they compute: speculation pays for few requests only
CPU_PLAIN_MS = (11.0, 16.0, 36.0, 62.0, 115.0, 220.0)
CPU_CHAIN_MS = (16.5, 37.0, 105.0, 198.0, 380.0, 750.0)
CPU_TREE_MS = (24.0, 88.0, 300.0, 590.0, 1170.0, 2330.0)
CPU = {
    CHAIN: table(CPU_PLAIN_MS, between(CPU_PLAIN_MS, CPU_CHAIN_MS, 0.5), CPU_CHAIN_MS, kv_ms=1e-4),
    TREE: table(
        CPU_PLAIN_MS, CPU_CHAIN_MS, between(CPU_CHAIN_MS, CPU_TREE_MS, 0.4), CPU_TREE_MS, kv_ms=1e-4
    ),
}  # fmt: skip


def misread(costs: CostTable, factors: Sequence[Sequence[float]]) -> CostTable:
    """The table that a start would have measured had every round taken `factors[shape][point]` times as long."""
    rounds = tuple(
        RoundCosts(
            of.num_requests, tuple(ms * f for ms, f in zip(of.ms, wrong, strict=True)), of.ms_per_kv_token
        )
        for of, wrong in zip(costs.rounds, factors, strict=True)
    )  # fmt: skip
    return CostTable(rounds, costs.chunk_requests, costs.chunk_tokens, costs.chunk_ms, costs.mixed_shapes)


def chances_of(shapes: RoundShapes, mean: float) -> Floats:
    """[shapes]: with which the best path goes on, at every depth, so that a chain of four drafts has this mean of
    tokens a round; a tree's paths go on more often."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(5)) < mean else (low, middle)
    gains = [np.log2(shape.width / shape.max_new_tokens) * 0.3 + 1 for shape in shapes.shapes]
    found: Floats = 1 - (1 - low) ** np.array(gains)
    return found


@dataclass
class Engine:
    """Two steps in flight; drafts are accepted with the same chance at every depth.

    batch: requests that run; may be changed while they do.
    actual: what rounds take. told: what the choice is told that they take; without one the truth.
    took: milliseconds of a round of each shape, if it is not what `actual` says.
    noise: of a step's time, as the sigma of a lognormal factor. spikes: share of steps that take five times as long.
    pace: what every step's time is multiplied by.
    request_steps: after which a slot has another request; 0 for never.
    """

    shapes: RoundShapes
    batch: int
    context: int
    chances: Floats
    seed: int = 0
    took: Sequence[float] | None = None
    actual: CostTable | None = None
    told: CostTable | None = None
    noise: float = 0.03
    spikes: float = 0.0
    pace: float = 1.0
    request_steps: int = 0
    max_batch: int = 256
    seen: Counter[tuple[int, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.choice = ShapeChoice(self.shapes, self.max_batch)
        self.costs = self.actual or GPU[self.shapes]
        self.step_time = StepTime(self.told or self.costs, self.max_batch)
        self.numbers = np.arange(self.max_batch)
        self.speculative = np.ones(self.max_batch, np.bool_)
        self.random = np.random.default_rng(self.seed)
        self.depth = np.array([shape.depth for shape in self.shapes.shapes])
        self.drafted = self.num_steps = 0
        self.ms = self.tokens = 0.0
        self.late: deque[tuple[Ints, Ints, int, int, npt.NDArray[np.int32]]] = deque()

    @property
    def slots(self) -> Ints:
        return np.arange(self.batch)

    def step(self, with_prompts: bool = False, rare_sampling: bool = False) -> int:
        """Run one; returns the shape that was chosen for it."""
        slots, speculative = self.slots, self.speculative[: self.batch]
        if self.request_steps and self.num_steps % self.request_steps == 0:
            self.numbers += self.max_batch
        self.num_steps += 1
        numbers, kv_tokens = self.numbers[slots], self.batch * self.context
        load = Load(
            slots, self.numbers, self.speculative, kv_tokens, with_prompts, bool(speculative.any()), rare_sampling
        )
        chosen = self.choice.choose(load, self.step_time)
        ran = verified_shape(self.shapes, self.choice.rates, self.drafted, chosen)
        verified, possible = min(self.drafted, ran), int(min(self.depth[self.drafted], self.depth[ran]))
        chance = float(self.chances[verified])
        going_on = np.log(self.random.random(self.batch)) / np.log(chance)
        accepted = np.minimum(going_on.astype(np.int32), possible) if verified else np.full(self.batch, -1, np.int32)
        self.late.append((slots, numbers, self.drafted, ran, np.where(speculative, accepted, -1)))
        if len(self.late) > 1:
            of_slots, of_users, drafted, of_shape, reported = self.late.popleft()
            if self.choice.learns_from_step(of_shape, False):
                self.choice.acceptance.record(of_shape, of_slots, of_users, np.full(len(of_slots), drafted), reported)
        took_ms = self.round_ms(chosen)
        if ran != chosen:
            drafting_ms, own_ms = (_DRAFTING_SHARE * self.round_ms(shape) if shape else 0.0 for shape in (chosen, ran))
            took_ms = self.round_ms(ran) - own_ms + drafting_ms
        noise = float(self.random.lognormal(0, self.noise)) * (5.0 if self.random.random() < self.spikes else 1.0)
        if ran == chosen:
            self.step_time.observe(Step(chosen, self.batch, kv_tokens), took_ms * noise)
        self.ms += took_ms
        # as expected, for less noise than what was drawn
        self.tokens += self.batch + speculative.sum() * sum(chance**k for k in range(1, possible + 1))
        self.drafted = chosen
        self.seen[chosen, self.choice.reason] += 1
        return chosen

    def round_ms(self, shape: int) -> float:
        """Return what a round takes now, without noise."""
        if self.took is not None:
            return self.took[shape]
        return self.pace * self.costs.round_ms(shape, self.batch, self.batch * self.context)

    def rate(self, num_steps: int) -> float:
        """Tokens per millisecond of so many steps."""
        ms, tokens = self.ms, self.tokens
        for _ in range(num_steps):
            self.step()
        return (self.tokens - tokens) / (self.ms - ms)

    def static(self, shape: int) -> float:
        """Return tokens per ms of one static shape."""
        tokens = sum(float(self.chances[shape]) ** k for k in range(int(self.depth[shape]) + 1))
        return self.batch * tokens / self.round_ms(shape)

    def best(self) -> float:
        """Return tokens per ms of the best static shape."""
        return max(self.static(shape) for shape in range(len(self.shapes)))
