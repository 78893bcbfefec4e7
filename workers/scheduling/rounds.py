"""Chooses the requests that run a round in a step, their tree shape, and their pages."""

import math
from collections.abc import Callable
from typing import NamedTuple

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.latency_budget import LatencyBudget, StepRounds
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.sequence import PlanBuilder
from aerie.workers.scheduling.shapes.shape_choice import Load, Reason, ShapeChoice
from aerie.workers.scheduling.shapes.shape_rates import verified_shape
from aerie.workers.scheduling.slot_lengths import Int64s, Slots
from aerie.workers.scheduling.step_time import StepTime


class PlannedRounds(NamedTuple):
    """The rounds of a step.

    shape, next_shape: indices of the shapes that they verify and draft.
    slots: [n] that run one.
    ends: [n] ends of the positions that each may write.
    load: their load, for `LatencyBudget`.
    """

    shape: int
    next_shape: int
    slots: Slots
    ends: Int64s
    load: StepRounds


class RoundPlanner:
    """Plans a round for every decoding request, unless a step in flight is certain to end it.

    choose_shape: replaces `shape_choice`; called once per step for the index of the shape.
    """

    def __init__(
        self,
        queues: RequestQueues,
        shapes: RoundShapes,
        shape_choice: ShapeChoice,
        choose_shape: Callable[[RoundShapes], int] | None,
    ) -> None:
        self._queues = queues
        self._slot_pages = queues.slot_pages
        self._shapes = shapes
        self._shape_choice = shape_choice
        self.choose_shape = choose_shape
        self._last_slots = (-1, 0)  # `num_changes` and number of slots when the next two were computed
        self._speculates = self._is_rare = False  # any speculates; any needs `rare_sampling`

    def shapes(
        self, slots: Slots, kv_tokens: int, step_time: StepTime | None, budget: LatencyBudget | None = None
    ) -> tuple[int, int]:
        """Return the indices of the shapes that the next rounds verify and draft. Arguments as in `shape`;
        `choose_shape` chooses both at once."""
        shape = self.shape(slots, kv_tokens, step_time, budget)
        if self.choose_shape is not None or len(slots) == 0:
            return shape, shape
        drafted = int(self._slot_pages.drafted[slots].max())
        return verified_shape(self._shapes, self._shape_choice.rates, drafted, shape), shape

    def shape(
        self, slots: Slots, kv_tokens: int, step_time: StepTime | None, budget: LatencyBudget | None = None
    ) -> int:
        """Return the index of the shape that the next rounds draft.

        slots: [n] slots that run a round.
        kv_tokens: total committed tokens of these slots.
        budget: limits the time of a shape that is slower than the last; None without costs.
        """
        if self.choose_shape is not None:
            return self.choose_shape(self._shapes)
        if self._shapes.default == 0:
            return 0
        slot_pages, waiting = self._slot_pages, self._queues.waiting
        if self._last_slots != (slot_pages.num_changes, len(slots)):
            self._last_slots = slot_pages.num_changes, len(slots)
            self._speculates = bool(slot_pages.speculative[slots].any())
            self._is_rare = bool(slot_pages.rare_sampling[slots].any())
        with_prompts = bool(self._queues.prefilling or (waiting and slot_pages.num_free_slots))
        if not with_prompts and not self._speculates:
            self._shape_choice.reason = Reason.NOT_WANTED
            return 0
        numbers, speculative = slot_pages.number, slot_pages.speculative
        choice, limit_ms = self._shape_choice, math.inf
        if budget is not None and not budget.may_stretch and choice.max_round_ms(len(slots)) > budget.target_ms:
            limit_ms = budget.shape_limit_ms(slot_pages.mean_gap_ms())
        verifies = slot_pages.max_pending[slots] > slot_pages.min_pending[slots] if self._shapes.model_free else None
        load = Load(
            slots,
            numbers,
            speculative=speculative,
            kv_tokens=kv_tokens,
            with_prompts=with_prompts,
            speculates=self._speculates,
            rare_sampling=self._is_rare,
            limit_ms=limit_ms,
            verifies=verifies,
        )
        return choice.choose(load, step_time)

    def preferred(self, shape: int) -> int:
        """Return the expected shape of later rounds: this step's, unless it is a probe's."""
        preferred, is_probe = self._shape_choice.preferred, self._shape_choice.reason is Reason.PROBE
        return preferred if is_probe and preferred is not None else shape

    def plan(
        self,
        builder: PlanBuilder,
        slots: Slots,
        step_time: StepTime | None,
        budget: LatencyBudget | None,
        rests: Callable[[StepRounds], bool] = lambda rounds: False,
    ) -> PlannedRounds:
        """Plan a round of `slots` and reserve its pages. If pages run out, the youngest requests are preempted, and the
        round is that of the others.

        rests: whether the step leaves these rounds out.
        """
        kv_tokens = self.kv_tokens(slots)
        shape, next_shape = self.shapes(slots, kv_tokens, step_time, budget)
        if rests(self.load(slots, shape, next_shape, kv_tokens)):
            slots, kv_tokens = slots[:0], 0
        slots, ends = self.reserve(builder, slots, shape, next_shape)
        rounds = self.load(slots, shape, next_shape, None if builder.preempted else kv_tokens)
        return PlannedRounds(shape, next_shape, slots, ends, rounds)

    def reserve(self, builder: PlanBuilder, slots: Slots, shape: int, next_shape: int) -> tuple[Slots, Int64s]:
        """Reserve pages for a round of `slots`, preempting the youngest requests until the pages suffice.

        Return the remaining slots, and for each the end of the positions that its round may write.
        """
        slot_pages = self._slot_pages
        while True:
            ends = slot_pages.round_ends(slots, self._shapes[shape], self._shapes[next_shape])
            if len(slots) == 0 or slot_pages.fit_rounds(slots, ends) == 0:
                return slots, ends
            self._queues.preempt_youngest(builder)
            slots = slot_pages.round_slots()

    def load(self, slots: Slots, shape: int, next_shape: int = 0, kv_tokens: int | None = None) -> StepRounds:
        """Return the rounds of these slots for `LatencyBudget`: with the wider shape, because rounds that verify one
        shape and draft another take no longer. kv_tokens: see `kv_tokens`; None: unknown."""
        tokens = self.kv_tokens(slots) if kv_tokens is None else kv_tokens
        return StepRounds(self._shapes.wider(shape, next_shape), len(slots), tokens)

    def kv_tokens(self, slots: Slots) -> int:
        """Return the total committed tokens of these slots."""
        return int(self._slot_pages.committed[slots].sum())
