"""One request as the scheduler sees it, and what it hears back. No torch, no transport."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

import msgspec

from workers.scheduling.plan import PromptLogprobs, SamplingParams, TokenLogprobs


class RequestState(Enum):
    WAITING = "waiting"  # queued, holds no pages and no slot
    PREFILL = "prefill"  # has a slot; prompt chunks are being computed
    RUNNING = "running"  # decodes
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client left
    ERROR = "error"  # a fault of ours that this request met
    INVALID = "invalid"  # it asks for what cannot be done, as was found while it ran


@dataclass
class Request:
    """One request.

    prompt: token ids; those of requests from elsewhere are an `array("i")`, a tenth of a list's memory.
    output: token ids; it grows as results arrive.
    cached_tokens: prompt tokens found in the prefix cache when it was first admitted.
    num_rounds: rounds that verified drafts.
    acceptance_histogram: [k] rounds that accepted k draft tokens.
    queue_s: seconds from its arrival to its first step.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    state: RequestState = RequestState.WAITING
    output: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    num_rounds: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to come: all have, where there is a token after it."""
        return self.sampling.prompt_logprobs >= 0 and not self.output


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request after a step; `finish_reason` is set with its last ones. prompt_logprobs: of a chunk of
    its prompt, in an output of their own. A prompt that is computed again, after a preemption, brings them again.
    error: why, where it ends as ERROR or INVALID.
    num_drafted: how many of the tokens, from the first on, were drafted and accepted; what follows them is the target's
    own.

    A msgspec struct because 128 of them are made per step: 0.2 us each, a frozen dataclass takes 1.2 us.
    """

    request: Request
    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_drafted: int = 0
    error: str | None = None


class UnfinishedError(Exception):
    """What was asked for can only be done while no request runs or waits: ask again (HTTP 409)."""


class QueueFullError(Exception):
    """The waiting queue holds `max_waiting` requests or `max_waiting_bytes`: retry later (HTTP 429)."""


class RequestTooLargeError(ValueError):
    """The request can never run here: longer than the model's length or than the whole KV pool (HTTP 400)."""
