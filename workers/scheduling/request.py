"""A request in the scheduler, and its output."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

import msgspec

from aerie.workers.prompt_inputs import PromptInputs
from aerie.workers.scheduling.plan import PromptLogprobs, SamplingParams, TokenLogprobs


class RequestState(Enum):
    WAITING = "waiting"  # queued, holds no pages and no slot
    PREFILL = "prefill"  # has a slot; prompt chunks are being computed
    RUNNING = "running"  # decodes
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client disconnected
    ERROR = "error"  # an internal error
    INVALID = "invalid"  # the request turned out to be impossible while it ran


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """Whose request it is, and how urgent (`aerie.workers.scheduling.queues.tenants`).

    tenant: name of the API key; "": none.
    weight: the tenant's share of the engine, relative to other tenants.
    priority: lower is more urgent.
    request_id: its client's, by which administrators abort it.
    learns: whether a draft may learn from its text.
    """

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    request_id: str = ""
    learns: bool = True


@dataclass
class Request:
    """One request.

    prompt: token ids; from another process an `array("i")`, which takes a tenth of a list's memory.
    output: token ids so far.
    owner: whose request it is.
    inputs: inputs of the prompt besides its tokens.
    cached_tokens: prompt tokens found in the prefix cache at its first admission.
    num_rounds: rounds that verified drafts.
    acceptance_histogram: [k] rounds that accepted k draft tokens.
    queue_s: seconds from arrival to its first step.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    state: RequestState = RequestState.WAITING
    output: list[int] = field(default_factory=list)
    owner: Owner = Owner()  # noqa: RUF009 - immutable
    inputs: PromptInputs | None = None
    cached_tokens: int = 0
    num_rounds: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0

    @property
    def num_input_bytes(self) -> int:
        """Bytes of `inputs`."""
        return 0 if self.inputs is None else self.inputs.num_bytes

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to come."""
        return self.sampling.prompt_logprobs >= 0 and not self.output


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """New tokens of a request after a step.

    finish_reason: set with the last tokens.
    prompt_logprobs: log-probabilities of a prompt chunk; the output then has no tokens. Sent again if the prompt is
        computed again after a preemption.
    num_drafted: number of leading tokens that are accepted drafts.
    error: why the request ended as ERROR or INVALID.
    pages: pages of its KV, which are free from the next plan on; with the last tokens, if `routed_experts` is wanted.
    routed_experts: the file of `RoutedExperts`.
    version: version of the weights that wrote the tokens; None: the present one.

    A msgspec struct, because a step creates 128 of them: 0.2 us each instead of 1.2 us for a frozen dataclass.
    """

    request: Request
    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_drafted: int = 0
    error: str | None = None
    pages: tuple[int, ...] = ()
    routed_experts: bytes = b""
    version: str | None = None


class UnfinishedError(Exception):
    """The operation needs an engine without running or waiting requests: try again (HTTP 409)."""


class QueueFullError(Exception):
    """The queue holds `max_waiting` requests or `max_waiting_bytes`: retry later (HTTP 429)."""


class RequestTooLargeError(ValueError):
    """The request can never run: longer than the model's length or the whole KV pool (HTTP 400)."""
