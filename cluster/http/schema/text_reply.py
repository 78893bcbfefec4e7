"""Documents and stream events of /v1/completions."""

from typing import Literal

from msgspec import UNSET, UnsetType

from cluster.http.schema.response import FinishReason, PromptToken, RequestMetrics, Struct, TokenOrigin, Usage


class TextLogprobs(Struct):
    """Parallel lists with an entry per token, those of an echoed prompt first; the prompt's first token has null.
    text_offset: start of each token's text in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct):
    """stop_reason, matched_stop: as in `ChatChoice`."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: tuple[int, ...] | None = None
    token_origins: list[TokenOrigin] | UnsetType = UNSET
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None


class Completion(Struct, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    metrics: RequestMetrics | UnsetType = UNSET


class TextChunkChoice(Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None | UnsetType = UNSET
    matched_stop: str | int | None | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    token_origins: list[TokenOrigin] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Struct, kw_only=True):
    """An event of a stream. usage: null in all but the last, if the request asks for it."""

    object: Literal["text_completion"] = "text_completion"
    id: str
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
