"""Carries out commands on one rank. Used by `aerie.workers.runner.worker`; docs/add-a-command.md."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from aerie.workers.scheduling.commands.command import Command, CommandAnswer, Result, Work

logger = logging.getLogger(__name__)

WorkT = TypeVar("WorkT", bound=Work)


class InconsistentRankError(RuntimeError):
    """This rank cannot serve on: it has failed within a collective, or with its state half changed. It must exit, and
    all ranks are restarted."""


class CommandHandlers:
    """A rank's handlers of commands, by kind of work.

    A handler runs while no step is in flight, on every rank at the same place in the order of plans. Steps launched
    before it may still run on the device.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._handlers: dict[type[Any], Callable[[Any], Result]] = {}

    def add(self, kind: type[WorkT], handler: Callable[[WorkT], Result]) -> None:
        """Use `handler` for a kind of work.

        It may raise if the rank can serve on as before; the error is this rank's answer. It must raise
        InconsistentRankError otherwise. Ranks must agree before they change what steps depend on.
        """
        self._handlers[kind] = handler

    def carry_out(self, command: Command) -> CommandAnswer:
        """Return this rank's answer. Raises InconsistentRankError."""
        kind = type(command.work)
        try:
            if kind not in self._handlers:
                raise NotImplementedError(f"these ranks do not carry out {kind.__name__}")
            result = self._handlers[kind](command.work)
        except InconsistentRankError:
            raise
        except Exception as error:
            logger.exception("%s failed on rank %d", kind.__name__, self._rank)
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return CommandAnswer(command.epoch, command.step, self._rank, error=message)
        return CommandAnswer(command.epoch, command.step, self._rank, result)
