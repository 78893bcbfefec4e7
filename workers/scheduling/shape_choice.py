"""Which shape a step verifies and drafts: the one that promises most tokens per millisecond.

The scheduler asks once a step and tells what rounds reported and how long they took; ranks are told by the plan. Pure:
the costs are handed in, steps are its clock, and equal calls give equal answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from workers.config import RoundShapes
from workers.scheduling.cost_correction import CostCorrection
from workers.scheduling.cost_table import CostTable
from workers.scheduling.survival import Bools, Floats, Ints, Survival

EVALUATE_EVERY = 8  # steps; estimates hardly move in fewer
FIRST_RESULTS = 3  # steps after which a shape's first results are here
CHANGE_ABOVE = 1 / 128  # share of the time that a change must save, which costs about a step's drafts,
SETTLED = 16  # unless the shape has run for fewer steps than these;
CHANGE_SOON_ABOVE = 1 / 64  # then it must save this
LEARN_EVERY_MS = 2.0  # of rounds: to learn from each of faster ones takes a good part of a host's time
PROMPTS_LINGER = 8  # steps after a prompt chunk in which the next one is expected
PROBING_SHARE = 1 / 200  # of the time, which probes may cost
PROBE_AGE = 128  # steps after which what is known of a shape is old
PROBE_ROUNDS = 32  # of requests, that a probe should see
TIMED_ROUNDS = 5  # of a probe that is to find out how long a shape takes


class Reason(StrEnum):
    """Why a step has its shape."""

    STATIC = "static"  # no choice: not adaptive, or no costs are known
    NOBODY = "nobody"  # wants drafts
    BEST = "best"  # most tokens per millisecond
    PROMPTS = "prompts"  # the best of those that run beside prompt chunks
    SAMPLING = "sampling"  # the best of those that are captured for every kind of sampling
    PROBE = "probe"  # to learn what it would accept, or how long it takes


@dataclass(frozen=True)
class Load:
    """What a step is going to run.

    slots, users: [n] of the requests that run a round, and their numbers.
    speculative: [n], who wants drafts.
    kv_tokens: that they have committed together.
    with_prompts: whether prompt chunks may run beside them.
    rare_sampling: whether any of them needs what smaller shapes are not captured for.
    """

    slots: Ints
    users: Ints
    speculative: Bools
    kv_tokens: int
    with_prompts: bool = False
    rare_sampling: bool = False


@dataclass(frozen=True)
class _Rates:
    """Of every shape: expected tokens and milliseconds of a round. best: most tokens per millisecond of any."""

    tokens: Floats
    ms: Floats
    best: float

    def loss(self, shape: int) -> float:
        """Milliseconds that a round of `shape` takes more than its tokens are worth, at the best rate; at least 0."""
        return float(self.ms[shape] - self.tokens[shape] / self.best)


class ShapeChoice:
    """reason: of the last choice. expected: its tokens per millisecond, by shape; empty while nothing is known."""

    def __init__(self, shapes: RoundShapes, num_slots: int) -> None:
        self.survival = Survival(shapes, num_slots)
        self.reason = Reason.STATIC
        self.expected: dict[str, float] = {}
        self._shapes = shapes
        self._current = shapes.default
        self._rates: _Rates | None = None
        self._costs: CostTable | None = None
        self._num_slots = num_slots
        self._correction = CostCorrection(len(shapes), num_slots)
        self._allowed: tuple[int, ...] = ()
        self._num_requests = 0
        self._until_evaluation = 0
        self._since_prompts = PROMPTS_LINGER
        self._step = 0
        self._changed = 0  # the step that changed the shape
        self._informed = np.full(len(shapes), -PROBE_AGE, np.int64)  # the last step that told of a shape
        self._told = [self._told_by(shape) for shape in range(len(shapes))]
        self._credit_ms = 0.0
        self._unlearnt_ms = 0.0
        self._probe, self._probe_left = 0, 0

    def record(self, slots: Ints, users: Ints, drafted: Ints, shape: int, accepted: npt.NDArray[np.int32]) -> None:
        """See `Survival.record`. What probes report is learnt from always, other rounds' every LEARN_EVERY_MS."""
        if not self._shapes.adaptive or not shape:
            return
        if self._rates is not None and shape == self._current:
            self._unlearnt_ms += float(self._rates.ms[shape])
            if self._unlearnt_ms < LEARN_EVERY_MS:
                return
        self._unlearnt_ms = 0.0
        self.survival.record(slots, users, drafted, shape, accepted)

    def observe(self, shape: int, num_requests: int, expected_ms: float, took_ms: float) -> None:
        """A step of so many rounds, and of nothing else, took `took_ms` where the costs say `expected_ms`."""
        if self._shapes.adaptive:
            self._correction.observe(shape, num_requests, expected_ms, took_ms)

    def choose(self, load: Load, costs: CostTable | None) -> int:
        """The index of the shape that the next step verifies and drafts."""
        num_requests = len(load.slots)
        self._since_prompts = 0 if load.with_prompts else self._since_prompts + 1
        if not self._shapes.adaptive or costs is None or num_requests == 0:
            self.reason = Reason.STATIC
            return self._shapes.default
        self._step += 1
        allowed = self._allowed_shapes(load)
        self._until_evaluation -= 1
        moved = abs(num_requests - self._num_requests) * 8 > self._num_requests
        if self._until_evaluation <= 0 or moved or allowed != self._allowed or costs is not self._costs:
            if costs is not self._costs and self._costs is not None:
                self._correction = CostCorrection(len(self._shapes), self._num_slots)  # other ranks
            self._costs = costs
            self._evaluate(load, costs, allowed)
        assert self._rates is not None
        self._credit_ms = min(self._credit_ms + PROBING_SHARE * float(self._rates.ms[self._current]), 1e3)
        if len(allowed) == len(self._shapes):
            probe = self._probed(num_requests)
            if probe:
                self.reason = Reason.PROBE
                self._informed[self._told[probe]] = self._step
                return probe
            self.reason = Reason.BEST
        else:
            self._probe_left = 0
            self.reason = Reason.PROMPTS if self._since_prompts < PROMPTS_LINGER else Reason.SAMPLING
        self._informed[self._told[self._current]] = self._step
        return self._current

    def _allowed_shapes(self, load: Load) -> tuple[int, ...]:
        if self._shapes.eager:
            return tuple(range(len(self._shapes)))
        if self._since_prompts < PROMPTS_LINGER:
            return self._shapes.beside_chunks(len(load.slots), load.rare_sampling)
        return self._shapes.unrestricted if load.rare_sampling else tuple(range(len(self._shapes)))

    def _evaluate(self, load: Load, costs: CostTable, allowed: Sequence[int]) -> None:
        """Look at costs and survival again, and change the shape if that saves enough. Beside prompt chunks too the
        best is what loses least: a chunk costs the same beside any."""
        num_requests, shapes = len(load.slots), self._shapes
        tokens = self.survival.expected_tokens(load.slots, load.users, load.speculative)
        factor = self._correction.factor
        ms = np.array(
            [
                costs.round_ms(shape, num_requests, load.kv_tokens) * factor(shape, num_requests)
                for shape in range(len(shapes))
            ]
        )
        rates = tokens / ms
        self._rates = found = _Rates(tokens, ms, float(rates.max()))
        self.expected = {shape.name: float(rate) for shape, rate in zip(shapes.shapes, rates, strict=True)}
        best = min(allowed, key=found.loss)
        saved = found.loss(self._current) - found.loss(best)
        enough = CHANGE_ABOVE if self._step - self._changed >= SETTLED else CHANGE_SOON_ABOVE
        changes = self._current not in allowed or saved > enough * float(ms[self._current])
        if changes:
            self._current, self._changed = best, self._step
        self._allowed, self._num_requests = tuple(allowed), num_requests
        self._until_evaluation = FIRST_RESULTS if changes or self._step == 1 else EVALUATE_EVERY

    def _probed(self, num_requests: int) -> int:
        """The shape to try in this step, 0 if none is. A probe begins when what it may lose has been saved for. Its
        first round still verifies what the former shape drafted, or nothing."""
        if self._probe_left:
            self._probe_left -= 1
            if self._probe_left == 0:
                self._until_evaluation = min(self._until_evaluation, FIRST_RESULTS)
            return self._probe if self._probe != self._current else 0
        found = self._rates
        assert found is not None
        others = [shape for shape in range(1, len(self._shapes)) if shape != self._current]
        old = [shape for shape in others if self._step - self._informed[shape] > PROBE_AGE]
        untimed = [shape for shape in others if not self._correction.is_known(shape, num_requests)]
        if old:
            shape = min(old, key=lambda index: int(self._informed[index]))
            rounds = min(9, 2 + -(-PROBE_ROUNDS // num_requests))
            lost_ms = rounds * float(found.ms[shape] - num_requests / found.best)  # if nothing is accepted
        elif untimed:
            shape = min(untimed, key=found.loss)
            rounds = TIMED_ROUNDS
            lost_ms = rounds * found.loss(shape)
        else:
            return 0
        if lost_ms > self._credit_ms:
            return 0
        self._credit_ms -= lost_ms
        self._probe, self._probe_left = shape, rounds - 1
        return shape

    def _told_by(self, shape: int) -> Bools:
        """[shapes]: which ones rounds of `shape` tell about: all of its family that go no deeper."""
        survival, others = self.survival, range(len(self._shapes))
        same = [survival.family(other) == survival.family(shape) for other in others]
        told = [other and shape and same[other] and survival.depth(other) <= survival.depth(shape) for other in others]
        return np.array(told, np.bool_)
