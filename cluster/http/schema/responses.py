"""Requests to /v1/responses, and its documents and stream events."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, Tag

from aerie.cluster.http.schema.body import MAX_MESSAGES, MAX_PARTS, Schema, by_type, known_type_or_other, text_or_list
from aerie.cluster.http.schema.completions import TokenLogprob
from aerie.cluster.http.schema.message import (
    Arguments,
    Content,
    FunctionName,
    OtherTool,
    ReasoningEffort,
    Role,
    ToolMode,
)
from aerie.cluster.http.schema.request import IGNORED, NO_EMBEDS, REFUSED, Count, SamplingFields
from aerie.cluster.http.schema.response import RequestMetrics, Struct

_NOT_HERE = "the whole conversation goes into input, or use previous_response_id"
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
_FORMS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema")


class _Item(Schema):
    """id, status: from a reply that is sent back; no effect."""

    id: str | None = None
    status: str | None = None


class InputMessage(_Item):
    """A turn. phase: from a reply that is sent back; no effect."""

    type: Literal["message"] = "message"
    role: Role
    content: Content
    phase: str | None = None


class ReasoningPart(Schema):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(_Item):
    """The model's reasoning in an earlier turn, as content. summary, encrypted_content: accepted without effect."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


class InputCall(_Item):
    """A call of a function in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Arguments = None


class InputCallOutput(_Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputReasoning, Tag("<reasoning>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")],
    by_type("message"),
]
_Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Input = Annotated[Annotated[str, Tag("<string>")] | Annotated[_Items, Tag("<list>")], text_or_list()]


class ResponseTool(Schema):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


_Function = Annotated[ResponseTool, Tag("<function>")]
_Other = Annotated[OtherTool, Tag("<other>")]


class Namespace(Schema):
    """Functions that share a namespace, such as those of one MCP server (Codex)."""

    type: Literal["namespace"]
    name: FunctionName
    tools: list[Annotated[_Function | _Other, known_type_or_other("function")]]
    description: str | None = None


_Namespace = Annotated[Namespace, Tag("<namespace>")]
ResponseTools = list[Annotated[_Function | _Namespace | _Other, known_type_or_other("function", "namespace")]]


class NamedFunction(Schema):
    """The one function to call. namespace: its namespace, if it has one."""

    type: Literal["function"]
    name: FunctionName
    namespace: FunctionName | None = None


class AllowedFunctions(Schema):
    """The functions that the model may (auto) or must (required) choose from. Tools of other types are ignored."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[NamedFunction, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
                known_type_or_other("function"),
            ]
        ],
        Field(min_length=1),
    ]


FunctionChoice = Annotated[
    ToolMode | Annotated[NamedFunction, Tag("<function>")] | Annotated[AllowedFunctions, Tag("<allowed_tools>")],
    by_type(),
]


class ReasoningOptions(Schema):
    """summary, generate_summary: no effect; reasoning is sent in full, as reasoning_text."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(Schema):
    """format: text, json_object, or json_schema with name, schema and strict. verbosity: no effect."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(SamplingFields):
    """Continue a conversation. store: keep the reply in this ingress's memory, for previous_response_id."""

    refused = (
        REFUSED
        | NO_EMBEDS
        | {
            "conversation": (_NOT_HERE, ()),
            "prompt": ("stored prompts are not implemented; " + _NOT_HERE, ()),
            "messages": ("they go into input", ()),
            "max_tokens": ("use max_output_tokens", ()),
            "max_completion_tokens": ("use max_output_tokens", ()),
            "n": ("a response has one answer", (1,)),
            "logprobs": ("use top_logprobs and include", (False,)),
            "enable_response_messages": ("see output, and return_token_ids of /v1/chat/completions", (False,)),
            **dict.fromkeys(_FORMS, ("use text.format, or structured_outputs", ())),
        }
    )
    ignored = {name: IGNORED[name] for name in IGNORED if name not in ("store", "service_tier")}

    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    store: bool | None = None
    max_output_tokens: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[str], Field(max_length=16)] | None = None
    tools: ResponseTools | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    service_tier: str | None = None

    def without_effect(self) -> Iterable[str]:
        """See `Schema.without_effect`: conversations are not shortened, and nothing of built-in tools is included."""
        yield from super().without_effect()
        if self.truncation == "auto":
            yield "truncation"
        yield from (f"include={name}" for name in self.include or () if name not in _INCLUDED)


ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(Struct, tag_field="type", tag="reasoning", kw_only=True):
    """The model's reasoning, without summaries."""

    id: str
    status: ItemStatus
    summary: list[str] = []
    content: list[ReasoningText]


class FunctionCallItem(Struct, tag_field="type", tag="function_call", kw_only=True):
    """call_id: a function_call_output refers to it."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct):
    """cached_tokens: prompt tokens found in the prefix cache; cache_write_tokens: always 0."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    """reasoning_tokens: tokens of the reasoning's text, without its marks."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    code: str
    message: str


class Response(Struct, kw_only=True):
    """The reply, with the parameters of its request."""

    object: Literal["response"] = "response"
    id: str
    created_at: int
    status: ResponseStatus
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[Any]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: bool
    metadata: dict[str, Any]
    user: str | None = None
    metrics: RequestMetrics | UnsetType = UNSET


class ResponseEvent(Struct, kw_only=True):
    """An event of a stream; `type` determines its fields."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    code: str | None | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | None | UnsetType = UNSET


class DeletedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
