"""Expected tokens and milliseconds of every tree shape at the current load, with their uncertainty.

`workers.scheduling.shape_choice` evaluates it every few steps; pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from workers.scheduling.acceptance.survival import Bools, Floats, Ints
from workers.scheduling.step_time import Step, StepTime

PROMISING_ABOVE = 1 / 40  # share by which a promising shape may be better than the best one
HOPE = 1.5  # standard errors by which a promising shape may be better than its estimate
SURE = 3.0  # standard errors of its time that a shape that cannot be the best one is away from it
TIMED_ERROR = 0.12  # relative error of a shape's time above which it is uncertain


class Acceptance(Protocol):
    """Expected tokens of drafts: `Survival` or `MatchSurvival`."""

    def family(self, shape: int) -> int: ...

    def depth(self, shape: int) -> int: ...

    def age(self, num_rounds: int) -> None: ...

    def expected_tokens(self, slots: Ints, users: Ints, speculative: Bools) -> tuple[Floats, Floats]: ...


class Load(NamedTuple):
    """The requests of a step that is planned.

    slots: [n] slots of the requests that run a round.
    users: [slots] number of the request that has each slot.
    speculative: [slots] whether it wants drafts.
    kv_tokens: committed tokens of the n requests together.
    with_prompts: prompt chunks may run beside the rounds.
    speculates: one of the n requests wants drafts.
    limit_ms: maximum milliseconds of rounds of a slower shape than the last.
    rare_sampling: one of them needs sampling that only `RoundShapes.unrestricted` shapes are captured for.
    """

    slots: Ints
    users: Ints
    speculative: Bools
    kv_tokens: int
    with_prompts: bool = False
    speculates: bool = True
    rare_sampling: bool = False
    limit_ms: float = math.inf


@dataclass(frozen=True)
class Rates:
    """Estimates of a round of every shape; one list item per shape.

    tokens: expected tokens of a round, all requests together.
    ms: expected milliseconds of a round.
    hoped: tokens per millisecond at the upper end of what is likely.
    errors: standard deviation of the logarithm of a round's time relative to the current shape's.
    best: highest expected tokens per millisecond of any shape.
    changes_are_free: drafts are there whatever shape ran before.
    """

    tokens: Sequence[float]
    ms: Sequence[float]
    hoped: Sequence[float]
    errors: Sequence[float]
    best: float
    changes_are_free: bool = False

    @classmethod
    def of(
        cls, load: Load, current: int, survival: Acceptance, step_time: StepTime, changes_are_free: bool = False
    ) -> "Rates":
        """Evaluate all shapes. current: the shape that `errors` are relative to."""
        slots, num_requests = load.slots, len(load.slots)
        expected, hoped = survival.expected_tokens(slots, load.users[slots], load.speculative[slots])
        tokens = expected.tolist()
        steps = [Step(shape, num_requests, load.kv_tokens) for shape in range(len(tokens))]
        ms = [step_time.ms(step) for step in steps]
        errors = step_time.errors_between(steps, steps[current])
        return cls(
            tokens,
            ms,
            [
                count / took * math.exp(math.hypot(math.log(most / count), HOPE * error))
                for count, most, took, error in zip(tokens, hoped.tolist(), ms, errors, strict=True)
            ],
            errors,
            max(count / took for count, took in zip(tokens, ms, strict=True)),
            changes_are_free,
        )

    def loss(self, shape: int) -> float:
        """Milliseconds that a round of `shape` takes beyond what its tokens take at the best rate; at least 0."""
        return self.ms[shape] - self.tokens[shape] / self.best

    def certain_loss(self, shape: int) -> float:
        """`loss` for probes: the time of an uncertain shape counts one standard error lower, so that a probe is not
        charged when other processes slow it down."""
        least_ms = self.ms[shape] * math.exp(-max(0.0, self.errors[shape] - TIMED_ERROR))
        return max(0.0, least_ms - self.tokens[shape] / self.best)

    def change_loss(self, shape: int, other: int) -> float:
        """Milliseconds that changing from one shape to another and back costs: one round of the larger shape verifies
        the drafts of the smaller one."""
        return 0.0 if self.changes_are_free else abs(self.tokens[shape] - self.tokens[other]) / self.best

    def least_loss(self, shapes: Sequence[int]) -> int:
        """Return the one of `shapes` that loses least."""
        return min(shapes, key=self.loss)

    def is_promising(self, shape: int) -> bool:
        """Whether the shape may well be better than the best one."""
        return self.hoped[shape] > (1.0 + PROMISING_ABOVE) * self.best

    def is_vague(self, shape: int) -> bool:
        """Whether the shape's time is uncertain."""
        return self.errors[shape] > TIMED_ERROR

    def is_possible(self, shape: int) -> bool:
        """Whether the shape is the best one if its time is within `SURE` standard errors."""
        return self.tokens[shape] / self.ms[shape] * math.exp(SURE * self.errors[shape]) > self.best


def shapes_told_by(survival: Acceptance, num_shapes: int) -> list[npt.NDArray[np.bool_]]:
    """[num_shapes] of [num_shapes]: the shapes that rounds of each shape teach about: those of its family that are not
    deeper."""
    others = range(num_shapes)

    def tells(shape: int, other: int) -> bool:
        is_kin = shape > 0 and survival.family(other) == survival.family(shape)
        return other == shape or (is_kin and survival.depth(other) <= survival.depth(shape))

    return [np.array([tells(shape, other) for other in others], np.bool_) for shape in others]
