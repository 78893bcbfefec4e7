"""Runs `aerie.cluster.coordinator.loop` in a thread, driven from other threads; the Ray actor `EagleCoordinator` wraps
it. A weight transfer's calls become commands to the ranks, which join and receive in the background while steps go on,
and are asked repeatedly whether they are done."""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from aerie.cluster.coordinator.loop import CoordinatorLoop, CoordinatorSettings
from aerie.cluster.learning.gate import Candidate
from aerie.cluster.learning.published import News, PublishedDrafts
from aerie.cluster.linux import use_short_time_slice
from aerie.cluster.transport.admin import (
    AbortRequests,
    AdminCall,
    AdminOutcome,
    FinishUpdate,
    JoinTrainer,
    LoadLora,
    Pause,
    PauseMode,
    Resume,
    RollBackDraft,
    Sleep,
    TransferCall,
    UnloadLora,
    WakeUp,
)
from aerie.cluster.transport.messages import EngineStats, FlushOutcome
from aerie.workers.scheduling.commands.command import (
    CloseTransfer,
    CommandAnswer,
    InspectTransfer,
    LoadedWeights,
    LoadWeights,
    ReceiveWeights,
    ReleasedPages,
    Staged,
    StartUpdate,
    SumWeights,
    Transfer,
    TransferState,
    WeightSums,
    Work,
    first_error,
)
from aerie.workers.scheduling.commands.command_queue import OnAnswered
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.request import UnfinishedError
from aerie.workers.scheduling.scheduler import Scheduler

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
                return self._run_on_ranks(call)[0], _NOTHING
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
        error, states = self._run_on_ranks(work)
        while not error and any(state.is_busy for state in states):
            if time.monotonic() > deadline:
                error = f"no end in {ADMIN_TIMEOUT_S:g} s"
                break
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)
            error, states = self._run_on_ranks(InspectTransfer())
        if error:
            self._run_on_ranks(CloseTransfer())
        elif isinstance(work, ReceiveWeights) and not all(state.session for state in states):
            error = "the ranks were lost, and the session with them"
        return error

    def _finish(self, call: FinishUpdate) -> tuple[str, LoadedWeights]:
        """Load the tensors that a trainer has sent to the ranks. Return an error or "", and what was loaded."""
        error, states = self._run_on_ranks(InspectTransfer())
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

    def _run_on_ranks(self, work: Transfer) -> tuple[str, list[TransferState]]:
        """Let all ranks carry out a command. Return the first error, of the command or of earlier work, and the states
        by rank."""
        answers = self._carry_out(work).result(ADMIN_TIMEOUT_S)
        states = [answer.result for answer in answers if isinstance(answer.result, TransferState)]
        error = first_error(answers)
        if not error:
            failed = [f"rank {answers[i].rank}: {state.error}" for i, state in enumerate(states) if state.error]
            error = failed[0] if failed else ""
        return error, states


logger = logging.getLogger(__name__)

T = TypeVar("T")

_CALL_TIMEOUT_S = 10.0  # an iteration takes milliseconds


class Coordinator:
    """Runs an engine's loop in a thread of its own.

    All methods may be called from any thread but the loop's. The loop's thread calls the callbacks, which must return
    at once.

    on_worker_group_lost(reason): a rank died, failed or hangs. The worker group is detached already; its owner must
        kill it and attach another.
    on_death(reason): the loop has raised; nothing works any more.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: CoordinatorSettings,
        on_worker_group_lost: Callable[[str], None] = lambda reason: None,
        on_death: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = CoordinatorLoop(scheduler, settings, on_worker_group_lost, clock)
        self._on_death = on_death
        self._transfers = TransferCalls(settings.engine_id, self.carry_out)
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    @property
    def endpoint(self) -> str:
        """The inbox, for `aerie.cluster.transport.channel.connect_engine`."""
        return self._loop.streams.endpoint

    def start(self) -> None:
        """Start the loop. Requests are queued, and run once a worker group is attached."""
        self._thread.start()

    def attach(
        self, endpoints: Sequence[str], epoch: int, costs: CostTable | None = None, locations: Sequence[str] = ()
    ) -> None:
        """Use a new worker group, whose ranks listen on `endpoints` (`RankChannel.endpoint`, by rank). costs: its step
        times, if measured. locations: where its ranks run, for the operator.

        Raises ValueError for an endpoint that cannot be connected to."""
        self._call(lambda: self._loop.attach(endpoints, epoch, costs, locations))

    def detach(self, reason: str) -> None:
        """Detach a worker group that is lost or about to be killed. Its requests are resumed or ended, as
        configured."""
        self._call(lambda: self._loop.detach(reason))

    def drain(self, timeout_s: float | None = None, is_leaving: bool = False) -> bool:
        """Refuse new requests and wait until all others have ended. Return False after `timeout_s`. is_leaving: another
        engine replaces this one."""
        idle = threading.Event()
        self._call(lambda: self._loop.start_draining(idle.set, is_leaving))
        return idle.wait(timeout_s)

    def fail_all(self, reason: str) -> None:
        """End every request with an error."""
        self._call(lambda: self._loop.streams.fail_all(reason))

    def stop(self, reason: str = "the engine was stopped") -> None:
        """End the loop: stop the ranks, end unfinished requests with an error. Does nothing if it has ended already."""
        if self._thread.is_alive():
            self._call(lambda: self._loop.end(reason))
            self._thread.join(_CALL_TIMEOUT_S)

    def stats(self) -> EngineStats:
        """Return state and counters; the last ones if the loop has ended."""
        return self._call(self._loop.stats) if self._thread.is_alive() else self._loop.stats()

    def carry_out(self, work: Work) -> "Future[Sequence[CommandAnswer]]":
        """Let all ranks carry out a command between two steps. Return a future of their answers, by rank; one answer
        with rank -1 if the ranks are lost."""
        answers: Future[Sequence[CommandAnswer]] = Future()
        self._call(lambda: self._loop.carry_out(work, answers.set_result))
        return answers

    def administer(self, call: AdminCall) -> AdminOutcome:
        """Do what an administrator asks, and wait for it. Returns after ADMIN_TIMEOUT_S at the latest, with an
        error."""
        error, loaded, sums = "", LoadedWeights({}), tuple[dict[str, str], ...]()
        num_bytes = num_aborted = 0
        try:
            if isinstance(call, Pause):
                error = self._pause(call.mode)
            elif isinstance(call, Sleep):
                error, num_bytes = self._sleep(call.mode)
            elif isinstance(call, RollBackDraft):
                version = call.version
                error = first_error(self._answers(lambda on_answered: self._drafts.roll_back(version, on_answered)))
            elif isinstance(call, WakeUp):
                error = first_error(self._answers(self._loop.wake_up))
            elif isinstance(call, AbortRequests):
                num_aborted = self._call(lambda: self._loop.streams.abort(frozenset(call.request_ids)))
            elif isinstance(call, Resume):
                self._call(self._loop.resume)
            elif isinstance(call, LoadWeights):
                answers = self.carry_out(call).result(ADMIN_TIMEOUT_S)
                error, result = first_error(answers), answers[0].result
                loaded = result if isinstance(result, LoadedWeights) else loaded
            elif isinstance(call, SumWeights):
                answers = self.carry_out(call).result(ADMIN_TIMEOUT_S)
                error = first_error(answers)
                sums = tuple(answer.result.sums for answer in answers if isinstance(answer.result, WeightSums))
            elif isinstance(call, TransferCall):
                error, loaded = self._transfers.call(call)
            elif isinstance(call, LoadLora):
                answered: Future[str] = Future()
                self._call(lambda: self._loop.load_adapter(call, answered.set_result))
                error = answered.result(ADMIN_TIMEOUT_S)
            elif isinstance(call, UnloadLora):
                self._call(lambda: self._loop.unload_adapter(call))
        except TimeoutError:
            error = f"no answer in {ADMIN_TIMEOUT_S:g} s"
        except ValueError as refusal:
            error = str(refusal)
        after = self._call(self._loop.inspect)
        return msgspec.structs.replace(
            after,
            error=error,
            missing=loaded.missing,
            took_s=loaded.took_s,
            sums=sums,
            num_bytes=num_bytes,
            num_aborted=num_aborted,
        )

    def _pause(self, mode: PauseMode) -> str:
        """Return an error or ""."""
        paused = threading.Event()
        self._call(lambda: self._loop.pause(mode, paused.set))
        return "" if paused.wait(ADMIN_TIMEOUT_S) else f"requests still run after {ADMIN_TIMEOUT_S:g} s"

    def _sleep(self, mode: PauseMode) -> tuple[str, int]:
        """Return an error, after which the engine serves on, or "" and the bytes that the ranks have given back."""
        was_paused = self._call(self._loop.inspect).is_paused
        if error := self._pause(mode):
            return error, 0
        try:
            answers = self._answers(self._loop.sleep)
        except UnfinishedError as unfinished:
            answers = (CommandAnswer(-1, -1, -1, error=f"{unfinished}; ask again"),)
        if (error := first_error(answers)) and not was_paused:
            self._call(self._loop.resume)
        return error, sum(answer.result.num_bytes for answer in answers if isinstance(answer.result, ReleasedPages))

    def _answers(self, start: Callable[[OnAnswered], None]) -> Sequence[CommandAnswer]:
        """Start commands in the loop's thread, and wait for the answers of the ranks. Raises TimeoutError."""
        answers: Future[Sequence[CommandAnswer]] = Future()
        self._call(lambda: start(answers.set_result))
        return answers.result(ADMIN_TIMEOUT_S)

    @property
    def _drafts(self) -> PublishedDrafts:
        if self._loop.drafts is None:
            raise ValueError("the draft of this engine does not learn; start it with the section `learning`")
        return self._loop.drafts

    def learner_news(self) -> News:
        """Return what the learner has not been told yet."""
        return self._call(self._drafts.news)

    def offer_draft(self, candidate: Candidate) -> str:
        """Count a candidate of the learner, and publish it if it is better. Return an error or ""."""
        try:
            return first_error(self._answers(lambda on_answered: self._drafts.offer(candidate, on_answered)))
        except (ValueError, TimeoutError) as refusal:
            return str(refusal)

    def flush_cache(self) -> FlushOutcome:
        """Empty the prefix cache if all requests have ended."""
        return self._call(self._loop.flush_cache)

    def loop_age_s(self) -> float:
        """Return the seconds since the loop's last iteration, even if it hangs."""
        return self._loop.age_s()

    def _call(self, work: Callable[[], T]) -> T:
        """Run `work` in the loop's thread and wait for it."""
        if not self._thread.is_alive():
            raise RuntimeError(f"the coordinator's loop does not run (status: {self._loop.status})")
        return self._loop.reactor.call(work).result(_CALL_TIMEOUT_S)

    def _run(self) -> None:
        """Run the loop in its thread until it stops. If it fails, report that, and end it."""
        use_short_time_slice()
        loop = self._loop
        try:
            while not loop.is_stopping:
                loop.run_once()
        except Exception as error:
            logger.critical("the coordinator's loop ended", exc_info=True)
            reason = f"the coordinator failed: {type(error).__name__}: {error}"
            loop.die(reason)
            self._on_death(f"{reason}\n{traceback.format_exc()}")
            loop.end(reason)
        finally:
            loop.reactor.run_calls()
            loop.reactor.close()
