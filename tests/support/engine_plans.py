"""Workers of a plan, and plans that differ from what `plan_engine` makes of their configuration."""

from dataclasses import replace

from aerie.speculative.build import EngineSpec
from aerie.workers.runner.build import PhaseReport, build_rank
from aerie.workers.runner.layout import EnginePlan
from aerie.workers.runner.worker import Worker


def as_captured(engine: EnginePlan) -> EnginePlan:
    """One whose scheduler chooses among the shapes that have graphs, as where steps are captured."""
    shapes = replace(engine.layout.shapes, eager=False)
    return replace(engine, layout=replace(engine.layout, shapes=shapes))


def build_worker(spec: EngineSpec, engine: EnginePlan, report: PhaseReport = lambda phase, seconds: None) -> Worker:
    """The only rank of an engine. engine: `plan_engine(spec)`, or one that differs."""
    return build_rank(spec.worker, engine, 0, "", report).worker
