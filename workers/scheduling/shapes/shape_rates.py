"""Estimates tokens and milliseconds of a round of every tree shape at the current load, with their uncertainty.

`aerie.workers.scheduling.shapes.shape_choice` computes them every few steps; pure.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.shapes.acceptance import UPPER_ERRORS, Acceptance, Bools, Ints
from aerie.workers.scheduling.step_time import Step, StepTime

# Share of drafting in a round, measured with the embedded pair on a CPU: 0.2 for EAGLE-3's trees, 0.3 for block drafts.
DRAFTING_SHARE = 1 / 4
KNOWN_ERROR = 0.12  # relative error up to which a time counts as known
CHANGE_SHARE = 1 / 12  # extra time of the first round after a change; measured on an H200's host


class Load(NamedTuple):
    """The requests of the step being planned.

    slots: [n] slots of the requests that run a round.
    numbers: [num_slots] number of the request in each slot.
    speculative: [num_slots] whether the request speculates.
    kv_tokens: total committed tokens of the n requests.
    with_prompts: whether prompt chunks may run with the rounds.
    speculates: whether any of the n requests speculates.
    limit_ms: a shape slower than the last one may be chosen only if its rounds take at most this.
    rare_sampling: whether any of them needs sampling for which only `RoundShapes.unrestricted` shapes are captured.
    verifies: [n] whether a round of the request in flight verifies drafts; None: none does.
    """

    slots: Ints
    numbers: Ints
    speculative: Bools
    kv_tokens: int
    with_prompts: bool = False
    speculates: bool = True
    rare_sampling: bool = False
    limit_ms: float = math.inf
    verifies: Bools | None = None


@dataclass(frozen=True)
class Rates:
    """Estimates of a round of every shape; one list item per shape.

    tokens: expected tokens of a round, over all requests.
    ms: expected milliseconds of a round.
    upper: upper confidence bound on tokens per millisecond.
    errors: standard deviation of the logarithm of a round's time relative to the current shape's.
    best: highest expected tokens per millisecond of any shape.
    shapes: the shapes.
    """

    tokens: Sequence[float]
    ms: Sequence[float]
    upper: Sequence[float]
    errors: Sequence[float]
    best: float
    shapes: RoundShapes

    @classmethod
    def of(cls, load: Load, current: int, acceptance: Acceptance, step_time: StepTime, shapes: RoundShapes) -> "Rates":
        """Evaluate all shapes. current: the shape to which `errors` are relative."""
        slots = load.slots
        expected, upper = acceptance.expected_tokens(slots, load.numbers[slots], load.speculative[slots])
        steps = [Step(shape, len(slots), load.kv_tokens) for shape in range(len(shapes))]
        ms, errors = [step_time.ms(step) for step in steps], step_time.errors_between(steps, steps[current])
        tokens, columns = expected.tolist(), zip(expected.tolist(), upper.tolist(), ms, errors, strict=True)
        bounds = [
            count / took * math.exp(math.hypot(math.log(most / count), UPPER_ERRORS * error))
            for count, most, took, error in columns
        ]
        return cls(tokens, ms, bounds, errors, max(map(_per, tokens, ms)), shapes)

    @property
    def per_ms(self) -> list[float]:
        """Return each shape's expected tokens per millisecond."""
        return list(map(_per, self.tokens, self.ms))

    def loss(self, shape: int) -> float:
        """Return the regret of a round of `shape`: its milliseconds, minus those of its tokens at the best rate."""
        return self.ms[shape] - self.tokens[shape] / self.best

    def min_loss(self, shape: int) -> float:
        """Return a lower bound on `loss`, at least 0, with which probes are charged: an uncertain time counts one
        standard error lower, so that a probe is not charged for delays by other processes."""
        return max(
            0.0, self.ms[shape] * math.exp(-max(0.0, self.errors[shape] - KNOWN_ERROR)) - self.tokens[shape] / self.best
        )

    def change_loss(self, shape: int, other: int) -> float:
        """Return the milliseconds that a change from one shape to the other and back costs: one round of the larger
        shape verifies only the drafts of the smaller one; with `verifies_last_drafts`, drafts may be discarded. Copied
        drafts do not depend on the previous shape."""
        if self.shapes.model_free or shape == other:
            return 0.0
        if not self.shapes.verifies_last_drafts:
            return abs(self.tokens[shape] - self.tokens[other]) / self.best
        fast, slow = sorted((shape, other), key=self.ms.__getitem__)
        discarded_ms = 0.0 if self.pays_once_drafted(slow, fast) else DRAFTING_SHARE * self.ms[slow]
        return discarded_ms + CHANGE_SHARE * self.ms[fast]

    def pays_once_drafted(self, shape: int, other: int) -> bool:
        """Return whether verifying existing drafts of `shape` gives more tokens per millisecond than a round of
        `other`."""
        rate = self.tokens[shape] / (self.ms[shape] * (1.0 - DRAFTING_SHARE))
        return rate >= self.tokens[other] / self.ms[other]

    def best_of(self, shapes: Iterable[int]) -> int:
        """Return the shape with the smallest loss in `shapes`: the best also in mixed batches, because a chunk adds the
        same time to rounds of any shape."""
        return min(shapes, key=self.loss)


def verified_shape(shapes: RoundShapes, rates: Rates | None, drafted: int, next_shape: int) -> int:
    """Return the index of the shape to verify in a step that drafts `next_shape`, after trees of `drafted`.

    With `verifies_last_drafts` it has at most as many nodes as were drafted, and useful drafts are not discarded.
    """
    if not shapes.verifies_last_drafts or drafted == next_shape:
        return next_shape
    is_wider = shapes[drafted].width > shapes[next_shape].width
    keeps = not is_wider or (rates is not None and rates.pays_once_drafted(drafted, next_shape))
    return drafted if keeps else next_shape


def _per(tokens: float, ms: float) -> float:
    return tokens / ms
