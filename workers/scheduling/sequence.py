"""State that the scheduler keeps per request and per step in flight."""

import numpy as np
import numpy.typing as npt

from workers.scheduling.plan import Chunk, SlotInit
from workers.scheduling.request import Request
from workers.scheduling.step_time import Prediction, Step

Int64s = npt.NDArray[np.int64]


class Sequence:
    """A request's state.

    number: order of arrival; its priority for pages.
    deadline_s: its priority among prompts (`workers.scheduling.prefill`).
    num_cached: tokens found in the prefix cache on arrival; 0 without costs.
    computed: tokens in planned chunks.
    kept: tokens whose KV was cached at its last admission; recomputing them writes no KV.
    probation: steps with tokens that it must complete before other suspects run; 0 unless a step with it hung or
        crashed.
    not_before: the last step planned before its preemption; it is admitted again after that step's result.
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
        self.pages_missing = (-1, 0)  # (insertions into the cache, pages it needed) when it last did not fit
        self.max_len = len(request.prompt) + request.sampling.max_tokens
        self.submitted_s = now
        self.first_token_s = -1.0
        self.first_output = 0  # length of the output when its first token here had come
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
    """A planned step. Its first `num_rounds` sequences ran a round, the others their last chunk.

    shape: that the rounds verify.
    drafted: [n] shape of each sequence's tree.
    num_drafted: tokens that the step drafts per sequence.
    reason: why this shape.
    asking: sequences with prompt log-probabilities in this step, in the plan's order.
    load: what the step runs.
    match_classes: [num_rounds] what was known of each request's drafts (`MatchSurvival.classes`); None elsewhere.
    expected: its predicted time; None without costs.
    """

    __slots__ = (
        "step",
        "sequences",
        "slots",
        "users",
        "num_rounds",
        "max_new_tokens",
        "shape",
        "drafted",
        "num_drafted",
        "reason",
        "asking",
        "expected",
        "load",
        "match_classes",
    )

    def __init__(
        self,
        step: int,
        sequences: list[Sequence],
        round_slots: Int64s,
        round_users: Int64s,
        max_new_tokens: int,
        shape: int,
        drafted: Int64s,
        reason: str,
        asking: list[Sequence],
        load: Step = Step(),  # noqa: B008 - immutable
        match_classes: Int64s | None = None,
    ) -> None:
        self.step = step
        self.sequences = sequences
        self.slots = round_slots
        self.users = round_users
        self.num_rounds = len(round_slots)
        self.max_new_tokens = max_new_tokens
        self.shape = shape
        self.drafted = drafted
        self.num_drafted = np.zeros(len(sequences), np.int64)
        self.reason = reason
        self.asking = asking
        self.expected: Prediction | None = None
        self.load = load
        self.match_classes = match_classes
        rest = sequences[len(round_slots) :]
        if rest:
            self.slots = np.concatenate((round_slots, np.array([sequence.slot for sequence in rest], np.int64)))
            self.users = np.concatenate((round_users, np.array([sequence.number for sequence in rest], np.int64)))

    @staticmethod
    def without_requests(step: int) -> "InFlightStep":
        """A step that captures a graph."""
        none = np.empty(0, np.int64)
        return InFlightStep(step, [], none, none, 0, 0, none, "", [])


class PlanBuilder:
    """Plan number `step` under construction.

    oldest_in_flight: first step without an applied result.
    preempted: this plan preempted a request, so it admits none.
    admits: False once a new request had no room.
    held: numbers of waiting requests whose prefix this plan computes for another.
    asking: requests with prompt log-probabilities in this plan.
    num_planned: tokens of the plan's chunks, by slot.
    """

    __slots__ = (
        "step",
        "oldest_in_flight",
        "inits",
        "chunks",
        "last_chunks",
        "asking",
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
        self.asking: list[Sequence] = []
        self.max_kv_len = 0
        self.preempted = False
        self.admits = True
        self.held: set[int] = set()
        self.num_planned: dict[int, int] = {}
