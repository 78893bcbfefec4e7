"""What clients may send to /v1/messages: Anthropic's form."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from cluster.http.schema.message import MAX_TOOLS, FunctionName
from cluster.http.schema.request import Count, RequestId, Seed

_BLOCKS = {"type": "array", "items": {"type": "object"}}
# Checked in `cluster.http.requests.messages`, whose messages name the entry; here only described.
Blocks = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _BLOCKS]})]
CacheControl = dict[str, Any] | None  # accepted wherever clients put it: every prefix is cached here


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class MessageParam(_Strict):
    """One turn: a text, or blocks of text, thinking, tool_use and tool_result."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(_Strict):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl = None


class MessagesToolChoice(_Strict):
    """any: some tool; tool: the one that is named."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Strict):
    """budget_tokens: accepted; the model itself ends its thinking. display: accepted; thinking is shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized"] | None = None


class JSONFormat(_Strict):
    """The answer is JSON of this schema."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Strict):
    format: JSONFormat | None = None


class CountTokensRequest(_Strict):
    """What a request to /v1/messages would have as its prompt."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: Blocks = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: CacheControl = None


class MessagesRequest(CountTokensRequest):
    """Continue a conversation; a last message of the assistant goes on."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    seed: Seed | None = None
    speculative: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: RequestId | None = None
    # Nothing here depends on them.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
