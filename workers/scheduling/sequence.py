"""The scheduler's state of a request, of a step in flight, and of a plan under construction."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aerie.attention.kv_cache.radix_node import salt_of_adapter
from aerie.workers.scheduling.adapters import Adapter
from aerie.workers.scheduling.plan import Chunk, SlotInit
from aerie.workers.scheduling.queues.tenants import PRIORITY_TOKENS, Tenant
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.step_time import Prediction, Step

Int64s = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state.

    number: order of arrival; its priority for pages.
    adapter: changes the target for this request; None: none.
    salt: first part of the salt of its cached pages; the weights' follows (`SlotPages.salt`).
    tenant: whose request it is.
    prompt: keys of the prompt in the prefix cache: its tokens, except where `Request.inputs` begin (`InputKeys`).
    tokens: keys of prompt and output at its last admission.
    tenant_counter: its tenant's counter when its prompt began, by which the whole prompt is ranked; None while it
        waits, or if no tenant ran more requests then.
    deadline_s: its priority among prompts (`aerie.workers.scheduling.prefill`).
    num_cached: tokens found in the prefix cache on arrival; 0 without costs.
    computed: tokens that are cached or in planned chunks.
    store_from: tokens whose KV was cached at its last admission; recomputing them for states writes no KV.
    probation: steps with new tokens that it must still complete before another suspect may run; 0 if it is not a
        suspect.
    not_before: the last step planned before its preemption; it may be admitted again after that step's result.
    """

    request: Request
    number: int
    submitted_s: float
    tenant: Tenant
    adapter: Adapter | None = None
    salt: bytes = field(init=False)
    deadline_s: float = field(init=False)
    prompt: npt.NDArray[np.int32] = field(init=False)
    tokens: npt.NDArray[np.int32] = field(init=False)
    max_len: int = field(init=False)
    slot: int = -1
    tenant_counter: float | None = None
    num_cached: int = 0
    computed: int = 0
    store_from: int = 0
    not_before: int = -1
    probation: int = 0
    pages_missing: tuple[int, int] = (-1, 0)  # (number of cache insertions, missing pages) when it last did not fit
    first_token_s: float = -1.0
    first_output: int = 0  # length of the output after its first token on this engine
    was_admitted: bool = False
    is_finished: bool = False

    def __post_init__(self) -> None:
        self.deadline_s, own = self.submitted_s, self.request.sampling.cache_salt
        self.salt = own if self.adapter is None else salt_of_adapter(own, self.adapter.number)
        self.prompt = self.tokens = np.asarray(self.request.prompt, np.int32)
        self.max_len = len(self.request.prompt) + self.request.sampling.max_tokens

    @property
    def order(self) -> tuple[float, int]:
        """Priority among a tenant's prompts: deadline, then arrival."""
        return self.deadline_s, self.number

    def rank(self, served: float) -> tuple[float, ...]:
        """Return its priority among those of other tenants. served: its tenant's counter."""
        order = served if self.tenant_counter is None else self.tenant_counter
        return order + PRIORITY_TOKENS * self.request.owner.priority, self.deadline_s, self.number

    def precedes(self, other: "Sequence") -> bool:
        """Whether its prompt is computed first."""
        if self.tenant is other.tenant:
            return self.order < other.order
        return self.rank(self.tenant.served) < other.rank(other.tenant.served)

    def ids(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Return the token ids at these positions of `tokens`."""
        keys, inputs = self.tokens[start:end], self.request.inputs
        if inputs is None:
            return keys
        replaced = (np.flatnonzero(keys < 0) + start).tolist()
        ids = keys.copy()
        ids[[index - start for index in replaced]] = [self.request.prompt[index] for index in replaced]
        return ids

    def known_tokens(self) -> npt.NDArray[np.int32]:
        """Keys of prompt and output, int32."""
        output = self.request.output
        return np.concatenate((self.prompt, np.asarray(output, np.int32))) if output else self.prompt


@dataclass(slots=True, eq=False)
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
    match_classes: [num_rounds] `Acceptance.classes`: class of the length of the match that a draft was copied from;
        None in engines that do not copy drafts.
    expected: predicted time; None without costs.
    is_change: whether the step's time says nothing about `load`: it encodes images, or its rounds draft another shape
        than they verify.
    """

    step: int
    sequences: list[Sequence]
    slots: Int64s  # slots of the rounds, until those of the last chunks are added
    numbers: Int64s
    max_new_tokens: int
    shape: int
    drafted: Int64s
    reason: str
    with_prompt_logprobs: list[Sequence]
    load: Step = Step()  # noqa: RUF009 - immutable
    match_classes: Int64s | None = None
    expected: Prediction | None = None
    is_change: bool = False
    num_rounds: int = field(init=False)
    num_drafted: Int64s = field(init=False)

    def __post_init__(self) -> None:
        self.num_rounds = len(self.slots)
        self.num_drafted = np.zeros(len(self.sequences), np.int64)
        rest = self.sequences[self.num_rounds :]
        if rest:
            self.slots = np.concatenate((self.slots, np.array([sequence.slot for sequence in rest], np.int64)))
            self.numbers = np.concatenate((self.numbers, np.array([sequence.number for sequence in rest], np.int64)))


@dataclass(slots=True, eq=False)
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

    step: int
    oldest_in_flight: int
    inits: list[SlotInit] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    last_chunks: list[Sequence] = field(default_factory=list)
    with_prompt_logprobs: list[Sequence] = field(default_factory=list)
    max_kv_len: int = 0
    preempted: bool = False
    admits: bool = True
    held: set[int] = field(default_factory=set)
    num_planned: dict[int, int] = field(default_factory=dict)
