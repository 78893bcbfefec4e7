"""Engines that differ from what `plan_engine` makes of their configuration."""

from dataclasses import replace

from workers.runner.layout import EnginePlan


def as_captured(engine: EnginePlan) -> EnginePlan:
    """One whose scheduler chooses among the shapes that have graphs, as where steps are captured."""
    shapes = replace(engine.layout.shapes, eager=False)
    return replace(engine, layout=replace(engine.layout, shapes=shapes))
