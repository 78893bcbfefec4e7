"""OpenAI's reply documents and stream events, with vLLM's extensions.

msgspec structs: building and encoding a stream's event takes 1 us, with pydantic's models 12 us (pydantic 2.14 on a
2 GHz EPYC core). A field that is UNSET is left out of the JSON, None is null.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class Struct(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """Every part of a reply. gc=False: parts hold no circles, and are many."""


class CachedTokens(Struct):
    """cached_tokens: prompt tokens found in the prefix cache."""

    cached_tokens: int


class ReasoningTokens(Struct):
    """reasoning_tokens: those whose text came as reasoning, marks not included."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens of the whole request. A prompt counts once, however many choices it has. completion_tokens_details: of
    chats."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class TokenOrigin(Struct):
    """A token of the answer as the model wrote it, marks of thinking and calls included.

    text: "" of one that is not shown, or leaves a character unfinished.
    drafted: whether the draft proposed it and the target agreed; else it is the target's own.
    """

    text: str
    drafted: bool


class SpeculationMetrics(Struct):
    """Speculation in one answer.

    acceptance_histogram: [k] rounds that accepted k draft tokens.
    num_spec_steps: rounds that verified drafts.
    num_spec_tokens: tokens drafted per round, if it is of the default shape.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class RequestMetrics(Struct):
    speculative_decoding: SpeculationMetrics


class PromptToken(Struct):
    """A token in a place of the prompt, under its id; null for the first place. rank: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


class ErrorDetail(Struct):
    """Why a request failed.

    param: the parameter that must change.
    code: for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    """The body of every status but 200, and the last event of a stream that fails."""

    error: ErrorDetail


class TokenizeReply(Struct):
    """token_strs: the vocabulary's entries, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeReply(Struct):
    """prompt, text: the same, by vLLM's name and by SGLang's, whose clients say `skip_special_tokens`."""

    prompt: str
    text: str | UnsetType = UNSET


class TokenizerReply(Struct):
    """chat_template: null where the model has none. special_tokens: by their names in tokenizer_config.json.
    tokenizer_class: transformers' name for it, null where the model says none."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_template: str | None
    tokenizer_class: str | None


class ModelCard(Struct, kw_only=True):
    """max_model_len: tokens of prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class VersionReply(Struct):
    version: str


class EngineHealth(Struct):
    """status: "starting", "ready", "recovering", "draining" or "dead"."""

    engine_id: str
    status: str
    detail: str
    num_running: int
    num_waiting: int
    last_step_age_s: float
    heartbeat_age_s: list[float] = []  # of each rank


class HealthReply(Struct):
    """The body of /health: "ok" with status 200, "unavailable" and the error with 503."""

    status: Literal["ok", "unavailable"]
    engines: list[EngineHealth]
    error: ErrorDetail | UnsetType = UNSET


class LiveReply(Struct):
    """The process answers."""

    status: Literal["ok"] = "ok"


class FlushedEngine(Struct):
    """num_pages: pages of the prefix cache that were emptied."""

    engine_id: str
    num_pages: int


class FlushReply(Struct, kw_only=True):
    success: Literal[True] = True
    engines: list[FlushedEngine]
