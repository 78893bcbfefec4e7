"""The one interface between whoever sends plans and a rank that runs them; the cluster's worker loop and the local
engine drive it, `workers.runner.worker.Worker` implements it."""

from typing import Protocol

from workers.scheduling.cost_table import CostTable
from workers.scheduling.plan import GraphCount, StepPlan, StepResult


class StepExecutor(Protocol):
    """A rank that executes plans in order. At most two steps may be pending: launched, result not yet taken."""

    @property
    def costs(self) -> CostTable | None:
        """What its steps cost, the same on every rank; None if that was not measured."""

    @property
    def graphs(self) -> GraphCount:
        """How many of its steps are CUDA graphs, the same on every rank. What waits to be captured, plans ask for."""

    def submit(self, plan: StepPlan) -> None:
        """Launch a step. On a GPU this returns before the step is done; on a CPU it runs the step."""

    @property
    def num_pending(self) -> int:
        """Steps submitted whose result has not been taken."""

    def ready(self) -> bool:
        """Whether `take` would return at once."""

    def take(self) -> StepResult:
        """Result of the oldest pending step; waits for it. Equal on every rank, so only rank 0's need travel."""
