"""Converts requests to /v1/messages to chats, with Anthropic's turns and blocks as messages. Raises ApiError."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.errors import ApiError, invalid, renamed
from aerie.cluster.http.parsers.families import FAMILIES
from aerie.cluster.http.schema.body import validated
from aerie.cluster.http.schema.messages import (
    THREAD,
    Block,
    CountTokensRequest,
    ImageParam,
    MessageParam,
    MessagesError,
    MessagesErrorDetail,
    MessagesRequest,
    MessagesTool,
    TextParam,
    ThinkingParam,
    ToolResultParam,
    ToolUseParam,
)
from aerie.cluster.http.schema.request import ChatCompletionRequest
from aerie.cluster.http.text.template_facts import Efforts
from aerie.workers.scheduling.plan import VALUES

MessageDict = dict[str, Any]
THINKING_PARSERS = (
    "think",
    "deepseek_v3",
    "harmony",
    "minimax_m2",
    "seed_oss",
)  # chat parsers of models that reason by default
_SAME_NAMES = (
    "model",
    "max_tokens",
    "stream",
    "cache_salt",
    "chat_template_kwargs",
    "request_id",
    *VALUES,
)
_OWN_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "continue_final_message": "messages",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesApiError(ApiError):
    """An error in Anthropic's format."""

    def body(self) -> bytes:
        return msgspec.json.encode(MessagesError(error=error_detail(self)))


def to_messages_error(error: ApiError) -> ApiError:
    """Return `error` in Anthropic's format, with the parameter names of /v1/messages."""
    error = renamed(error, _OWN_NAMES)
    return MessagesApiError(
        error.status, error.message, kind=error.kind, param=error.param, code=error.code, headers=error.headers
    )


@contextlib.contextmanager
def without_places() -> Iterator[None]:
    """Remove places in the chat's `messages` from errors, because a turn may be several of these."""
    try:
        yield
    except ApiError as error:
        raise renamed(error, {"messages": "messages"}) from None


def error_detail(error: ApiError) -> MessagesErrorDetail:
    """Return the error for the client. Without these details, the client's tool runner does not send the whole
    conversation instead."""
    details = {"error_code": "thread_unsupported_request"} if error.param == THREAD else UNSET
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return MessagesErrorDetail(kind, error.message, error.param, error.code, details)


def messages_chat(
    body: CountTokensRequest | MessagesRequest, efforts: Efforts, parser: OutputParserName
) -> ChatCompletionRequest:
    """Return the equivalent chat. efforts: those with an effect on this model. parser: of its chats."""
    values: dict[str, Any] = body.model_dump(include=set(_SAME_NAMES))
    messages = chat_messages(body.system, body.messages)
    values |= {"messages": messages, "reasoning_effort": _effort(body, efforts)}
    if body.thinking is not None and body.thinking.type == "enabled" and FAMILIES[parser].thinking:
        values["thinking_token_budget"] = body.thinking.budget_tokens
    if messages[-1]["role"] == "assistant":
        values["continue_final_message"] = True
    if isinstance(body, MessagesRequest):
        values["stop"] = body.stop_sequences
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.json_schema, "strict": True}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    values |= _tools(body)
    with without_places():
        return validated(values, ChatCompletionRequest)


def chat_messages(system: str | Sequence[TextParam] | None, turns: Sequence[MessageParam]) -> list[MessageDict]:
    """Return the conversation. A turn with tool results becomes a message per result, then one of its text. Texts of
    one turn are joined by line ends."""
    messages: list[MessageDict] = []
    if system is not None:
        messages.append({"role": "system", "content": _text(system)})
    for i, turn in enumerate(turns):
        where = f"messages[{i}].content"
        blocks = [TextParam(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        if turn.role == "assistant":
            messages.append(_assistant(blocks, where))
        else:
            messages += _others(turn.role, blocks, where)
    return messages


def _assistant(blocks: Sequence[Block], where: str) -> MessageDict:
    """Return an assistant's turn as one chat message: texts, reasoning and tool calls."""
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        match block:
            case TextParam():
                texts.append(block.text)
            case ThinkingParam():
                thoughts.append(block.thinking)
            case ToolUseParam():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(f"{where}[{i}]", block, "assistant")
    message: MessageDict = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _others(role: str, blocks: Sequence[Block], where: str) -> list[MessageDict]:
    """Return a turn of a user or of the system as chat messages: one per tool result, then one with all texts and
    images."""
    messages, shown = [], list[TextParam | ImageParam]()
    for i, block in enumerate(blocks):
        if isinstance(block, TextParam) or (isinstance(block, ImageParam) and role == "user"):
            shown.append(block)
        elif isinstance(block, ToolResultParam) and role == "user":
            content = _content(block.content or "")
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        else:
            raise _misplaced(f"{where}[{i}]", block, role)
    if shown or not messages:
        messages.append({"role": role, "content": _content(shown)})
    return messages


def _content(content: str | Sequence[TextParam | ImageParam]) -> str | list[MessageDict]:
    """Return a text, or parts if there are images."""
    if isinstance(content, str):
        return content
    if not any(isinstance(block, ImageParam) for block in content):
        return _text([block for block in content if isinstance(block, TextParam)])
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextParam)
        else {"type": "image_url", "image_url": {"url": block.url}}
        for block in content
    ]


def _text(content: str | Sequence[TextParam]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _misplaced(where: str, block: Block, role: str) -> ApiError:
    return invalid(f"{where}.type", f"{where}.type: a turn of the {role} has no blocks of type '{block.type}'")


def ignored_by_model(body: CountTokensRequest, efforts: Efforts, parser: OutputParserName) -> Iterator[str]:
    """Yield the fields that have no effect on this model's chats. efforts: those with an effect."""
    if body.output_config is not None and body.output_config.effort is not None and not _has_levels(efforts):
        yield "output_config.effort"
    if (thinking := body.thinking) is None:
        return
    thinks = thinking.type != "disabled"
    if _switch(thinks) not in efforts and thinks != (parser in THINKING_PARSERS):
        yield "thinking"
    elif thinking.type == "enabled" and thinking.budget_tokens is not None and not FAMILIES[parser].thinking:
        yield "thinking.budget_tokens"


def _has_levels(efforts: Efforts) -> bool:
    """Return whether the chat template has levels of effort, not only a switch. efforts: see `_effort`."""
    return efforts.get("low") != efforts.get("high")


def _switch(thinks: bool) -> str:
    """Return the effort that switches thinking on or off."""
    return "medium" if thinks else "none"


def _effort(body: CountTokensRequest, efforts: Efforts) -> str | None:
    """Return the reasoning_effort of a chat with the effect of `thinking` and `output_config.effort`; None leaves it to
    the model, also if the chat template cannot switch thinking on or off.

    efforts: the template's variables, by each reasoning_effort that has an effect.
    """
    level = body.output_config.effort if body.output_config is not None and _has_levels(efforts) else None
    if body.thinking is None:
        return level
    thinks = body.thinking.type != "disabled"
    effort = level if thinks and level else _switch(thinks)
    return effort if effort in efforts else None


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    """Return the chat parameters `tools`, `tool_choice` and `parallel_tool_calls`."""
    values: dict[str, Any] = {}
    if body.tools:
        values["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
            if isinstance(tool, MessagesTool)
        ]
    choice = body.tool_choice
    if choice is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise invalid("tool_choice.name", "tool_choice.name is required with tool_choice.type 'tool' and no other")
        named = {"type": "function", "function": {"name": choice.name}}
        values["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        values["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return values
