"""Local engines with or without a draft: a single rank runs in this process, several ranks in a child process each."""

from contextlib import AbstractContextManager

from speculative.build import EngineSpec, plan_engine
from workers.runner import local_engine as plain
from workers.runner.local_engine import LocalEngine


def local_engine(spec: EngineSpec, all_graphs: bool = True) -> AbstractContextManager[LocalEngine]:
    """Run an engine while the context is open. all_graphs: see `workers.runner.local_engine.local_engine`. Raises what
    building a rank raises."""
    return plain.local_engine(spec.worker, plan_engine(spec), all_graphs)
