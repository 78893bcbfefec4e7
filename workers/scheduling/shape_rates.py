"""Estimates tokens and milliseconds of a round of every tree shape at the current load, with their uncertainty.

`aerie.workers.scheduling.shape_choice` computes them every few steps; pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.acceptance.survival import Bools, Floats, Ints
from aerie.workers.scheduling.timing.step import Step
from aerie.workers.scheduling.timing.step_time import StepTime

PROMISING_ABOVE = 1 / 40  # a shape is promising if its upper bound exceeds the best rate by this share
UPPER_ERRORS = 1.5  # a shape's upper bound assumes a time this many standard errors lower
# A shape gets a free timing probe only if it would be the best with its time this many standard errors lower. The
# second value is for free changes of shape, where a probe costs less.
RULED_OUT_ERRORS, FREE_RULED_OUT_ERRORS = 2.0, 3.0
TIMED_ERROR = 0.12  # a shape's time is uncertain above this relative error
# Share of drafting in a round, measured with the embedded pair on a CPU: 0.2 for EAGLE-3's trees, 0.3 for block drafts.
DRAFTING_SHARE = 1 / 4
CHANGE_SHARE = 1 / 12  # extra time of the first round after a change; measured on an H200's host


class Reason(StrEnum):
    """Why a step has its shape."""

    STATIC = "static"  # no choice: not adaptive, or costs are unknown
    NOT_WANTED = "not_wanted"  # no request speculates
    BEST = "best"  # most tokens per millisecond
    PROMPTS = "prompts"  # the best of the shapes for mixed batches
    SAMPLING = "sampling"  # the best of the shapes captured for every kind of sampling
    TARGET = "target"  # a better shape would exceed the ITL target
    PROBE = "probe"  # to measure its acceptance or time


class Acceptance(Protocol):
    """Estimates of accepted drafts: `Survival` or `MatchSurvival`."""

    def family(self, shape: int) -> int: ...

    def depth(self, shape: int) -> int: ...

    def age(self, num_rounds: int) -> None: ...

    def expected_tokens(self, slots: Ints, numbers: Ints, speculative: Bools) -> tuple[Floats, Floats]: ...


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
    changes_are_free: whether a change of shape costs nothing, because drafts do not depend on the previous shape.
    verifies_last_drafts: see `RoundShapes`.
    """

    tokens: Sequence[float]
    ms: Sequence[float]
    upper: Sequence[float]
    errors: Sequence[float]
    best: float
    changes_are_free: bool = False
    verifies_last_drafts: bool = False

    @classmethod
    def of(
        cls,
        load: Load,
        current: int,
        survival: Acceptance,
        step_time: StepTime,
        shapes: RoundShapes,
        timed: "Rates | None" = None,
    ) -> "Rates":
        """Evaluate all shapes. current: the shape to which `errors` are relative. timed: rates whose times are used."""
        slots, num_requests = load.slots, len(load.slots)
        expected, upper_tokens = survival.expected_tokens(slots, load.numbers[slots], load.speculative[slots])
        tokens = expected.tolist()
        if timed is not None:
            ms, errors = timed.ms, timed.errors
        else:
            steps = [Step(shape, num_requests, load.kv_tokens) for shape in range(len(tokens))]
            ms = [step_time.ms(step) for step in steps]
            errors = step_time.errors_between(steps, steps[current])
        return cls(
            tokens,
            ms,
            [
                count / took * math.exp(math.hypot(math.log(most / count), UPPER_ERRORS * error))
                for count, most, took, error in zip(tokens, upper_tokens.tolist(), ms, errors, strict=True)
            ],
            errors,
            max(count / took for count, took in zip(tokens, ms, strict=True)),
            shapes.model_free,
            shapes.verifies_last_drafts,
        )

    def loss(self, shape: int) -> float:
        """Return the regret of a round of `shape`: its milliseconds, minus those of its tokens at the best rate."""
        return self.ms[shape] - self.tokens[shape] / self.best

    def min_loss(self, shape: int) -> float:
        """Return a lower bound on `loss`, at least 0, with which probes are charged. An uncertain time counts one
        standard error lower, so that a probe is not charged for delays by other processes."""
        least_ms = self.ms[shape] * math.exp(-max(0.0, self.errors[shape] - TIMED_ERROR))
        return max(0.0, least_ms - self.tokens[shape] / self.best)

    def change_loss(self, shape: int, other: int) -> float:
        """Return the milliseconds that a change from one shape to the other and back costs: one round of the larger
        shape verifies only the drafts of the smaller one; with `verifies_last_drafts`, drafts may be discarded."""
        if self.changes_are_free or shape == other:
            return 0.0
        if not self.verifies_last_drafts:
            return abs(self.tokens[shape] - self.tokens[other]) / self.best
        fast, slow = sorted((shape, other), key=self.ms.__getitem__)
        thrown_away_ms = 0.0 if self.pays_once_drafted(slow, fast) else DRAFTING_SHARE * self.ms[slow]
        return thrown_away_ms + CHANGE_SHARE * self.ms[fast]

    def pays_once_drafted(self, shape: int, other: int) -> bool:
        """Return whether verifying existing drafts of `shape` gives more tokens per millisecond than a round of
        `other`."""
        rate = self.tokens[shape] / (self.ms[shape] * (1.0 - DRAFTING_SHARE))
        return rate >= self.tokens[other] / self.ms[other]

    def min_loss_shape(self, shapes: Sequence[int]) -> int:
        """Return the shape with the smallest loss in `shapes`."""
        return min(shapes, key=self.loss)

    def is_promising(self, shape: int) -> bool:
        """Return whether the shape's upper bound is well above the best rate."""
        return self.upper[shape] > (1.0 + PROMISING_ABOVE) * self.best

    def has_uncertain_time(self, shape: int) -> bool:
        """Return whether the shape's time is uncertain."""
        return self.errors[shape] > TIMED_ERROR

    def may_be_best(self, shape: int) -> bool:
        """Return whether the shape would be the best with its time `RULED_OUT_ERRORS` standard errors lower."""
        num_errors = FREE_RULED_OUT_ERRORS if self.changes_are_free else RULED_OUT_ERRORS
        return self.tokens[shape] / self.ms[shape] * math.exp(num_errors * self.errors[shape]) > self.best


def verified_shape(shapes: RoundShapes, rates: Rates | None, drafted: int, next_shape: int) -> int:
    """Return the index of the shape to verify in a step that drafts `next_shape`, after trees of `drafted`.

    With `verifies_last_drafts` it has at most as many nodes as were drafted, and useful drafts are not discarded.
    """
    if not shapes.verifies_last_drafts or drafted == next_shape:
        return next_shape
    is_wider = shapes[drafted].width > shapes[next_shape].width
    keeps = not is_wider or (rates is not None and rates.pays_once_drafted(drafted, next_shape))
    return drafted if keeps else next_shape


def informed_shapes(survival: Acceptance, num_shapes: int) -> list[npt.NDArray[np.bool_]]:
    """Return, for each shape, a mask [num_shapes] of the shapes whose acceptance its rounds measure: itself, and shapes
    of its family that are not deeper."""
    others = range(num_shapes)

    def informs(shape: int, other: int) -> bool:
        same_family = shape > 0 and survival.family(other) == survival.family(shape)
        return other == shape or (same_family and survival.depth(other) <= survival.depth(shape))

    return [np.array([informs(shape, other) for other in others], np.bool_) for shape in others]
