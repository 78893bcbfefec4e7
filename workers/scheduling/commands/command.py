"""Messages of commands: one `Command` to all ranks, and one `CommandAnswer` from each rank.

A command is carried out between two steps, at the same place in the order of plans on every rank. Encoded as plans are
(`aerie.workers.scheduling.plan`). How to add a kind: docs/add-a-command.md.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from aerie.workers.scheduling.plan import GraphCount


class CaptureGraph(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Capture the next waiting CUDA graph. Does nothing if none waits. From `CapturePacing`. -> `GraphedDecoding`

    extra_s: seconds beyond `engine.step_timeout_s` after which a rank that carries it out counts as hung.
    """

    extra_s: ClassVar[float] = 0.0


class Captured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of `CaptureGraph`. graphs: graph counts after it."""

    graphs: GraphCount


Work = CaptureGraph
Result = Captured


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Work for all ranks between plan `step` - 1 and plan `step` + 1. No step is in flight meanwhile.

    epoch, step: as in `StepPlan`: commands and plans are numbered together. Identify the command.
    """

    epoch: int
    step: int
    work: Work


class CommandAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank's answer to a command.

    epoch, step: those of the command.
    rank: -1: no rank has answered, because the ranks were lost.
    result: None if the command failed.
    error: why it failed on this rank, which serves on as if the command had not come; else "".
    """

    epoch: int
    step: int
    rank: int
    result: Result | None = None
    error: str = ""


def first_error(answers: Sequence[CommandAnswer]) -> str:
    """Return the first error among `answers`, with its rank if there are several; "" if the command succeeded."""
    for answer in answers:
        if answer.error:
            return f"rank {answer.rank}: {answer.error}" if len(answers) > 1 else answer.error
    return ""
