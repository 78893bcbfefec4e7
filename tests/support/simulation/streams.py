"""Endless streams of recorded answers: the choice of shapes and step times alone, without scheduler and prompts.

Cheap enough for many loads. A step's tokens are compared with what each static shape takes for the same tokens of the
same answers, so nothing is left to chance. Times come from a table; the choice may be told another one.
"""

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.shapes.shape_choice import Load, ShapeChoice
from aerie.workers.scheduling.shapes.shape_rates import verified_shape
from aerie.workers.scheduling.step_time import Step, StepTime
from tests.support.simulation.texts import Answer

Floats, Int32s, Int64s = npt.NDArray[np.float64], npt.NDArray[np.int32], npt.NDArray[np.int64]

KV_TOKENS = 200  # of a request
DRAFTING_SHARE = 0.25  # of a round's time, where a step may verify one shape and draft another


def static_rounds(answer: Answer) -> Floats:
    """[shapes, tokens]: rounds that each static shape has run when it has emitted so many tokens after the first;
    linear within a round."""
    count = answer.num_tokens
    found = [np.arange(count, dtype=np.float64)]
    for accepted in answer.accepted:
        ends = [0]
        while ends[-1] < count - 1:
            ends.append(min(ends[-1] + 1 + accepted[ends[-1]], count - 1))
        found.append(np.interp(np.arange(count), ends, np.arange(len(ends))))
    return np.array(found)


@dataclass
class Segment:
    """ms: that steps took. static_ms: [shapes] that each static shape takes for the same tokens. legs: milliseconds
    and, by shape, rounds of static shapes for the same tokens."""

    ms: float
    static_ms: Floats
    legs: dict[tuple[str, int], tuple[float, Floats]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Rate over that of the best static shape."""
        return float(self.static_ms.min()) / self.ms

    def lost(self) -> dict[str, float]:
        """Milliseconds beyond the best static shape's by leg, as shares of all its time."""
        best = int(self.static_ms.argmin())
        found = {
            f"{reason} {shape}": round((ms - float(static[best])) / float(self.static_ms[best]), 3)
            for (reason, shape), (ms, static) in self.legs.items()
        }
        return dict(sorted(found.items(), key=lambda each: -abs(each[1])))


class Stream:
    """`batch` requests at a time, each followed by another. With `eager` shapes a step may verify one shape and draft
    another. noise: sigma of a step's time. May be changed meanwhile:
    batch, answers, pace (a factor of all times)."""

    def __init__(
        self,
        shapes: RoundShapes,
        costs: CostTable,
        told: CostTable | None = None,
        batch: int = 1,
        seed: int = 0,
        noise: float = 0.05,
        max_batch: int = 128,
    ) -> None:
        self.choice = ShapeChoice(shapes, max_batch)
        self.step_time = StepTime(told or costs, max_batch)
        self.batch, self.pace, self.noise = batch, 1.0, noise
        self.num_evaluations = 0
        self._shapes, self._costs, self._random = shapes, costs, random.Random(seed)
        self._most = [shape.max_new_tokens - 1 for shape in shapes.shapes]
        self._users = np.arange(max_batch)
        self._speculative = np.ones(max_batch, np.bool_)
        self._answer: list[Answer | None] = [None] * max_batch
        self._position = [0] * max_batch
        self._static: dict[int, Floats] = {}
        self._upcoming: dict[int, list[Answer]] = {}
        self._drafted = np.zeros(max_batch, np.int64)
        self._late: deque[tuple[int, Int64s, Int64s, Int64s, Int32s, Floats]] = deque()
        evaluate = self.choice._evaluate

        def counted(load: Load, step_time: StepTime) -> None:
            self.num_evaluations += 1
            evaluate(load, step_time)

        self.choice._evaluate = counted  # type: ignore[method-assign]

    def run(self, answers: Sequence[Answer], num_steps: int) -> Segment:
        """Run so many steps; new requests get these answers, in random order."""
        found = Segment(0.0, np.zeros(len(self._most)))
        for _ in range(num_steps):
            self._step(answers, found)
        return found

    def _step(self, answers: Sequence[Answer], segment: Segment) -> None:
        batch, slots = self.batch, np.arange(self.batch)
        load = Load(slots, self._users, self._speculative, KV_TOKENS * batch)
        chosen = self.choice.choose(load, self.step_time)
        for slot in range(batch):
            if self._answer[slot] is None:
                self._answer[slot], self._position[slot] = self._next(answers), 0
                self._users[slot] += len(self._users)
                self._drafted[slot] = chosen
        shape = verified_shape(self._shapes, self.choice.rates, int(self._drafted[slots].max()), chosen)
        users, drafted = self._users[slots], self._drafted[slots]
        accepted, rounds, nats = np.full(batch, -1, np.int32), np.zeros(len(self._most)), np.zeros(batch)
        for slot, of in enumerate(drafted.tolist()):
            answer, at = self._answer[slot], self._position[slot]
            assert answer is not None
            count, verified = 1, min(of, shape)
            if verified:
                accepted[slot] = min(self._most[of], self._most[shape], answer.accepted[verified - 1][at])
                count += int(accepted[slot])
            end = min(at + count, answer.num_tokens - 1)
            nats[slot] = answer.min_entropies[at]
            static = self._static.get(id(answer))
            if static is None:
                static = self._static[id(answer)] = static_rounds(answer)
            rounds += static[:, end] - static[:, at]
            self._position[slot] = end
            if end == answer.num_tokens - 1:
                self._answer[slot] = None
        self._late.append((shape, slots, users, drafted, accepted, nats))
        if len(self._late) > 1:
            late = self._late.popleft()
            if self.choice.learns_from_step(late[0], has_nats=True):
                self.choice.acceptance.record(*late)
        self._drafted[slots] = chosen
        every_ms = [self.pace * of.round_ms(batch, KV_TOKENS * batch) for of in self._costs.rounds]
        took_ms = every_ms[shape]
        if chosen != shape:
            own_ms, drafting_ms = (DRAFTING_SHARE * every_ms[of] if of else 0.0 for of in (shape, chosen))
            took_ms += drafting_ms - own_ms
        noisy_ms = took_ms * self._random.lognormvariate(0.0, self.noise)
        if chosen == shape:
            self.step_time.observe(Step(shape, batch, KV_TOKENS * batch), noisy_ms)
        static_ms = rounds * np.array(every_ms) / batch
        segment.ms += took_ms
        segment.static_ms += static_ms
        leg = self.choice.reason.value if chosen == shape else "change", shape
        ms, of_leg = segment.legs.get(leg, (0.0, 0.0))
        segment.legs[leg] = ms + took_ms, of_leg + static_ms

    def _next(self, answers: Sequence[Answer]) -> Answer:
        upcoming = self._upcoming.setdefault(id(answers), [])
        if not upcoming:
            upcoming += self._random.sample(answers, len(answers))
        return upcoming.pop()


def in_orders(kinds: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """Return so many orders of kinds of text."""
    orders = list(itertools.permutations(kinds))
    random.Random(1).shuffle(orders)
    return orders[:count]
