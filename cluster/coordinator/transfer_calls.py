"""An administrator's calls of a weight transfer, each as commands to the ranks. Used by
`aerie.cluster.coordinator.coordinator`, in the threads of its callers.

Ranks join and receive in the background, so that steps go on; a call asks them repeatedly whether they are done.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from aerie.cluster.transport.admin import FinishUpdate, JoinTrainer, TransferCall
from aerie.workers.scheduling.commands.command import (
    CloseTransfer,
    CommandAnswer,
    InspectTransfer,
    LoadedWeights,
    LoadWeights,
    ReceiveWeights,
    Staged,
    StartUpdate,
    Transfer,
    TransferState,
    Work,
    first_error,
)

ADMIN_TIMEOUT_S = 660.0  # for an update of weights, and for requests to end
_FIRST_POLL_S, _MAX_POLL_S = 0.005, 0.1  # a poll drains the steps in flight: once in 20 steps of 5 ms
_NOTHING = LoadedWeights({})


class TransferCalls:
    """Carries out one call at a time.

    carry_out: `aerie.cluster.coordinator.coordinator.Coordinator.carry_out`.
    """

    def __init__(self, engine_id: str, carry_out: Callable[[Work], "Future[Sequence[CommandAnswer]]"]) -> None:
        self._engine_id = engine_id
        self._carry_out = carry_out
        self._lock = threading.Lock()

    def call(self, call: TransferCall) -> tuple[str, LoadedWeights]:
        """Carry out a call. Return an error or "", and what `FinishUpdate` has loaded. Raises TimeoutError."""
        if not self._lock.acquire(blocking=False):
            return "another call of a weight transfer is in progress", _NOTHING
        try:
            if isinstance(call, FinishUpdate):
                return self._finish(call)
            if isinstance(call, StartUpdate):
                return self._tell(call)[0], _NOTHING
            if isinstance(call, JoinTrainer):
                if self._engine_id not in call.first_ranks:
                    return "this engine has no rank in the trainer's group: it has just started", _NOTHING
                opened = msgspec.structs.replace(call.opened, rank=call.first_ranks[self._engine_id])
                return self._until_done(opened), _NOTHING
            return self._until_done(call), _NOTHING
        finally:
            self._lock.release()

    def _until_done(self, work: Transfer) -> str:
        """Carry out work that ranks do in the background, and wait for it. If it fails on one, all ranks leave the
        group, so that none waits for the trainer, nor the trainer for it."""
        deadline, poll_s = time.monotonic() + ADMIN_TIMEOUT_S, _FIRST_POLL_S
        error, states = self._tell(work)
        while not error and any(state.is_busy for state in states):
            if time.monotonic() > deadline:
                error = f"no end in {ADMIN_TIMEOUT_S:g} s"
                break
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)
            error, states = self._tell(InspectTransfer())
        if error:
            self._tell(CloseTransfer())
        elif isinstance(work, ReceiveWeights) and not all(state.session for state in states):
            error = "the ranks were lost, and the session with them"
        return error

    def _finish(self, call: FinishUpdate) -> tuple[str, LoadedWeights]:
        error, states = self._tell(InspectTransfer())
        if error:
            return error, _NOTHING
        if not states[0].session:
            return "no weight update is open; call /start_weight_update first", _NOTHING
        if not states[0].staged:
            return f"no tensor of the {states[0].session} has come in this session", _NOTHING
        sources = (Staged() if model in states[0].staged else None for model in ("target", "draft"))
        target, draft = sources
        work = LoadWeights(target, draft, call.version)
        answers = self._carry_out(work).result(ADMIN_TIMEOUT_S)
        result = answers[0].result
        if (error := first_error(answers)) or not isinstance(result, LoadedWeights):
            return error, _NOTHING
        return "", msgspec.structs.replace(result, missing=states[0].uncovered | result.missing)

    def _tell(self, work: Transfer) -> tuple[str, list[TransferState]]:
        """Let all ranks carry out a command. Return the first error, of the command or of earlier work, and the states
        by rank."""
        answers = self._carry_out(work).result(ADMIN_TIMEOUT_S)
        states = [answer.result for answer in answers if isinstance(answer.result, TransferState)]
        error = first_error(answers)
        if not error:
            failed = [f"rank {answers[i].rank}: {state.error}" for i, state in enumerate(states) if state.error]
            error = failed[0] if failed else ""
        return error, states
