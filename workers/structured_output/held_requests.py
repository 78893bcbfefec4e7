"""Tracks requests with a grammar on one rank, and decides when requests with late masks are scheduled again if no
report will come. Used by `aerie.workers.structured_output.slot_grammars`."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aerie.workers.scheduling.plan import Grammar

FIRST_RETRY_S = 0.02  # delay before a held request is scheduled again; doubled each time
MAX_RETRY_S = 0.64


class HostOutput(Protocol):
    """The tokens that a step emitted and drafted, on the host or being copied to it."""

    def wait(self) -> None:
        """Wait until the copy to the host is complete."""

    @property
    def tokens(self) -> Tensor:
        """[entries, max_tokens] int64, emitted tokens."""

    @property
    def counts(self) -> Tensor:
        """[entries] int64, number of emitted tokens."""

    @property
    def finish(self) -> Tensor:
        """[entries] int64, FINISH_*."""

    @property
    def drafts(self) -> Tensor | None:
        """[entries, 2, width] int64, tokens and parents of the tree to verify next; None without a draft."""


@dataclass(eq=False)
class GrammarRequest:
    """A request with a grammar, from its admission to a slot until it ends or is admitted again.

    number: the scheduler's number of the request.
    output: emitted tokens.
    is_over: whether its last token was emitted.
    is_held: whether a mask was late; then the request emits nothing more in this slot.
    is_gone: whether the request was ended, failed or admitted again; then its tokens are no longer followed.
    """

    number: int
    grammar: Grammar
    output: list[int]
    is_over: bool = False
    is_held: bool = False
    is_gone: bool = False


class HeldRequests:
    """Decides when to schedule late requests again whose masks this rank's process will not report:

    - Requests that another rank held: they had their masks on this rank, but emitted nothing. The scheduler gets
      reports only from rank 0, whose process has nothing to report. `take` finds them.
    - Requests of a step that this rank's process did not answer in time (`add`).

    The delay doubles each time, because the process may take long.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[HostOutput, list[tuple[int, GrammarRequest]]]] = deque()  # results not taken yet
        self._num_held: dict[int, int] = {}  # consecutive times, by request
        self._retries: list[tuple[float, int]] = []  # due time and request

    def add_step(self, emitted: HostOutput, entries: Sequence[tuple[int, GrammarRequest]]) -> None:
        """Record a launched step. entries: the step's requests with a grammar, by index in the step."""
        self._steps.append((emitted, [(i, request) for i, request in entries if not request.is_held]))

    def take(self, emitted: HostOutput) -> None:
        """Find held requests in a step's result, which is on the host."""
        if not self._steps or self._steps[0][0] is not emitted:
            return
        _, entries = self._steps.popleft()
        counts = emitted.counts.tolist() if entries else []
        for i, request in entries:
            if counts[i]:
                self._num_held.pop(request.number, None)
            elif not (request.is_held or request.is_over or request.is_gone):
                self.add(request)

    def add(self, request: GrammarRequest) -> None:
        """Hold a request, and schedule it again after a delay."""
        request.is_held = True
        times = self._num_held.get(request.number, 0)
        self._num_held[request.number] = times + 1
        delay_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2**times)
        self._retries.append((time.monotonic() + delay_s, request.number))

    def due(self) -> list[int]:
        """Return and forget the requests whose delay is over."""
        now_s = time.monotonic()
        due = [number for due_s, number in self._retries if due_s <= now_s]
        self._retries = [each for each in self._retries if each[0] > now_s]
        return due

    def forget(self, number: int) -> None:
        """Forget a request that has ended."""
        self._num_held.pop(number, None)
