"""Decides what each step runs: rounds, prompt chunks, and their KV pages.

The coordinator's loop and the local engine call `schedule` for the next plan, and `apply` with its result one step
later. Pure: takes and returns plain values, and gets the clock as an argument.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from aerie.attention.config import CacheConfig
from aerie.attention.kv_cache.page_allocator import PageAllocator
from aerie.attention.kv_cache.prefix_cache import PrefixCache
from aerie.attention.kv_cache.snapshots import Snapshots
from aerie.attention.kv_cache.window_pages import WindowPages, WindowSizes
from aerie.workers.config import GraphCapture, LoraConfig, RoundShapes, SchedulerConfig
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.prompt_inputs import ImageSizes
from aerie.workers.scheduling.adapters import Adapters
from aerie.workers.scheduling.commands.command import CaptureGraph, Command, CommandAnswer, LoadWeights, Work
from aerie.workers.scheduling.commands.command_queue import (
    CapturePacing,
    CommandQueue,
    DraftCheck,
    OnAnswered,
    WeightVersions,
)
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.image_chunks import ImageChunks
from aerie.workers.scheduling.latency_budget import LatencyBudget, StepBudget, StepRounds
from aerie.workers.scheduling.plan import StepPlan, StepResult, pack_i32, unpack_i32
from aerie.workers.scheduling.prefill import PrefillPlanner
from aerie.workers.scheduling.queues.admission import Admission
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.queues.waiting_queue import GrammarQueue
from aerie.workers.scheduling.request import FinishReason, Request, RequestOutput, UnfinishedError
from aerie.workers.scheduling.rounds import PlannedRounds, RoundPlanner
from aerie.workers.scheduling.sequence import InFlightStep, PlanBuilder
from aerie.workers.scheduling.shapes.shape_choice import ShapeChoice
from aerie.workers.scheduling.slot_lengths import Slots
from aerie.workers.scheduling.slot_pages import SlotPages
from aerie.workers.scheduling.stats import SchedulerStats
from aerie.workers.scheduling.step_results import StepResults
from aerie.workers.scheduling.step_time import Prediction, Step, StepTime

UPDATE_EVERY = 128  # steps between updates of an "auto" ITL target


class Scheduler:
    """Continuous batching with chunked prefill and any number of steps in flight.

    Each step runs a round of every running request (`RoundPlanner`) and, within a latency budget (`LatencyBudget`),
    prompt chunks by deadline (`PrefillPlanner`). If pages run out, the youngest request is preempted. So the oldest can
    take every page, which suffices (see `submit`).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        num_pages: int,
        max_model_len: int,
        clock: Callable[[], float],
        shapes: RoundShapes = RoundShapes(),  # noqa: B008 - frozen
        lookahead: int = 0,
        choose_shape: Callable[[RoundShapes], int] | None = None,
        graph_capture: GraphCapture = GraphCapture(),  # noqa: B008 - frozen
        num_snapshots: int | None = None,
        window: WindowSizes | None = None,
        hidden_size: int = 0,
        images: ImageSizes | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        """num_pages: pages of each rank's pool, without page 0.
        lookahead: 1 with a draft whose KV depends on the next token (`PrefixCache`).
        choose_shape: replaces `ShapeChoice`; called once per step for the index of the shape.
        num_snapshots: saved states that each rank's state pool has room for; None without recurrent layers.
        window: sizes of windowed layers; None without such layers.
        hidden_size, images: as in `EngineLayout`.
        lora: None: no adapters.
        """
        self._config = config
        self.cache = cache
        self._clock = clock
        self._shapes = shapes
        self.num_slots = config.num_slots  # maximum number of running requests
        self.num_draft_tokens = shapes.num_draft_tokens  # tokens per speculative round; 0 without a draft
        self.shape_choice = ShapeChoice(shapes, config.num_slots)
        windows = None if window is None else WindowPages(window, num_pages, cache.page_size, cache.prefix_cache)
        self.allocator = PageAllocator(num_pages, windows)
        snapshots = Snapshots(range(num_snapshots)) if num_snapshots is not None else None
        self.prefix_cache = None
        if cache.prefix_cache:
            self.prefix_cache = PrefixCache(self.allocator, cache.page_size, lookahead, snapshots)
        slot_sizes = (config.num_slots, cache.page_size, cache.state_interval, shapes.max_ahead_tokens)
        self.slot_pages = SlotPages(self.allocator, self.prefix_cache, *slot_sizes)
        self.stats = SchedulerStats(accepted_histogram=[0] * shapes.max_new_tokens)
        self._grammars = GrammarQueue()
        self.commands = CommandQueue()
        self.adapters = Adapters(lora, self.commands, clock)
        self.queues = RequestQueues(self.slot_pages, self.stats, self._grammars, self.adapters, shapes.keeps_tokens)
        self._images = ImageChunks(images)
        prompt_parts = (self.stats, clock, config.step_token_limit, shapes, self._grammars, self._images)
        self._prefill = PrefillPlanner(self.queues, *prompt_parts)
        self.rounds = RoundPlanner(self.queues, shapes, self.shape_choice, choose_shape)
        engine = (shapes, self.shape_choice.acceptance, clock, hidden_size, images)
        self.admission = Admission(config, max_model_len, self.queues, *engine)
        self._results = StepResults(self.queues, self.stats, self.shape_choice, shapes, self.admission, clock)
        self.is_paused = False  # whether no step is planned; commands are carried out
        self.weights = WeightVersions(self.commands, self.slot_pages, DraftCheck(lambda: self.stats.accepted_histogram))
        self.captures = CapturePacing(graph_capture.busy_interval_s, clock)
        self.epoch = 0
        self._in_flight: deque[InFlightStep] = deque()
        self._next_step = 0
        self._has_rested = False  # the newest plan left out rounds (`_rests`)
        self.step_time: StepTime | None = None

    @staticmethod
    def of(layout: EngineLayout, clock: Callable[[], float]) -> "Scheduler":
        """Return the scheduler of an engine whose ranks are built."""
        return Scheduler(
            layout.scheduler,
            layout.cache,
            layout.num_pages,
            layout.max_model_len,
            clock,
            layout.shapes,
            layout.lookahead,
            graph_capture=layout.graph_capture,
            num_snapshots=layout.num_snapshots if layout.bytes_per_snapshot else None,
            window=layout.window_sizes,
            hidden_size=layout.hidden_size,
            images=layout.images,
            lora=layout.lora,
        )

    def use_costs(self, costs: CostTable) -> None:
        """Use the step costs of the current ranks. Called for every worker group."""
        self.step_time = self._results.step_time = StepTime(costs, self._config.num_slots)
        self.captures.row_ms = self.step_time.row_ms()
        self._images.use_costs(costs)
        self._prefill.budget = self.admission.expected.budget = LatencyBudget.of(self._config, self.step_time)
        self.queues.set_deadlines(self._prefill.deadline_s)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self.queues.active)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.queues.waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans without an applied result."""
        return len(self._in_flight)

    @property
    def expected(self) -> Prediction | None:
        """Predicted time of the newest plan in flight; None without costs."""
        return self._in_flight[-1].expected

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens not planned yet, except those found in the prefix cache on arrival."""
        return self.queues.backlog_tokens

    def prefill_tokens_per_s(self) -> float:
        """Return the speed of prefill together with the current rounds, in tokens per second; 0 without costs."""
        slots = self.slot_pages.round_slots()
        rounds = self.rounds.load(slots, self._shapes.largest_mixed_shape(len(slots)))
        return self._prefill.budget.tokens_per_s(rounds) if self._prefill.budget else 0.0

    @property
    def kv_usage(self) -> float:
        """Share of pages that requests hold, or of window pages if that is larger; 0 to 1."""
        return self.allocator.usage

    def submit(self, request: Request, resumed: bool = False) -> None:
        """Queue a request. It continues after its output, if it has one. resumed: accept it even if the queue is full.

        Raises QueueFullError, RequestTooLargeError, or ValueError for an invalid request.
        """
        if not resumed:
            self.admission.check_room(request)
        self.admission.check(request)
        histogram = request.acceptance_histogram  # with a draft: a count for each number of accepted draft tokens
        histogram += [0] * (self._shapes.max_new_tokens - len(histogram)) if self._shapes.default else []
        self.queues.add(request, self._clock(), self._prefill.deadline_s)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End a request in any state, and free its slot and pages. Return it; None if the id is unknown."""
        sequence = self.queues.find(request_id)
        if sequence is None:
            return None
        self.queues.finish(sequence, reason, None, self._clock())
        return sequence.request

    def flush_prefix_cache(self) -> int:
        """Empty the prefix cache. Return the number of pages that it had. Steps may be in flight.

        Raises UnfinishedError, and changes nothing, if there are requests, because these would fill it again.
        """
        if self.num_running or self.num_waiting:
            raise UnfinishedError(f"{self.num_running} requests run and {self.num_waiting} wait")
        return 0 if self.prefix_cache is None else self.prefix_cache.clear()

    def blamed(self) -> list[Request]:
        """Return the requests to suspect if the ranks fail now: the one on probation, else all with a slot."""
        if not self._in_flight:
            return []
        return [sequence.request for sequence in self.queues.on_probation or self.queues.active.values()]

    def requeue_all(self, epoch: int) -> list[Request]:
        """Return all active requests to the queue with their output, because the worker group and its KV are lost.

        Forgets plans in flight. Steps count from 0 in the new `epoch`; results of other epochs are dropped. If a step
        was in flight, the requests are resumed one at a time (`RequestQueues.suspects`). Return them, oldest first.
        """
        had_step = bool(self._in_flight)
        self._in_flight.clear()
        self._grammars.reset()
        self._prefill.shared.clear()
        self._images.clear()
        self.fail_commands("the ranks were lost")
        self.captures.reset()
        self.epoch = epoch
        self._next_step = 0
        self._has_rested = False
        return self.queues.requeue(had_step)

    def schedule(self) -> StepPlan | None:
        """Return the next plan; None if nothing can run before another result, answer or request arrives, or before
        `next_command`. In this order:

        1. Commands that are due are queued: a graph capture, the question whether adapters are read. Commands run
           between steps, so no step is planned while one waits, nor while the engine is paused.
        2. Windows slide, which frees pages for what follows.
        3. Rounds get their pages first: a request that runs must not wait for one that begins. The time of the rounds
           is then known, and prompts get what the latency budget leaves (`_choose`).
        4. The plan gets the states to save, which belong to the lengths before the step. Then lengths move as far as
           the step may write (`_launch`), so that the next step can be planned before this one's result is there.
           The rest of the plan is what has changed since the last one (`_plan`).
        """
        self._add_due_capture()
        self.adapters.poll()
        if self.is_paused or not self.commands.is_empty:
            return None
        self.slot_pages.slide()
        builder = PlanBuilder(self._next_step, self._in_flight[0].step if self._in_flight else self._next_step)
        planned, budget, rests = self._choose(builder)
        if len(planned.slots) == 0 and not builder.chunks:
            return None
        plan = self._plan(builder, planned, budget.planned(planned.load))
        self._next_step += 1
        self._has_rested = rests
        return plan

    def _add_due_capture(self) -> None:
        if self.captures.is_due(is_idle=not self.num_running and not self.num_waiting):
            self.captures.is_pending = True
            self.commands.add(CaptureGraph(), self.captures.answered)

    def _choose(self, builder: PlanBuilder) -> tuple[PlannedRounds, StepBudget, bool]:
        """Plan rounds, then prompt chunks beside them. Return the rounds, the budget after the chunks, and whether
        rounds were left out for the sake of prompts (`_rests`).

        Rounds that gave way to prompts are planned after all if the prompts have no room. A chunk of an older request
        may preempt a younger one, whose round is then dropped.
        """
        running, all_slots = self._prefill.give_way(builder)
        planned = self.rounds.plan(builder, running, self.step_time, self._prefill.budget, self._rests)
        rests = len(planned.slots) == 0 < len(running)
        drafted, preferred = self._shapes[planned.next_shape], self.rounds.preferred(planned.next_shape)
        budget = self._prefill.plan(builder, drafted, planned.load, preferred, rests)
        if (rests or len(running) < len(all_slots)) and not builder.chunks:
            rests = False
            planned = self.rounds.plan(builder, self.slot_pages.round_slots(), self.step_time, self._prefill.budget)
        if builder.preempted and len(planned.slots):
            alive = self.slot_pages.decoding[planned.slots]
            slots = planned.slots[alive]
            load = self.rounds.load(slots, planned.shape, planned.next_shape)
            planned = planned._replace(slots=slots, ends=planned.ends[alive], load=load)
        return planned, budget, rests

    def _plan(self, builder: PlanBuilder, planned: PlannedRounds, load: Step) -> StepPlan:
        """Launch the step of these rounds and the builder's chunks, and return its plan. States are saved before the
        launch, which moves the lengths that they belong to."""
        slot_pages, shape, next_shape, slots, ends = self.slot_pages, *planned[:4]
        window_changes = slot_pages.take_window_changes()
        saved_states = slot_pages.save_states(slots, self._shapes.max_new_tokens)
        chunks, encodings, encodes = self._images.finish_plan(builder.chunks)
        in_flight = self._launch(builder, shape, slots, load, is_change=next_shape != shape or encodes)
        drafting = slot_pages.speculative[in_flight.slots]
        next_shape = next_shape if drafting.any() else 0
        drafted = self._shapes.default if self._shapes.model_free and drafting.any() else next_shape
        slot_pages.drafted[in_flight.slots] = np.where(drafting, drafted, 0)
        in_flight.num_drafted = np.where(drafting, self._shapes[next_shape].width - 1, 0)
        return StepPlan(
            epoch=self.epoch,
            step=self._next_step,
            slots=pack_i32(slots.astype(np.int32)),
            shape=shape if len(slots) else 0,
            next_shape=next_shape,
            drafting=drafting.tobytes() if drafted else b"",
            max_kv_len=max(builder.max_kv_len, int(ends.max()) if len(ends) else 0),
            page_updates=slot_pages.take_updates(),
            inits=tuple(builder.inits),
            chunks=chunks,
            grammars=self._grammars.announce(self.queues.waiting),
            ended=pack_i32(self._grammars.take_ended()),
            mask_wait_ms=self._prefill.mask_wait_ms(in_flight.expected),
            cleared_pages=slot_pages.take_cleared(),
            saved_states=saved_states,
            window_updates=window_changes[0],
            cleared_window_pages=window_changes[1],
            placed_adapters=self.adapters.take_changes(),
            encodings=encodings,
        )

    def _rests(self, rounds: StepRounds) -> bool:
        """Return whether the step leaves out these rounds, of several tokens, for the sake of prompts; never twice in
        a row, so that a request waits for at most one more step."""
        if self._has_rested or self._shapes[rounds.shape].max_new_tokens == 1:
            return False
        return self._prefill.may_rest(rounds)

    def _launch(self, builder: PlanBuilder, shape: int, slots: Slots, load: Step, is_change: bool) -> InFlightStep:
        """Record the builder's plan as in flight, and return it."""
        slot_pages, by_slot = self.slot_pages, self.queues.by_slot
        max_new_tokens = self._shapes[shape].max_new_tokens
        in_flight = InFlightStep(
            self._next_step,
            [by_slot[slot] for slot in slots.tolist()] + builder.last_chunks,
            slots=slots,
            numbers=slot_pages.number[slots],
            max_new_tokens=max_new_tokens,
            shape=shape,
            drafted=slot_pages.drafted[slots],
            reason=self.shape_choice.reason.value,
            with_prompt_logprobs=builder.with_prompt_logprobs,
            load=load,
            match_classes=self.shape_choice.acceptance.classes(slots, slot_pages.number[slots])
            if self._shapes.model_free
            else None,
            expected=None if self.step_time is None else self.step_time.predict(load),
            is_change=is_change,
        )
        self._in_flight.append(in_flight)
        slot_pages.plan_round(slots, max_new_tokens)
        for sequence in builder.last_chunks:
            self.queues.start_decoding(sequence)
        return in_flight

    def apply(self, result: StepResult) -> list[RequestOutput]:
        """Apply the oldest result, unless it belongs to another epoch. Return the outputs of requests that changed."""
        if result.epoch != self.epoch:
            self.stats.num_stale_results += 1
            return []
        in_flight_step = self._in_flight.popleft()
        assert result.step == in_flight_step.step, f"result of step {result.step}, awaited {in_flight_step.step}"
        self.captures.graphs = result.graphs
        self._grammars.mark_compiled(unpack_i32(result.grammars_ready).tolist())
        outputs = self._results.apply(in_flight_step, result, self._next_step - 1)
        self.weights.draft.observe()
        if self._prefill.budget is not None and result.step % UPDATE_EVERY == UPDATE_EVERY - 1:
            self._prefill.budget = self.admission.expected.budget = self._prefill.budget.updated()
        return outputs

    def add_command(self, work: Work, on_answered: OnAnswered) -> None:
        """Queue a command. on_answered: see `CommandQueue.add`."""
        if isinstance(work, LoadWeights):
            self.weights.load(work, on_answered)
        else:
            self.commands.add(work, on_answered)

    def fail_commands(self, reason: str) -> None:
        """End all commands, and loads of adapters, with an error."""
        self.adapters.fail_loads(reason)
        self.commands.fail_all(reason)

    def next_command(self) -> Command | None:
        """Return the next command; None if none waits, or while steps or another command are in flight. Call it when
        `schedule` returns None."""
        if self._in_flight or not self.commands.is_due:
            return None
        self._next_step += 1
        return self.commands.next(self.epoch, self._next_step - 1)

    def command_answered(self, answers: Sequence[CommandAnswer]) -> None:
        """End the command in flight with the answers of all ranks, unless they belong to another epoch."""
        if answers[0].epoch == self.epoch:
            self.commands.answered(answers)
