"""What clients may send to /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from cluster.http.schema.message import MAX_TOOLS, FunctionName, ReasoningEffort
from cluster.http.schema.request import Count, RequestId, Seed, StreamOptions

MAX_ITEMS = 4096
_ITEMS = {"type": "array", "items": {"type": "object"}}
# Checked in `cluster.http.requests.responses`, whose messages name the entry; here only described.
Input = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _ITEMS]})]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ResponseTool(_Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(_Strict):
    """The one function to call."""

    type: Literal["function"]
    name: FunctionName


class ReasoningOptions(_Strict):
    """summary, generate_summary: accepted; reasoning comes whole, as reasoning_text."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(_Strict):
    """format: text, json_object, or json_schema with name, schema and strict. verbosity: accepted."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(_Strict):
    """Continue a conversation. store: keep the reply in this ingress's memory, for previous_response_id."""

    model: str | None = None
    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    seed: Seed | None = None
    speculative: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(max_length=16)]
        | None
    ) = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    request_id: RequestId | None = None
    # Nothing here depends on them.
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
