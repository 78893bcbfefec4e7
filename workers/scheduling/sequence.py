"""The scheduler's state of a request, of a step in flight, and of a plan under construction."""

import numpy as np
import numpy.typing as npt

from workers.scheduling.plan import Chunk, SlotInit
from workers.scheduling.request import Request
from workers.scheduling.timing.step import Prediction, Step

Int64s = npt.NDArray[np.int64]


class Sequence:
    """A request's state.

    number: order of arrival; its priority for pages.
    deadline_s: its priority among prompts (`workers.scheduling.prefill`).
    num_cached: tokens found in the prefix cache on arrival; 0 without costs.
    computed: tokens that are cached or in planned chunks.
    kept: tokens whose KV was cached at its last admission; recomputing them for states writes no KV.
    probation: steps with new tokens that it must still complete before another suspect may run; 0 if it is not a
        suspect.
    not_before: the last step planned before its preemption; it may be admitted again after that step's result.
    """

    __slots__ = (
        "request",
        "number",
        "deadline_s",
        "prompt",
        "tokens",
        "slot",
        "num_cached",
        "computed",
        "kept",
        "not_before",
        "probation",
        "pages_missing",
        "max_len",
        "submitted_s",
        "first_token_s",
        "first_output",
        "was_admitted",
        "is_finished",
    )

    def __init__(self, request: Request, number: int, now: float) -> None:
        self.request = request
        self.number = number
        self.deadline_s = now
        self.prompt = np.asarray(request.prompt, np.int32)
        self.tokens = self.prompt  # prompt and output at its last admission
        self.slot = -1
        self.num_cached = 0
        self.computed = self.kept = 0
        self.not_before = -1
        self.probation = 0
        self.pages_missing = (-1, 0)  # (number of cache insertions, missing pages) when it last did not fit
        self.max_len = len(request.prompt) + request.sampling.max_tokens
        self.submitted_s = now
        self.first_token_s = -1.0
        self.first_output = 0  # length of the output after its first token on this engine
        self.was_admitted = False
        self.is_finished = False

    @property
    def order(self) -> tuple[float, int]:
        """Priority among prompts: deadline, then arrival."""
        return self.deadline_s, self.number

    def known_tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and output, int32."""
        output = self.request.output
        return np.concatenate((self.prompt, np.asarray(output, np.int32))) if output else self.prompt


class InFlightStep:
    """A planned step without an applied result. Its first `num_rounds` sequences run a round, the other n - num_rounds
    their last chunk.

    slots, numbers: [n] slots and numbers of the sequences.
    max_new_tokens: maximum tokens that a round emits.
    shape: index of the shape that the rounds verify.
    drafted: [num_rounds] shape in which each round's tree was drafted.
    num_drafted: [n] tokens that the step drafts for each sequence.
    reason: why the rounds have this shape (`Reason`).
    with_prompt_logprobs: sequences with prompt log-probabilities in this step, in the plan's order.
    load: the step's work, for `StepTime`.
    match_classes: [num_rounds] `MatchSurvival.classes`; None in engines that do not copy drafts.
    expected: predicted time; None without costs.
    is_change: whether the rounds draft another shape than they verify, so that their time is neither shape's.
    """

    __slots__ = (
        "step",
        "sequences",
        "slots",
        "numbers",
        "num_rounds",
        "max_new_tokens",
        "shape",
        "drafted",
        "num_drafted",
        "reason",
        "with_prompt_logprobs",
        "expected",
        "load",
        "match_classes",
        "is_change",
    )

    def __init__(
        self,
        step: int,
        sequences: list[Sequence],
        round_slots: Int64s,
        round_numbers: Int64s,
        max_new_tokens: int,
        shape: int,
        drafted: Int64s,
        reason: str,
        with_prompt_logprobs: list[Sequence],
        load: Step = Step(),  # noqa: B008 - immutable
        match_classes: Int64s | None = None,
        expected: Prediction | None = None,
        is_change: bool = False,
    ) -> None:
        self.step = step
        self.sequences = sequences
        self.slots = round_slots
        self.numbers = round_numbers
        self.num_rounds = len(round_slots)
        self.max_new_tokens = max_new_tokens
        self.shape = shape
        self.drafted = drafted
        self.num_drafted = np.zeros(len(sequences), np.int64)
        self.reason = reason
        self.with_prompt_logprobs = with_prompt_logprobs
        self.expected = expected
        self.load = load
        self.match_classes = match_classes
        self.is_change = is_change
        rest = sequences[len(round_slots) :]
        if rest:
            self.slots = np.concatenate((round_slots, np.array([sequence.slot for sequence in rest], np.int64)))
            self.numbers = np.concatenate((round_numbers, np.array([sequence.number for sequence in rest], np.int64)))

    @staticmethod
    def without_requests(step: int) -> "InFlightStep":
        """Return a step that captures a graph."""
        none = np.empty(0, np.int64)
        return InFlightStep(step, [], none, none, 0, 0, none, "", [])


class PlanBuilder:
    """Plan number `step` under construction.

    oldest_in_flight: the first step without an applied result.
    inits, chunks: as in `StepPlan`.
    last_chunks: sequences whose prompt ends in this plan, in the order of their chunks.
    with_prompt_logprobs: sequences with prompt log-probabilities in this plan.
    max_kv_len: exclusive bound on the positions that the chunks read or write.
    preempted: whether the plan has preempted a request; then it admits none.
    admits: False after a new request had no room.
    held: numbers of waiting requests whose prefix this plan computes for another request.
    num_planned: tokens of the plan's chunks, by slot.
    """

    __slots__ = (
        "step",
        "oldest_in_flight",
        "inits",
        "chunks",
        "last_chunks",
        "with_prompt_logprobs",
        "max_kv_len",
        "preempted",
        "admits",
        "held",
        "num_planned",
    )

    def __init__(self, step: int, oldest_in_flight: int) -> None:
        self.step = step
        self.oldest_in_flight = oldest_in_flight
        self.inits: list[SlotInit] = []
        self.chunks: list[Chunk] = []
        self.last_chunks: list[Sequence] = []
        self.with_prompt_logprobs: list[Sequence] = []
        self.max_kv_len = 0
        self.preempted = False
        self.admits = True
        self.held: set[int] = set()
        self.num_planned: dict[int, int] = {}
