"""Which shape a step verifies and drafts: the one that promises most tokens per millisecond.

The scheduler asks once a step and reports what rounds accepted; how long steps take is `StepTime`'s to say. Ranks are
told by the plan. Pure: steps are its clock, and equal calls give equal answers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from workers.config import RoundShapes
from workers.scheduling.step_time import Step, StepTime
from workers.scheduling.survival import Bools, Floats, Ints, Survival

EVALUATE_EVERY = 8  # steps; estimates hardly move in fewer
EVALUATE_EVERY_MS = 32.0  # of rounds, if they are faster: to evaluate takes 300 us of the host
CHANGING_EVERY_MS = 8.0  # the same while another shape seems better
FIRST_RESULTS = 3  # steps after which a shape's first results are here
CHANGE_ABOVE = 1 / 128  # share of the time that a better shape must save
LEARN_EVERY_MS = 4.0  # of rounds: to learn from each of faster ones takes a good part of a host's time
PROMPTS_LINGER = 8  # steps after a prompt chunk in which the next one is expected
PROBING_SHARE = 1 / 150  # of the time, which probes of promising shapes may cost
OLD_SHARE = 1 / 250  # the same of shapes of which nothing has been heard for long
FIRST_ROUNDS = 3  # whose time these may cost in advance
PROBE_AGE = 128  # steps after which what is known of a shape is old
MAX_PROBE_STEPS = 16  # of a probe whose shape stays promising
TIMED_STEPS = 2  # that tell how long a shape takes
TIMED_ERROR = 0.12  # of its time, above which it is to be timed again
PROMISING_ABOVE = 1 / 40  # what a promising shape may be better than the best one
HOPE = 1.5  # standard errors by which a promising shape may be better than its estimate


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
    """What is known of every shape.

    tokens, ms: [shapes], expected of a round.
    hoped: [shapes], tokens per millisecond that are not unlikely.
    errors: [shapes], standard deviation of the logarithm of its time over the current shape's.
    best: the most expected tokens per millisecond of any.
    """

    tokens: Floats
    ms: Floats
    hoped: Floats
    errors: Floats
    best: float

    def loss(self, shape: int) -> float:
        """Milliseconds that a round of `shape` takes more than its tokens are worth, at the best rate; at least 0."""
        return float(self.ms[shape] - self.tokens[shape] / self.best)

    def change_loss(self, shape: int, other: int) -> float:
        """Milliseconds that a change between two shapes costs: one round of the larger one has the drafts of the
        smaller one."""
        return abs(float(self.tokens[shape] - self.tokens[other])) / self.best

    def is_promising(self, shape: int) -> bool:
        """Whether the shape may be better than the best one by what is known."""
        return bool(self.hoped[shape] > (1.0 + PROMISING_ABOVE) * self.best)


@dataclass
class _Probe:
    """Steps of a shape that is not the best by what is known.

    least, most: steps of it; between them it ends once the shape is not promising.
    steps: so far.
    is_old: nothing had been heard of the shape for long.
    is_free: the shape had never run at this batch size.
    """

    shape: int
    least: int
    most: int
    steps: int = 1
    is_old: bool = False
    is_free: bool = False


class ShapeChoice:
    """reason: of the last choice. expected: its tokens per millisecond, by shape; empty while nothing is known."""

    def __init__(self, shapes: RoundShapes, num_slots: int) -> None:
        self.survival = Survival(shapes, num_slots)
        self.reason = Reason.STATIC
        self.expected: dict[str, float] = {}
        self._shapes = shapes
        self._current = shapes.default
        self._rates: _Rates | None = None
        self._step_time: StepTime | None = None
        self._allowed: tuple[int, ...] = ()
        self._num_requests = 0
        self._until_evaluation = 0
        self._since_prompts = PROMPTS_LINGER
        self._step = 0
        self._evaluated = 0  # the last step with an evaluation
        self._lost = 0.0  # rounds' time, since the shape is not the best
        self._informed = np.full(len(shapes), -PROBE_AGE, np.int64)  # the last step that told of a shape
        self._told = [self._told_by(shape) for shape in range(len(shapes))]
        # rounds' time that probes may cost now; below 0 after one that cost more
        self._credit = self._old_credit = 0.0
        self._unlearnt_ms = 0.0
        self._probe: _Probe | None = None
        self._ended: deque[tuple[int, _Probe]] = deque()  # by the step that they are charged in

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

    def choose(self, load: Load, step_time: StepTime | None) -> int:
        """The index of the shape that the next step verifies and drafts."""
        num_requests = len(load.slots)
        self._since_prompts = 0 if load.with_prompts else self._since_prompts + 1
        if not self._shapes.adaptive or step_time is None:
            self.reason = Reason.STATIC
            return self._shapes.default
        if num_requests == 0:  # prompts alone draft what their requests' first rounds will verify
            self.reason = Reason.PROMPTS
            return self._current if self._shapes.eager else self._shapes.default
        self._step += 1
        allowed = self._allowed_shapes(load)
        self._until_evaluation -= 1
        is_evaluated = False
        moved = abs(num_requests - self._num_requests) * 8 > self._num_requests
        if self._until_evaluation <= 0 or moved or allowed != self._allowed or step_time is not self._step_time:
            self._step_time = step_time
            self._evaluate(load, step_time, allowed)
            is_evaluated = True
        assert self._rates is not None
        self._credit += PROBING_SHARE
        self._old_credit += OLD_SHARE
        if not any(load.speculative):
            self._probe = None
        elif len(allowed) == len(self._shapes):
            self._continue_probe(load, step_time, is_evaluated)
        else:
            self._end_probe()
        shape = self._current
        if self._probe is not None:
            self.reason, shape = Reason.PROBE, self._probe.shape
        elif len(allowed) == len(self._shapes):
            self.reason = Reason.BEST
        else:
            self.reason = Reason.PROMPTS if self._since_prompts < PROMPTS_LINGER else Reason.SAMPLING
        self._informed[self._told[shape]] = self._step
        if shape == 0:
            self.survival.age(num_requests)
        return shape

    def _allowed_shapes(self, load: Load) -> tuple[int, ...]:
        if self._shapes.eager:
            return tuple(range(len(self._shapes)))
        if self._since_prompts < PROMPTS_LINGER:
            return self._shapes.beside_chunks(len(load.slots), load.rare_sampling)
        return self._shapes.unrestricted if load.rare_sampling else tuple(range(len(self._shapes)))

    def _evaluate(self, load: Load, step_time: StepTime, allowed: Sequence[int]) -> None:
        """Look at costs and survival again, and change the shape if that saves enough. Beside prompt chunks too the
        best is what loses least: a chunk costs the same beside any."""
        num_requests, shapes = len(load.slots), self._shapes
        tokens, hoped = self.survival.expected_tokens(load.slots, load.users, load.speculative)
        steps = [Step(shape, num_requests, load.kv_tokens) for shape in range(len(shapes))]
        ms = np.array([step_time.ms(step) for step in steps])
        errors = np.array([step_time.error_between(step, steps[self._current]) for step in steps])
        rates = tokens / ms
        more = np.exp(np.sqrt(np.log(hoped / tokens) ** 2 + (HOPE * errors) ** 2))
        self._rates = found = _Rates(tokens, ms, rates * more, errors, float(rates.max()))
        self._charge_probes(found)
        self.expected = {shape.name: float(rate) for shape, rate in zip(shapes.shapes, rates, strict=True)}
        best = min(allowed, key=found.loss)
        if self._current not in allowed or self._has_lost_enough(found, best):
            self._current, self._lost = best, 0.0
        self._allowed, self._num_requests = tuple(allowed), num_requests
        self._evaluated = self._step
        round_ms = float(found.ms[self._current])
        if self._step < EVALUATE_EVERY:
            self._until_evaluation = FIRST_RESULTS
        elif self._lost:
            self._until_evaluation = max(FIRST_RESULTS, int(CHANGING_EVERY_MS / round_ms))
        else:
            self._until_evaluation = _steps_between(round_ms)

    def _has_lost_enough(self, found: _Rates, best: int) -> bool:
        """Whether to change to the best shape: once rounds of the current one have lost as much as the change costs. A
        difference that comes and goes with the noise of the estimates costs no changes that way."""
        round_ms = float(found.ms[self._current])
        saved = (found.loss(self._current) - found.loss(best)) / round_ms
        num_steps = max(1, min(self._step - self._evaluated, _steps_between(round_ms)))
        self._lost = max(0.0, self._lost + num_steps * (saved - CHANGE_ABOVE))
        return self._lost * round_ms > found.change_loss(self._current, best)

    def _continue_probe(self, load: Load, step_time: StepTime, is_evaluated: bool) -> None:
        """Begin, go on with or end a probe. The first round of one still verifies what the former shape drafted, or
        nothing."""
        probe = self._probe
        if probe is None:
            if is_evaluated and not self._ended and step_time.is_settled:
                self._begin_probe(len(load.slots), step_time)
            return
        if probe.shape == self._current:
            self._probe = None  # it has become the best
            return
        if probe.steps >= FIRST_RESULTS:
            self._evaluate(load, step_time, self._allowed)
        assert self._rates is not None
        if probe.shape == self._current:
            self._probe = None
        elif probe.steps >= probe.most or (probe.steps >= probe.least and not self._rates.is_promising(probe.shape)):
            self._end_probe()
        else:
            probe.steps += 1

    def _begin_probe(self, num_requests: int, step_time: StepTime) -> None:
        """Begin a probe if one is due:

        - of a shape that has never run with so many requests, at once: nothing else tells how wrong the table is;
        - of one whose time is vague, or that is promising, as soon as former probes are paid for;
        - of one of which nothing has been heard for long, once its cost is saved up.

        So what probes cost is a small share of the time, and no shape is out of reach for ever.
        """
        found = self._rates
        assert found is not None
        others = [shape for shape in range(len(self._shapes)) if shape != self._current]
        untimed = [shape for shape in others if not step_time.has_run(Step(shape, num_requests))]
        if untimed:
            self._probe = _Probe(min(untimed, key=found.loss), TIMED_STEPS, TIMED_STEPS, is_free=True)
            return
        round_ms = float(found.ms[self._current])
        left_ms = (self._credit + FIRST_ROUNDS) * round_ms
        vague = [shape for shape in others if found.errors[shape] > TIMED_ERROR]
        vague = [shape for shape in vague if TIMED_STEPS * found.loss(shape) < left_ms]
        if vague:
            self._probe = _Probe(min(vague, key=found.loss), TIMED_STEPS, TIMED_STEPS)
            return
        promising = [shape for shape in others if found.is_promising(shape)]
        if promising and left_ms > 0.0:
            shape = max(promising, key=lambda index: float(found.hoped[index]))
            self._probe = _Probe(shape, FIRST_RESULTS, MAX_PROBE_STEPS)
            return
        old = [shape for shape in others if self._step - self._informed[shape] > PROBE_AGE]
        if old:
            shape = min(old, key=lambda index: int(self._informed[index]))
            lost_ms = FIRST_RESULTS * found.loss(shape) + found.change_loss(shape, self._current)
            if lost_ms <= self._old_credit * round_ms:
                self._probe = _Probe(shape, FIRST_RESULTS, MAX_PROBE_STEPS, is_old=True)

    def _end_probe(self) -> None:
        """What it has cost is charged when its last results are here: they say how long its rounds took."""
        if self._probe is None:
            return
        self._ended.append((self._step + FIRST_RESULTS, self._probe))
        self._probe = None
        self._until_evaluation = min(self._until_evaluation, FIRST_RESULTS)

    def _charge_probes(self, found: _Rates) -> None:
        """Take what ended probes have cost from what the next ones may cost."""
        while self._ended and self._ended[0][0] <= self._step:
            probe = self._ended.popleft()[1]
            lost_ms = probe.steps * found.loss(probe.shape) + found.change_loss(probe.shape, self._current)
            lost = lost_ms / float(found.ms[self._current])
            if probe.is_old:
                self._old_credit -= lost
            elif not probe.is_free:
                self._credit -= lost

    def _told_by(self, shape: int) -> Bools:
        """[shapes]: which ones rounds of `shape` tell about: all of its family that go no deeper."""
        survival, others = self.survival, range(len(self._shapes))
        same = [survival.family(other) == survival.family(shape) for other in others]
        told = [
            other == shape or (shape and same[other] and survival.depth(other) <= survival.depth(shape))
            for other in others
        ]
        return np.array(told, np.bool_)


def _steps_between(round_ms: float) -> int:
    """Steps between two evaluations while nothing changes."""
    return max(EVALUATE_EVERY, int(EVALUATE_EVERY_MS / round_ms))
