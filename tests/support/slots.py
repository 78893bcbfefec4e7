"""Requests in slots, without a scheduler."""

from workers.scheduling.plan import SlotInit, StepPlan
from workers.slots.slot_table import SlotTable


def enter(slots: SlotTable, *inits: SlotInit) -> None:
    """They take their slots, as in a plan that brings no pages."""
    slots.apply_plan(StepPlan(0, 0, b"", 0, 0, inits=inits))
