"""Chooses the requests that run a round in a step, their tree shape, and their pages."""

from collections.abc import Callable

from workers.config import RoundShapes
from workers.scheduling.latency_budget import StepRounds
from workers.scheduling.request_queues import RequestQueues
from workers.scheduling.sequence import PlanBuilder
from workers.scheduling.shape_choice import Load, Reason, ShapeChoice
from workers.scheduling.slot_pages import Int64s, Slots
from workers.scheduling.step_time import StepTime


class RoundPlanner:
    """Plans a round for every decoding request whose end is not already in flight.

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

    def shape(self, step_time: StepTime | None) -> int:
        """Return the shape that the next rounds verify and draft."""
        if self.choose_shape is not None:
            return self.choose_shape(self._shapes)
        if self._shapes.default == 0:
            return 0
        slot_pages, waiting = self._slot_pages, self._queues.waiting
        slots = slot_pages.round_slots()
        with_prompts = bool(self._queues.prefilling or (waiting and slot_pages.num_free_slots))
        speculative = slot_pages.speculative[slots]
        if not with_prompts and not speculative.any():
            self._shape_choice.reason = Reason.NOBODY
            return 0
        load = Load(
            slots,
            slot_pages.user[slots],
            speculative,
            int(slot_pages.committed[slots].sum()),
            with_prompts,
            bool(slot_pages.rare_sampling[slots].any()),
        )
        return self._shape_choice.choose(load, step_time)

    def reserve(self, builder: PlanBuilder, shape: int) -> tuple[Slots, Int64s]:
        """Reserve pages for a round of all decoding requests, preempting the youngest until they suffice. Return the
        slots, and the end of each one's writes."""
        slot_pages = self._slot_pages
        while True:
            slots = slot_pages.round_slots()
            ends = slot_pages.round_ends(slots, self._shapes[shape])
            if len(slots) == 0 or slot_pages.fit_rounds(slots, ends) == 0:
                return slots, ends
            self._queues.preempt_youngest(builder)

    def load(self, slots: Slots, shape: int) -> StepRounds:
        """Return the rounds of these slots, for the latency budget."""
        return StepRounds(shape, len(slots), int(self._slot_pages.committed[slots].sum()))
