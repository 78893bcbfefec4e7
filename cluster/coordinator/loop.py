"""The loop of the coordinator's thread: receive requests, send plans to the ranks, read results one step late, publish
tokens. `aerie.cluster.coordinator.coordinator` runs it in a thread; other threads may call only `age_s`.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import zmq

from aerie.cluster.coordinator.draft_canary import DraftCanary
from aerie.cluster.coordinator.expert_reads import ExpertReads
from aerie.cluster.coordinator.plan_timing import PlanTiming
from aerie.cluster.coordinator.request_streams import RequestStreams
from aerie.cluster.coordinator.state_publisher import engine_stats
from aerie.cluster.coordinator.worker_links import ModelCheck, WorkerLinks
from aerie.cluster.learning.published import PublishedDrafts
from aerie.cluster.transport.admin import AdminOutcome, LoadLora, PauseMode, UnloadLora
from aerie.cluster.transport.channel import Context
from aerie.cluster.transport.messages import EngineStats, FlushOutcome
from aerie.cluster.transport.reactor import Reactor
from aerie.cluster.transport.sockets import Transport
from aerie.workers.scheduling.adapters import OnLoaded
from aerie.workers.scheduling.commands.command import CommandAnswer, ReleasePages, RestorePages, Work, first_error
from aerie.workers.scheduling.commands.command_queue import OnAnswered
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.plan import GraphCount, StepResult
from aerie.workers.scheduling.request import RequestOutput, UnfinishedError
from aerie.workers.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5  # seconds between passes of housekeeping
_LINGER_MS = 200  # for messages still queued when the coordinator ends


@dataclass(frozen=True)
class CoordinatorSettings:
    """Settings of an engine's loop.

    on_worker_loss: whether running requests are resumed on the next worker group or end with an error.
    max_resumes: maximum resumptions of a request.
    step_timeout_s: a worker group that leaves a plan unanswered for longer is replaced.
    queue_timeout_s: time limit for a request's first step.
    identity: see `aerie.cluster.plan.identity`.
    learning_draft, busy_file: draft and busy_file of `PublishedDrafts`; "": no draft learns.
    max_in_flight: plans sent before the first one's result is read; `PlanTiming` delays the last of them.
    """

    engine_id: str
    transport: Transport
    on_worker_loss: Literal["resume", "error"] = "resume"
    max_resumes: int = 2
    step_timeout_s: float = 60.0
    queue_timeout_s: float = math.inf
    max_in_flight: int = 2
    identity: str = ""
    learning_draft: str = ""
    busy_file: str = ""


class CoordinatorLoop:
    """State and steps of the loop; `aerie.cluster.coordinator.coordinator.Coordinator` documents the methods of the
    same names."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: CoordinatorSettings,
        on_worker_group_lost: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.reactor = Reactor()
        self.is_stopping = False
        self.status: Literal["starting", "ready", "recovering", "draining", "dead"] = "starting"
        self._detail = ""
        self._scheduler = scheduler
        self._settings = settings
        self._on_worker_group_lost = on_worker_group_lost
        self._clock = clock
        self._context: Context = zmq.Context()
        self.streams = RequestStreams(
            self._context,
            settings.transport,
            self.reactor,
            settings.engine_id,
            scheduler,
            clock,
            settings.queue_timeout_s,
            self._fault,
            settings.identity,
        )
        self._model_check = ModelCheck(scheduler)
        self._canary = DraftCanary(scheduler)
        self.drafts: PublishedDrafts | None = None
        if settings.learning_draft:
            self.drafts = PublishedDrafts(scheduler, settings.learning_draft, self.carry_out, settings.busy_file)
        self._outputs: list[RequestOutput] = []
        self._expert_reads = ExpertReads(scheduler, self._outputs_ready)
        self._worker_group: WorkerLinks | None = None
        self._last_epoch = 0
        self._on_idle: list[Callable[[], None]] = []
        self._is_sleeping = False
        self._last_pass_s = self._last_step_s = clock()
        self._housekeeping_due_s = self._last_pass_s + HOUSEKEEPING_S
        self._plan_timing = PlanTiming(settings.max_in_flight)
        self._plan_due_s = math.inf  # when to send a delayed plan

    def run_once(self) -> None:
        """Wait for an event, or until periodic work or a delayed plan is due; then do all work that is possible.

        The next plan is sent before the last result's tokens, because ranks wait for it."""
        due_s = min(
            self._housekeeping_due_s, self._plan_due_s, self.streams.states.due_s, self._scheduler.adapters.due_s
        )
        self.reactor.run_once(max(0.0, due_s - self._clock()))
        if self.is_stopping:
            return  # `end` was called meanwhile and has closed all sockets
        now = self._last_pass_s = self._clock()
        if now >= self._housekeeping_due_s:
            self._housekeeping_due_s = now + HOUSEKEEPING_S
            self._housekeep(now)
        self._send_plans()
        self._publish_outputs()
        if self.drafts is not None:
            self.drafts.show_load(is_busy=not self.streams.is_empty)
        if now >= self.streams.states.due_s:
            self._tell_state()
        if self._on_idle and self.streams.is_empty:
            for on_idle in self._on_idle:
                on_idle()
            self._on_idle.clear()

    def attach(
        self, endpoints: Sequence[str], epoch: int, costs: CostTable | None, locations: Sequence[str] = ()
    ) -> None:
        """Use a new worker group. See `aerie.cluster.coordinator.coordinator.Coordinator.attach`."""
        if self._worker_group is not None:
            self.detach("another worker group takes its place")
        self._scheduler.requeue_all(epoch)
        self._plan_timing.reset()
        if costs is not None:
            self._scheduler.use_costs(costs)
        self._worker_group = WorkerLinks(
            self._context,
            self._settings.transport,
            self.reactor,
            endpoints,
            epoch,
            self._clock,
            self._take_result,
            self._take_answers,
            self._worker_group_lost,
            locations,
        )
        self._scheduler.weights.restore()
        self._scheduler.adapters.on_lost = self.streams.adapter_lost
        self._scheduler.adapters.restore()
        self._check_weights()
        if self._is_sleeping:
            self._scheduler.add_command(ReleasePages(), lambda answers: None)
        self._last_epoch = epoch
        if self.status != "draining":
            self.status, self._detail = "ready", ""
        self._tell_state()

    def detach(self, reason: str) -> None:
        """Detach the worker group: its requests go back to the queue, or end with an error."""
        self._detail = reason
        if self._worker_group is None:
            return
        self._worker_group.close()
        self._worker_group = None
        if self.status != "draining":
            self.status = "recovering"
        self._publish_outputs()
        self._tell_state()
        self._model_check.reset()
        self._canary.reset()
        self._expert_reads.reset()
        max_resumes = self._settings.max_resumes if self._settings.on_worker_loss == "resume" else 0
        blamed = self._scheduler.blamed()
        lost = self._scheduler.requeue_all(self._scheduler.epoch)
        self.streams.lost_workers(lost, blamed, max_resumes, reason)

    def start_draining(self, on_idle: Callable[[], None], is_leaving: bool) -> None:
        """Refuse new requests; call `on_idle` once there are none. is_leaving: another engine replaces this one."""
        self.status = "draining"
        self.streams.is_draining = True
        self.streams.is_leaving = self.streams.is_leaving or is_leaving
        self._on_idle.append(on_idle)
        self._tell_state()

    def end(self, reason: str) -> None:
        """Fail unfinished requests, stop the ranks, close all sockets."""
        self.is_stopping = True
        if self.status != "dead":
            self._publish_outputs()  # events of the same iteration
        self.streams.fail_all(reason)
        self._scheduler.fail_commands(reason)
        if self._worker_group is not None:
            self._worker_group.stop()
            self._worker_group.close(_LINGER_MS)
            self._worker_group = None
        self.streams.close(_LINGER_MS)
        self._context.term()

    def die(self, reason: str) -> None:
        """Keep the reason why the loop raised, for `stats` and `health`."""
        self.status, self._detail = "dead", reason

    def stats(self) -> EngineStats:
        """Return state and counters."""
        now, worker_group = self._clock(), self._worker_group
        return engine_stats(
            self._scheduler,
            self._settings.engine_id,
            self.status,
            self._detail,
            max(0, self._last_epoch - 1),
            now - self._last_step_s,
            () if worker_group is None else tuple(now - stamp for stamp in worker_group.last_heartbeat_s),
            () if worker_group is None else worker_group.last_heartbeat,
            self.streams.slot_wait_s(),
            self.drafts,
        )

    def carry_out(self, work: Work, on_answered: OnAnswered) -> None:
        """Queue a command for the attached ranks. on_answered: called in this thread; see `CommandQueue.add`."""
        if self._worker_group is None:
            on_answered((CommandAnswer(-1, -1, -1, error=self._fault()),))
        else:
            self._scheduler.add_command(work, on_answered)

    def load_adapter(self, call: LoadLora, on_loaded: OnLoaded) -> None:
        """Load a LoRA adapter; see `Adapters.load`. Raises ValueError."""
        if self._worker_group is None:
            raise ValueError(self._fault())
        self._scheduler.adapters.load(call.name, call.path, on_loaded, call.in_place, call.stamp)

    def unload_adapter(self, call: UnloadLora) -> None:
        """Unload a LoRA adapter; see `Adapters.unload`. Raises ValueError."""
        self._scheduler.adapters.unload(call.name, call.stamp)
        self.streams.states.publish_soon()

    def pause(self, mode: PauseMode, on_paused: Callable[[], None]) -> None:
        """Run no further steps; see `Pause`. on_paused: called in this thread once that is so."""
        self.streams.is_paused = mode != "keep"
        if mode == "abort":
            self.streams.abort()

        def stop() -> None:
            self._scheduler.is_paused = self.streams.is_paused or mode == "keep"  # unless resumed meanwhile
            on_paused()

        if mode == "wait" and not self.streams.is_empty:
            self._on_idle.append(stop)
        else:
            stop()

    def resume(self) -> None:
        """End a pause. Raises ValueError while the engine sleeps."""
        if self._is_sleeping:
            raise ValueError("the engine sleeps; POST /wake_up first")
        self.streams.is_paused = self._scheduler.is_paused = False

    def sleep(self, on_answered: OnAnswered) -> None:
        """Give the memory of the KV cache back, after a pause that keeps no request. on_answered: as of `carry_out`.
        Raises UnfinishedError."""

        def answered(answers: Sequence[CommandAnswer]) -> None:
            self._is_sleeping = self._is_sleeping or not first_error(answers)
            self.streams.ends_pause = "/wake_up" if self._is_sleeping else "/resume"
            on_answered(answers)

        self._canary.give_way()
        self._scheduler.flush_prefix_cache()
        self.carry_out(ReleasePages(), answered)

    def wake_up(self, on_answered: OnAnswered) -> None:
        """Take the memory again and end the pause. on_answered: as of `carry_out`."""

        def answered(answers: Sequence[CommandAnswer]) -> None:
            if not first_error(answers):
                self._is_sleeping, self.streams.ends_pause = False, "/resume"
                self.resume()
            on_answered(answers)

        self.carry_out(RestorePages(), answered)

    def inspect(self) -> AdminOutcome:
        """Return what administrators may know."""
        scheduler = self._scheduler
        weights, group = scheduler.weights, self._worker_group
        return AdminOutcome(
            self._settings.engine_id,
            scheduler.is_paused or self.streams.is_paused,
            weights.epoch,
            version=weights.version,
            num_ranks=0 if group is None else len(group.last_heartbeat),
            fault=weights.fault,
            draft_fault=weights.draft.fault,
            is_sleeping=self._is_sleeping,
            drafts=() if self.drafts is None else tuple(self.drafts.versions),
        )

    def flush_cache(self) -> FlushOutcome:
        """Empty the prefix cache if all requests have ended."""
        self._canary.give_way()
        try:
            return FlushOutcome(self._settings.engine_id, num_pages=self._scheduler.flush_prefix_cache())
        except UnfinishedError as error:
            return FlushOutcome(self._settings.engine_id, unfinished=str(error))

    def age_s(self) -> float:
        """Return the seconds since the last iteration, which takes half a second at most. Safe in any thread."""
        return self._clock() - self._last_pass_s

    def _send_plans(self) -> None:
        """Send the plans that are due and not empty."""
        self._plan_due_s = math.inf
        while self._worker_group is not None:
            now, due_s = self._clock(), self._plan_timing.due_s()
            if now < due_s:
                self._plan_due_s = due_s
                return
            plan = self._scheduler.schedule()
            if plan is None:
                command = self._scheduler.next_command()
                if command is not None:
                    self._worker_group.send_command(command)
                return
            self._plan_timing.record_plan(now, self._scheduler.expected)
            self._worker_group.send(plan)

    def _take_result(self, result: StepResult) -> None:
        if result.epoch == self._scheduler.epoch:
            self._plan_timing.record_result(self._clock(), result.elapsed_s)
        self._outputs += self._expert_reads.take(self._scheduler.apply(result))
        self.streams.states.publish_soon()
        self._last_step_s = self._clock()

    def _outputs_ready(self, outputs: list[RequestOutput]) -> None:
        self._outputs += outputs

    def _take_answers(self, answers: Sequence[CommandAnswer]) -> None:
        self._publish_outputs()  # tokens of earlier steps were written by the weights before
        self._scheduler.command_answered(answers)
        self._check_weights()
        self.streams.states.publish_soon()
        self._last_step_s = self._clock()

    def _check_weights(self) -> None:
        """End all requests if the ranks lack the weights that they began with."""
        if fault := self._scheduler.weights.fault:
            logger.error("%s", fault)
            self.streams.fail_all(fault)

    def _publish_outputs(self) -> None:
        outputs, self._outputs = self._outputs, []
        self._model_check.observe(outputs, self._last_pass_s)
        self._canary.observe(outputs)
        if self.drafts is not None:
            self.drafts.observe(outputs)
        self.streams.publish(outputs)

    def _tell_state(self) -> None:
        streams = self.streams
        streams.states.publish(self.status, self._fault(), streams.is_leaving, streams.slot_wait_s())

    def _fault(self) -> str:
        """Return why a request would not run now, or "". A rank may be silent during a step, for a few times the
        duration of the longest step so far."""
        if self._worker_group is None:
            return f"the engine is {self.status}" + (f": {self._detail}" if self._detail else "")
        now = self._clock()
        rank_fault = self._worker_group.silent_rank(now) or self._worker_group.hung_step(now)
        return rank_fault or self._scheduler.weights.fault or self._model_check.fault

    def _worker_group_lost(self, reason: str) -> None:
        logger.error("worker group of epoch %d lost: %s", self._scheduler.epoch, reason)
        self.detach(reason)
        self._on_worker_group_lost(reason)

    def _housekeep(self, now: float) -> None:
        """Check streams and ranks, publish the state, and send the requests of checks that are due."""
        self.streams.check_waiting()
        self.streams.states.publish_soon()  # sent regularly, so that a silent engine is noticed
        if self._worker_group is not None and self.status == "ready":
            self._model_check.send_if_due(now)
            if not self._scheduler.is_paused and not self.streams.is_paused:
                self._canary.send_if_due()
            if self.drafts is not None:
                self.drafts.check_acceptance()
        if self._worker_group is not None:
            self._worker_group.check_heartbeats(now, self._settings.step_timeout_s)
        if self._worker_group is not None and self._scheduler.captures.graphs == GraphCount():
            self._scheduler.captures.graphs = self._worker_group.last_heartbeat[0].graphs  # later results contain it
