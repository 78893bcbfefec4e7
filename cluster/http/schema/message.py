"""A conversation as clients send it: messages, tools, which tool to call."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

Role = Literal["system", "developer", "user", "assistant", "tool"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
MAX_TOOLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
# Checked in `cluster.http.requests.prompts`, whose messages name the entry; here only described.
Content = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]})]


class Message(BaseModel):
    """One turn of a conversation. tool_calls, reasoning_content, reasoning (its other name), refusal: of the
    assistant's turns only. annotations, audio, function_call: what OpenAI's client sends back of answers that have
    none."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Role
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class Function(BaseModel):
    """parameters: the JSON schema of its arguments; without one it has none. strict: arguments fit the schema, by
    constraint."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """What the model may call."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class FunctionReference(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: FunctionName


class NamedTool(BaseModel):
    """The one tool to call."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionReference


ToolChoice = Literal["none", "auto", "required"] | NamedTool
