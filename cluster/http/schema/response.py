"""OpenAI's reply documents and stream events, with vLLM's extensions.

msgspec structs: building and encoding a stream's event takes 1 us, with pydantic's models 12 us (pydantic 2.14 on a
2 GHz EPYC core). A field that is UNSET is left out of the JSON, None is null.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class Struct(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """Base of every part of a reply. gc=False: parts are many and have no reference cycles."""


class CachedTokens(Struct):
    """cached_tokens: prompt tokens found in the prefix cache."""

    cached_tokens: int


class ReasoningTokens(Struct):
    """reasoning_tokens: tokens of the reasoning's text, without its marks."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens of the whole request. A prompt counts once, however many choices it has. completion_tokens_details: only
    for chats."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class TokenOrigin(Struct):
    """A token of the answer as the model wrote it, marks of thinking and calls included.

    text: "" for a hidden token, or one that leaves a character unfinished.
    drafted: whether it is an accepted draft token; false: the target's own token.
    """

    text: str
    drafted: bool


class WeightVersion(Struct):
    """Tokens `start` to `end` of an answer, without `end`, were written by the weights of this version; "0": those of
    the engine's start."""

    version: str
    start: int
    end: int


class SpeculationMetrics(Struct):
    """Speculation in one answer.

    acceptance_histogram: [k] rounds that accepted k draft tokens.
    num_spec_steps: rounds that verified drafts.
    num_spec_tokens: tokens drafted per round of the default tree shape.
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
    """A token at a prompt position, under its id; null for the first position. rank: 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


class ErrorDetail(Struct):
    """Why a request failed.

    param: the parameter that must change.
    code: short name of the error, for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    """The body of every reply whose status is not 200, and the last event of a stream that fails."""

    error: ErrorDetail


class TokenizeReply(Struct):
    """token_strs: the vocabulary's entries, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeReply(Struct):
    """prompt, text: the same text, under vLLM's name and SGLang's."""

    prompt: str
    text: str | UnsetType = UNSET


class TokenizerReply(Struct):
    """chat_template: null if the model has none. special_tokens: by their names in tokenizer_config.json.
    tokenizer_class: the class in tokenizer_config.json, or null."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_template: str | None
    tokenizer_class: str | None


class ThinkingSwitch(Struct):
    """The variable of the chat template that turns reasoning on and off, for `chat_template_kwargs`.

    default: whether a chat without the variable reasons.
    """

    variable: str
    default: bool


class ModelCard(Struct, kw_only=True):
    """root, parent: of a LoRA adapter its folder, and the model's name; else the model's name, and null.
    max_model_len: tokens of prompt and answer together.
    default_sampling_params: values for requests that do not set them.
    thinking: null if the chat template has no switch."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int
    default_sampling_params: dict[str, float]
    thinking: ThinkingSwitch | None


class AdapterReply(Struct):
    message: str


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
    heartbeat_age_s: list[float] = []  # age of the last heartbeat of each rank


class HealthReply(Struct):
    """The body of /health: "ok" with status 200, "unavailable" and the error with 503."""

    status: Literal["ok", "unavailable"]
    engines: list[EngineHealth]
    error: ErrorDetail | UnsetType = UNSET


class LiveReply(Struct):
    """The reply of /health/live."""

    status: Literal["ok"] = "ok"


class FlushedEngine(Struct):
    """num_pages: pages of the prefix cache that were emptied."""

    engine_id: str
    num_pages: int


class PauseReply(Struct):
    """status: vLLM's word for it."""

    status: Literal["paused", "resumed"]


class PausedReply(Struct):
    """is_paused: whether any engine is."""

    is_paused: bool


class SleptEngine(Struct):
    """freed_bytes: memory of its KV cache, on all ranks."""

    engine_id: str
    freed_bytes: int


class SleepReply(Struct):
    """engines: what each has given back. kept: what stays in memory."""

    engines: list[SleptEngine]
    status: Literal["sleeping"] = "sleeping"
    kept: tuple[str, ...] = ("weights",)


class AwakeReply(Struct):
    """status: "sleeping" after `tags=weights` alone, because that was in memory all the time."""

    status: Literal["awake", "sleeping"]


class SleepingReply(Struct):
    """is_sleeping: whether any engine is."""

    is_sleeping: bool


class LearnedDraft(Struct):
    """version: "0" is the configured draft. state: served, former or rolled back. gain: in acceptance length, on
    held-out texts, relative to the draft before; low: its lower bound at 95 %. why: of a rollback."""

    version: str
    state: str
    gain: float
    low: float
    why: str


class DraftsReply(Struct):
    """engines: the drafts of each, oldest first."""

    engines: dict[str, list[LearnedDraft]]


class AbortedReply(Struct):
    """aborted: number of answers that ended, on all engines."""

    aborted: int


class EngineWeights(Struct):
    """One engine's weights.

    weight_epoch: number of the engine's updates.
    weight_version: name of the last update, "" before the first.
    missing: names that the update lacked, by model, which keep their weights.
    took_s: seconds in which steps waited for the update.
    draft_fault: why the draft counts as dead since the update, or "".
    fault: why its weights are not those of the last update, or "".
    """

    engine_id: str
    weight_epoch: int
    weight_version: str
    missing: dict[str, tuple[str, ...]]
    took_s: float
    draft_fault: str
    fault: str


class CheckedWeights(Struct):
    """checksums: by rank and name, of each engine. differing: names "ENGINE.RANK.NAME" that differ from the baseline;
    absent without one."""

    checksums: dict[str, list[dict[str, str]]]
    differing: list[str] | UnsetType = UNSET


class WorldSizeReply(Struct):
    """world_size: ranks of all engines."""

    world_size: int


class WeightsReply(Struct):
    """One entry per engine."""

    engines: list[EngineWeights]


class FlushReply(Struct, kw_only=True):
    success: Literal[True] = True
    engines: list[FlushedEngine]
