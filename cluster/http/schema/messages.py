"""Requests to /v1/messages, and its documents and stream events."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, UnsetType
from pydantic import ConfigDict, Field, Tag

from aerie.cluster.http.schema.body import MAX_PARTS, Refusals, Schema, by_type, known_type_or_other, text_or_list
from aerie.cluster.http.schema.message import Arguments, FunctionName, OtherTool
from aerie.cluster.http.schema.request import Count, RequestId, with_values
from aerie.cluster.http.schema.response import RequestMetrics, Struct

CacheControl = dict[str, Any] | None  # accepted without effect, because every prefix is cached
THREAD = "thread"
REFUSED: Refusals = {
    # Anthropic's client would send new turns only.
    THREAD: ("conversations are not kept; send the whole conversation without it", ()),
}


class _Block(Schema):
    """A part of a turn."""

    cache_control: CacheControl = None


class TextParam(_Block):
    """citations: from a reply that is sent back; no effect."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ImageSource(Schema):
    """An image as base64, or its URL."""

    type: Literal["base64", "url"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]{1,64}$")] | None = None
    data: str | None = None
    url: str | None = None


class ImageParam(_Block):
    type: Literal["image"]
    source: ImageSource

    @property
    def url(self) -> str:
        """The image's URL, or a data URL with the image itself."""
        source = self.source
        return source.url or "" if source.type == "url" else f"data:{source.media_type};base64,{source.data or ''}"


class ThinkingParam(_Block):
    """The assistant's reasoning in an earlier turn. signature: not verified."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseParam(_Block):
    """A call in an earlier turn of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Arguments = None


_TextBlocks = Annotated[list[TextParam], Field(max_length=MAX_PARTS, fail_fast=True)]
Texts = Annotated[Annotated[str, Tag("<string>")] | Annotated[_TextBlocks, Tag("<list>")], text_or_list()]


_Result = Annotated[Annotated[TextParam, Tag("<text>")] | Annotated[ImageParam, Tag("<image>")], by_type()]
_Results = Annotated[list[_Result], Field(max_length=MAX_PARTS, fail_fast=True)]
Results = Annotated[Annotated[str, Tag("<string>")] | Annotated[_Results, Tag("<list>")], text_or_list()]


class ToolResultParam(_Block):
    """The result of a tool. is_error: accepted without effect; the content describes the error."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Results | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextParam, Tag("<text>")]
    | Annotated[ImageParam, Tag("<image>")]
    | Annotated[ThinkingParam, Tag("<thinking>")]
    | Annotated[ToolUseParam, Tag("<tool_use>")]
    | Annotated[ToolResultParam, Tag("<tool_result>")],
    by_type(),
]
_Blocks = Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]
Blocks = Annotated[Annotated[str, Tag("<string>")] | Annotated[_Blocks, Tag("<list>")], text_or_list()]


class MessageParam(Schema):
    """One turn: a text, or blocks of text, image, thinking, tool_use and tool_result."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(Schema):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl = None


MessagesTools = list[
    Annotated[
        Annotated[MessagesTool, Tag("<custom>")] | Annotated[OtherTool, Tag("<other>")],
        known_type_or_other("custom"),
    ]
]


class MessagesToolChoice(Schema):
    """any: the model must call a tool; tool: the tool of this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Schema):
    """budget_tokens: limit of thinking tokens, for models that think between marks. display: no effect; thinking is
    always shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    display: str | None = None


class JSONFormat(Schema):
    """The answer is JSON of this schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Schema):
    """effort: a chat's reasoning_effort, if the chat template has such a variable."""

    format: JSONFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(Schema):
    """A request to count the prompt tokens of a request to /v1/messages."""

    refused = REFUSED
    ignored: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mcp_servers": ([],), "container": ()}

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: Texts | None = None
    tools: MessagesTools | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: CacheControl = None


@with_values()
class MessagesRequest(CountTokensRequest):
    """Continue a conversation. If the last message is the assistant's, the answer continues it."""

    refused = REFUSED | {"compaction": ("ask for a summary in a message", ())}

    max_tokens: Count
    stop_sequences: Annotated[list[str], Field(max_length=1024, fail_fast=True)] | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: RequestId | None = None
    # Without effect.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


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
