"""Documents and stream events of /v1/messages."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from cluster.http.schema.response import RequestMetrics, Struct

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Struct, tag_field="type", tag="text"):
    """`citations` is left out: there are none, and clients disagree on the empty value (Anthropic's Python client
    expects null, the AI SDK a list)."""

    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """The model's reasoning. signature: empty, because reasoning that is sent back is not verified."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """id: a tool_result refers to it. input: the call's arguments."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(Struct):
    """input_tokens: prompt tokens that were not found in the prefix cache; in a stream's first event, which precedes
    the lookup, all prompt tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessagesReply(Struct, kw_only=True):
    """stop_sequence: the stop string that ended the answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: MessagesUsage
    metrics: RequestMetrics | UnsetType = UNSET


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of a call's input."""

    partial_json: str


class MessageEnd(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessagesErrorDetail(Struct):
    """param, code: as in errors of the other routes. details: read by Anthropic's client."""

    type: str
    message: str
    param: str | None
    code: str | None
    details: dict[str, str] | UnsetType = UNSET


class MessagesEvent(Struct):
    """An event of a stream. Its type determines its fields:

    message_start: message. content_block_start: index, content_block, which is still empty. content_block_delta: index,
    delta. content_block_stop: index. message_delta: usage, delta with the stop reason. message_stop: none. error:
    error.
    """

    type: str
    message: MessagesReply | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: ContentBlock | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    error: MessagesErrorDetail | UnsetType = UNSET


class MessagesError(Struct, kw_only=True):
    """The body of every reply whose status is not 200."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail


class TokenCount(Struct):
    input_tokens: int
