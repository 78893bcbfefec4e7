"""Documents and stream events of /v1/chat/completions and /v1/completions."""

from typing import Literal

from msgspec import UNSET, UnsetType

from aerie.cluster.http.schema.response import (
    FinishReason,
    PromptToken,
    RequestMetrics,
    Struct,
    TokenOrigin,
    Usage,
    WeightVersion,
)


class _Reply(Struct, kw_only=True):
    """The fields of every document and chunk."""

    id: str
    created: int
    model: str
    metrics: RequestMetrics | UnsetType = UNSET


class _Chunk(_Reply, kw_only=True):
    """An event of a stream. usage: null in all but the last, if the request asks for it."""

    usage: Usage | None | UnsetType = UNSET


class _Choice(Struct, kw_only=True):
    """The fields of a choice in every document.

    stop_reason: the stop string or the stop token's id that ended the answer, null for the end of sequence.
    matched_stop: SGLang's `stop_reason`; the end-of-sequence id, too, is reported.
    """

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: tuple[int, ...] | None = None
    token_origins: list[TokenOrigin] | UnsetType = UNSET
    weight_versions: list[WeightVersion] | UnsetType = UNSET


class _ChunkChoice(Struct, kw_only=True):
    """The fields of a choice in every chunk; see `_Choice`."""

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None | UnsetType = UNSET
    matched_stop: str | int | None | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    token_origins: list[TokenOrigin] | UnsetType = UNSET
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TopLogprob(Struct):
    """A likely token. bytes: its text's bytes, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer. top_logprobs: the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct):
    """arguments: a JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Struct, kw_only=True):
    """The answer of a chat.

    content: null if there are only tool calls.
    reasoning_content, reasoning: the model's reasoning, under both names that clients use.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(_Choice, kw_only=True):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(_Reply, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None


class FunctionDelta(Struct):
    """The part of a tool call that one event adds.

    name: in the call's first delta.
    arguments: the next part of its JSON text.
    """

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, kw_only=True):
    """index: number of the call in the answer. id, type: in its first delta."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Struct):
    """The part of a message that one event adds.

    reasoning_content: null if there is neither content nor reasoning, because SGLang's clients read it then.
    """

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | None | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


class ChatChunkChoice(_ChunkChoice, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(_Chunk, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class TextLogprobs(Struct):
    """Parallel lists with an entry per token, those of an echoed prompt first; the prompt's first token has null.
    text_offset: start of each token's text in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Choice, kw_only=True):
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None


class Completion(_Reply, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(_ChunkChoice, kw_only=True):
    text: str
    logprobs: TextLogprobs | None = None


class CompletionChunk(_Chunk, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChunkChoice]
