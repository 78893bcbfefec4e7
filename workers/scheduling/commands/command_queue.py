"""Commands that wait until no step is in flight. Used by `aerie.workers.scheduling.scheduler`, which plans no step
while a command waits or runs. Pure."""

from collections import deque
from collections.abc import Callable, Sequence

from aerie.workers.scheduling.commands.command import Command, CommandAnswer, Work

OnAnswered = Callable[[Sequence[CommandAnswer]], None]  # called with the answers of all ranks


class CommandQueue:
    """Commands in the order of `add`; at most one is in flight.

    is_empty: no command waits or is in flight.
    """

    def __init__(self) -> None:
        self.is_empty = True
        self._waiting: deque[tuple[Work, OnAnswered]] = deque()
        self._in_flight: tuple[Command, OnAnswered] | None = None

    def add(self, work: Work, on_answered: OnAnswered) -> None:
        """Queue a command. on_answered: called before the next plan is made, or when the ranks are lost."""
        self._waiting.append((work, on_answered))
        self.is_empty = False

    @property
    def is_due(self) -> bool:
        """Whether `next` may be called once no step is in flight."""
        return self._in_flight is None and bool(self._waiting)

    def next(self, epoch: int, step: int) -> Command:
        """Return the next command, which is in flight from now on."""
        assert self.is_due, "no command is due"
        work, on_answered = self._waiting.popleft()
        command = Command(epoch, step, work)
        self._in_flight = command, on_answered
        return command

    def answered(self, answers: Sequence[CommandAnswer]) -> None:
        """End the command in flight. answers: of all ranks."""
        assert self._in_flight is not None, "no command is in flight"
        command, on_answered = self._in_flight
        assert all((answer.epoch, answer.step) == (command.epoch, command.step) for answer in answers)
        self._in_flight = None
        self.is_empty = not self._waiting
        on_answered(answers)

    def fail_all(self, reason: str) -> None:
        """End all commands with an error, because the ranks are lost."""
        ended = [on_answered for _, on_answered in self._waiting]
        if self._in_flight is not None:
            ended.insert(0, self._in_flight[1])
        self._waiting.clear()
        self._in_flight = None
        self.is_empty = True
        for on_answered in ended:
            on_answered((CommandAnswer(-1, -1, -1, error=reason),))
