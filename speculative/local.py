"""Local engines from a spec, with a draft or without: in this process for one rank, in one child process per rank for
several."""

from contextlib import AbstractContextManager

from speculative.build import EngineSpec, plan_layout
from workers.runner import local_engine as plain
from workers.runner.local_engine import LocalEngine


def local_engine(spec: EngineSpec) -> AbstractContextManager[LocalEngine]:
    """An engine that runs while the context is open. Raises what building a rank raises."""
    return plain.local_engine(spec.worker, plan_layout(spec))
