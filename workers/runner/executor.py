"""The interface of a rank to the sender of plans. Used by the cluster's worker loop and the local engine; implemented
by `aerie.workers.runner.worker.Worker`."""

from typing import Protocol

from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.plan import GraphCount, StepPlan, StepResult


class StepExecutor(Protocol):
    """Executes plans in order. At most two steps may be pending: submitted, but the result not taken."""

    @property
    def costs(self) -> CostTable | None:
        """Measured step times, the same on every rank; None if not measured."""

    @property
    def graphs(self) -> GraphCount:
        """Number of CUDA graphs, the same on every rank. Commands request further captures."""

    def submit(self, plan: StepPlan) -> None:
        """Launch a step. On a GPU this returns before the step is done; on a CPU it runs the step."""

    @property
    def num_pending(self) -> int:
        """Number of pending steps."""

    def ready(self) -> bool:
        """Whether `take` would return at once."""

    def take(self) -> StepResult:
        """Wait for the oldest pending step and return its result, equal on all ranks. Only rank 0's result is sent."""

    def carry_out(self, command: Command) -> tuple[CommandAnswer, ...]:
        """Carry out a command, while no step is pending. Return the answers of this executor's ranks, by rank."""
