"""Waiting and active requests, and the moves between them. Owned by the scheduler, which decides on the moves."""

from collections.abc import Callable

from aerie.attention.kv_cache.prefix_cache import Match
from aerie.workers.prompt_inputs import InputKeys
from aerie.workers.scheduling.adapters import Adapter, Adapters
from aerie.workers.scheduling.plan import SlotInit, pack_i32
from aerie.workers.scheduling.queues.tenants import Tenants
from aerie.workers.scheduling.queues.waiting_queue import GrammarQueue, WaitingQueue
from aerie.workers.scheduling.request import FinishReason, Request, RequestState
from aerie.workers.scheduling.sequence import PlanBuilder, Sequence
from aerie.workers.scheduling.slot_pages import SlotPages
from aerie.workers.scheduling.stats import SchedulerStats

PROBATION_STEPS = 3  # steps with new tokens


class RequestQueues:
    """All unfinished requests.

    waiting: requests without a slot, in the order of admission: tenants in turn, each one's by deadline. Preempted
        requests keep their deadline, so they are near the head.
    tenants: their counters.
    active: requests with a slot, by number.
    prefilling: active requests whose prompts are not computed yet, by number.
    by_slot: active requests by slot.
    grammars: state of requests with grammars.
    adapters: which adapters requests have.
    suspects: requests that were in a step that hung or crashed, until each has completed `PROBATION_STEPS`.
    """

    def __init__(
        self,
        slot_pages: SlotPages,
        stats: SchedulerStats,
        grammars: GrammarQueue,
        adapters: Adapters,
        keeps_tokens: bool = False,
    ) -> None:
        """keeps_tokens: send the ranks the tokens of every request that enters a slot."""
        self.waiting = WaitingQueue()
        self.tenants = Tenants()
        self.active: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.by_slot: dict[int, Sequence] = {}
        self._by_id: dict[str, Sequence] = {}
        self._by_number: dict[int, Sequence] = {}
        self.slot_pages = slot_pages
        self.grammars = grammars
        self.adapters = adapters
        self.suspects: set[Sequence] = set()
        self._stats = stats
        self._keeps_tokens = keeps_tokens
        self._num_submitted = 0
        self._input_keys = InputKeys()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def find(self, request_id: str) -> Sequence | None:
        """Return the unfinished request with this id."""
        return self._by_id.get(request_id)

    def find_number(self, number: int) -> Sequence | None:
        """Return the unfinished request with this number."""
        return self._by_number.get(number)

    def requests_with(self, adapter: Adapter) -> list[str]:
        """Return the ids of unfinished requests with this adapter."""
        return [name for name, sequence in self._by_id.items() if sequence.adapter is adapter]

    def has_started(self, request_id: str) -> bool:
        """Return whether the request has had its first step. An unknown one has ended."""
        sequence = self.find(request_id)
        return sequence is None or sequence.was_admitted

    @property
    def youngest(self) -> Sequence:
        """Return the last arrival among active requests."""
        return self.active[max(self.active)]

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens not planned yet, except those found in the prefix cache on arrival."""
        admitted = sum(len(sequence.tokens) - sequence.computed for sequence in self.prefilling.values())
        return admitted + self.waiting.load.backlog_tokens

    def add(self, request: Request, now: float, deadline_s: Callable[[Sequence], float]) -> None:
        """Queue a request that `Admission.check` has accepted."""
        adapter = self.adapters.find(request.sampling.adapter)
        sequence = Sequence(request, self._num_submitted, now, self.tenants.of(request.owner), adapter)
        if request.inputs is not None:
            sequence.prompt = sequence.tokens = self._input_keys.of(sequence.prompt, request.inputs)
        sequence.tenant.last_s = now
        sequence.deadline_s = deadline_s(sequence)
        self._num_submitted += 1
        self._by_id[request.request_id] = self._by_number[sequence.number] = sequence
        self._wait(sequence)

    def set_deadlines(self, deadline_s: Callable[[Sequence], float]) -> None:
        """Set the deadlines of all unfinished requests with `deadline_s`, and use it for later ones."""
        for sequence in self._by_id.values():
            sequence.deadline_s = deadline_s(sequence)
        self.waiting.reorder()

    def admit(self, sequence: Sequence, match: Match) -> SlotInit:
        """Give a waiting request a slot and its cached prefix."""
        request = sequence.request
        self.waiting.remove(sequence)
        self.tenants.record_start(sequence.tenant)
        self.grammars.record_admission(sequence)
        adapter = sequence.adapter
        drafts = request.sampling.speculative and (adapter is None or adapter.draft.is_wanted())
        sequence.slot = self.slot_pages.take_slot(
            sequence.number, len(sequence.tokens), sequence.max_len, drafts, match
        )
        self.slot_pages.rare_sampling[sequence.slot] = request.sampling.is_rare
        self.slot_pages.cache_salt[sequence.slot] = self.slot_pages.salt(-1, sequence.salt)
        sequence.computed, sequence.store_from = match.num_saved, len(match.pages) * self.slot_pages.page_size
        request.state = RequestState.PREFILL
        self.active[sequence.number] = self.prefilling[sequence.number] = sequence
        self.by_slot[sequence.slot] = sequence
        counts = request.sampling.needs_token_counts or self._keeps_tokens
        grammar = request.sampling.grammar
        return SlotInit(
            slot=sequence.slot,
            num_cached=sequence.computed,
            prompt_len=len(request.prompt),
            max_len=sequence.max_len,
            sampling=request.sampling,
            prompt=pack_i32(sequence.ids(0, len(request.prompt))) if counts else b"",
            output=pack_i32(request.output) if counts or grammar is not None else b"",
            number=sequence.number,
            state_row=match.row,
            position_shift=0 if request.inputs is None else request.inputs.shift,
            adapter=self.adapters.enter(adapter),
        )

    def stop_drafting(self, adapter: Adapter) -> None:
        """Let the running requests of an adapter decode without speculation from the next plan on."""
        slots = [sequence.slot for sequence in self.active.values() if sequence.adapter is adapter]
        self.slot_pages.speculative[slots] = False
        self.slot_pages.num_changes += 1

    def start_decoding(self, sequence: Sequence) -> None:
        """Record that the prompt's last chunk is planned, so that the request runs rounds from the next plan on."""
        del self.prefilling[sequence.number]
        sequence.request.state = RequestState.RUNNING
        self.slot_pages.start_decoding(sequence.slot)

    def preempt_youngest(self, builder: PlanBuilder) -> None:
        """Preempt the youngest active request."""
        assert len(self.active) > 1, "a request that runs alone is short of pages: submit should have refused it"
        self.preempt(self.youngest, builder.step - 1)
        self._stats.num_preemptions += 1
        builder.preempted = True

    def preempt(self, sequence: Sequence, last_step: int) -> None:
        """Take a request's slot and pages. It returns to the queue with its output and deadline.

        last_step: the last step that may run it.
        """
        self._leave_slot(sequence, int(self.slot_pages.committed[sequence.slot]), has_ended=False)
        sequence.not_before = last_step
        sequence.request.num_preemptions += 1
        self._wait(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, num_cached: int | None, now: float) -> None:
        """End a request in any state.

        num_cached: number of its KV tokens that may be cached, if the ranks have ended it; None if they have not: all
            committed ones.
        """
        request = sequence.request
        if sequence.slot >= 0:
            committed = int(self.slot_pages.committed[sequence.slot])
            self._leave_slot(
                sequence, committed if num_cached is None else num_cached, has_ended=num_cached is not None
            )
        else:
            self.waiting.remove(sequence)
        del self._by_id[request.request_id]
        self._by_number.pop(sequence.number, None)
        self.grammars.end(sequence)
        self.adapters.left(sequence.adapter)
        self.suspects.discard(sequence)
        sequence.is_finished = True
        request.state = RequestState.FINISHED
        request.num_rounds = sum(request.acceptance_histogram)
        stats, num_output = self._stats, len(request.output)
        stats.count_finished(reason.value)
        stats.e2e_s.observe(now - sequence.submitted_s)
        stats.request_prompt_tokens.observe(len(request.prompt))
        stats.request_generation_tokens.observe(num_output)
        stats.request_max_generation_tokens.observe(num_output)
        stats.request_max_tokens.observe(request.sampling.max_tokens)
        if sequence.first_token_s >= 0:
            stats.prefill_s.observe(sequence.first_token_s - sequence.submitted_s - request.queue_s)
            stats.decode_s.observe(now - sequence.first_token_s)
        num_later = num_output - sequence.first_output
        if sequence.first_token_s >= 0 and num_later > 0:
            stats.time_per_output_token_s.observe((now - sequence.first_token_s) / num_later)

    @property
    def on_probation(self) -> list[Sequence]:
        """Return the suspect that has a slot, if any, in a list."""
        return [sequence for sequence in self.suspects if sequence.slot >= 0]

    def may_be_admitted(self, sequence: Sequence) -> bool:
        """Whether a request may get a slot. Of the suspects (requests whose step crashed) only one runs at a time, so
        that another crash identifies the cause."""
        return sequence.probation == 0 or not self.on_probation

    @property
    def awaits_tokens(self) -> bool:
        """Whether any request needs `record_new_tokens`."""
        return bool(self.suspects) or self.grammars.has_late

    def record_new_tokens(self, sequence: Sequence) -> None:
        """Record that a step emitted tokens for a request."""
        self.grammars.record_new_tokens(sequence)
        if sequence.probation:
            sequence.probation -= 1
            if sequence.probation == 0:
                self.suspects.discard(sequence)

    def requeue(self, after_crash: bool = False) -> list[Request]:
        """Put all active requests back into the queue, with their output. Return them, oldest first.

        after_crash: whether the request on probation, or else all of them, become suspects.
        """
        lost = [self.active[number] for number in sorted(self.active)]
        for sequence in self.on_probation or lost if after_crash else ():
            sequence.probation = PROBATION_STEPS
            self.suspects.add(sequence)
        for sequence in lost:
            self.adapters.leave(sequence.adapter)
            self._wait(sequence)
        for sequence in self.waiting:
            sequence.not_before, sequence.num_cached = -1, 0
            sequence.pages_missing = (-1, 0)
        self.waiting.reorder()
        self.active.clear()
        self.prefilling.clear()
        self.by_slot.clear()
        self.slot_pages.reset()
        return [sequence.request for sequence in lost]

    def _leave_slot(self, sequence: Sequence, num_cached: int, has_ended: bool) -> None:
        self.slot_pages.release(sequence.slot, sequence.known_tokens(), num_cached, has_ended)
        del self.active[sequence.number], self.by_slot[sequence.slot]
        self.prefilling.pop(sequence.number, None)
        self.adapters.leave(sequence.adapter)
        sequence.slot = -1

    def _wait(self, sequence: Sequence) -> None:
        """Put a request without a slot into the waiting queue; its known tokens become its prompt."""
        sequence.slot = -1
        sequence.tokens = sequence.known_tokens()
        sequence.request.state = RequestState.WAITING
        sequence.tenant_counter = None
        if sequence.tenant not in self.waiting.by_tenant():
            self.tenants.record_return(sequence.tenant)
        self.waiting.add(sequence)
