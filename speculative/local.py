"""Local engines from a spec, with a draft or without: in this process for one rank, in one child process per rank for
several."""

from contextlib import AbstractContextManager

from speculative.build import EngineSpec, plan_engine
from workers.runner import local_engine as plain
from workers.runner.local_engine import LocalEngine


def local_engine(spec: EngineSpec, all_graphs: bool = True) -> AbstractContextManager[LocalEngine]:
    """An engine that runs while the context is open. all_graphs: see `workers.runner.local_engine.local_engine`. Raises
    what building a rank raises."""
    return plain.local_engine(spec.worker, plan_engine(spec), all_graphs)
