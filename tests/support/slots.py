"""Requests in slots, without a scheduler."""

from aerie.workers.scheduling.plan import SlotInit, StepPlan
from aerie.workers.slots import SlotTable, upload


def apply_plan(slots: SlotTable, plan: StepPlan) -> None:
    """What a rank's worker does with a plan's requests and pages, apart from the rest of the step."""
    slots.enter(plan, upload(slots.columns(plan), slots.device))


def enter(slots: SlotTable, *inits: SlotInit) -> None:
    """They take their slots, as in a plan that brings no pages."""
    apply_plan(slots, StepPlan(0, 0, b"", 0, 0, inits=inits))
