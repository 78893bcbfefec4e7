"""Converts requests to /v1/responses to chats, with items as messages. Raises ApiError."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter

from aerie.cluster.http.errors import ApiError, renamed, unsupported
from aerie.cluster.http.requests.prompts import sent_content
from aerie.cluster.http.schema.body import validated
from aerie.cluster.http.schema.message import OtherTool
from aerie.cluster.http.schema.request import ChatCompletionRequest, SamplingFields
from aerie.cluster.http.schema.responses import (
    AllowedFunctions,
    FunctionChoice,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    Item,
    NamedFunction,
    Namespace,
    OutputItem,
    ResponsesRequest,
    ResponseTool,
)

MessageDict = dict[str, Any]
_OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_SAME_NAMES = (
    *(SamplingFields.model_fields.keys() - {"stream_options"}),
    "chat_template_kwargs",
    "parallel_tool_calls",
)


@dataclass(frozen=True)
class StoredResponse:
    """A reply that later requests may continue (`previous_response_id`).

    document: the sent reply.
    messages: the conversation including it, without instructions.
    """

    document: bytes
    messages: Sequence[MessageDict]


class ResponseStore:
    """The last replies of one ingress, each of which only its owner can read or remove. limit: maximum number of
    replies. bytes_limit: maximum bytes of their documents and conversations.

    An owner is the name of an API key. If there is no room, the owner of the largest share loses its oldest reply."""

    def __init__(self, limit: int, bytes_limit: int) -> None:
        self._limit = limit
        self._bytes_limit = bytes_limit
        self._num_bytes: Counter[str] = Counter()
        self._stored: defaultdict[str, OrderedDict[str, tuple[StoredResponse, int]]] = defaultdict(OrderedDict)

    def put(self, owner: str, response_id: str, response: StoredResponse, num_bytes: int) -> None:
        """Store a reply; drop others until it fits. num_bytes: its approximate size."""
        self._stored[owner][response_id] = response, num_bytes
        self._num_bytes[owner] += num_bytes
        while self._num_bytes.total() > self._bytes_limit or sum(map(len, self._stored.values())) > self._limit:
            largest = max(self._stored, key=self._share)
            self._num_bytes[largest] -= self._stored[largest].popitem(last=False)[1][1]

    def _share(self, owner: str) -> float:
        return max(len(self._stored[owner]) / self._limit, self._num_bytes[owner] / self._bytes_limit)

    def get(self, owner: str, response_id: str, param: str | None) -> StoredResponse:
        """Return a stored reply. param: the parameter that names it, for errors. Raises ApiError (404)."""
        if response_id not in self._stored[owner]:
            message = (
                f"Response with id '{response_id[:100]}' not found. It was sent with store: false, has made room for "
                "later ones, or was given by another ingress; send the whole conversation as input instead"
            )
            raise ApiError(404, message, param=param, code="previous_response_not_found")
        return self._stored[owner][response_id][0]

    def remove(self, owner: str, response_id: str) -> None:
        """Remove a stored reply. Raises ApiError (404)."""
        self.get(owner, response_id, None)
        self._num_bytes[owner] -= self._stored[owner].pop(response_id)[1]


def chat_body(body: ResponsesRequest, conversation: Sequence[MessageDict]) -> ChatCompletionRequest:
    """Return the equivalent chat. conversation: `input_messages`, after the previous ones."""
    if body.background:
        raise unsupported("background", "responses are not generated in the background; leave it out, and stream")
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAMES}
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    values |= {"messages": [*instructions, *conversation], "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        values["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True) | {"name": name}}
            for name, _, tool in _functions(body)
        ]
    values["tool_choice"] = _tool_choice(body.tool_choice)
    if body.reasoning is not None:
        values["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        values["response_format"] = _response_format(body.text.format)
    if body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ()):
        values |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return validated(values, ChatCompletionRequest)


def _tool_choice(choice: FunctionChoice | OtherTool | None) -> Any:
    """Return `tool_choice` in the chat's form."""
    match choice:
        case NamedFunction():
            return {"type": "function", "function": {"name": joined_name(choice.namespace, choice.name)}}
        case OtherTool():
            return {"type": choice.type}
        case AllowedFunctions():
            tools = [_tool_choice(tool) for tool in choice.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def to_responses_error(error: ApiError) -> ApiError:
    """Return an error of the chat's body with the parameter names of /v1/responses."""
    return renamed(error, _OWN_NAMES)


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def namespaces(body: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """Return namespace and own name of the functions that have a namespace, by the name that the model sees."""
    return {name: (namespace, tool.name) for name, namespace, tool in _functions(body) if namespace}


def _functions(body: ResponsesRequest) -> Iterator[tuple[str, str, ResponseTool]]:
    """Yield name, namespace ("" without one) and declaration of each function that the model is shown."""
    for tool in body.tools or ():
        namespace = tool.name if isinstance(tool, Namespace) else ""
        for member in tool.tools if isinstance(tool, Namespace) else [tool]:
            if isinstance(member, ResponseTool):
                yield joined_name(namespace, member.name), namespace, member


def input_messages(items: str | Sequence[Item]) -> list[MessageDict]:
    """Return `input`, a text or items, as messages."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[MessageDict] = []
    for item in items:
        match item:
            case InputMessage():
                _add(messages, {"role": item.role, "content": sent_content(item.content)})
            case InputReasoning():
                if text := "\n".join(part.text for part in item.content or ()):
                    _add(messages, {"role": "assistant", "reasoning_content": text})
            case InputCall():
                call = {"name": joined_name(item.namespace, item.name), "arguments": item.arguments}
                calls = [{"id": item.call_id, "type": "function", "function": call}]
                _add(messages, {"role": "assistant", "tool_calls": calls})
            case InputCallOutput():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": sent_content(item.output)})
    return messages


def output_messages(items: Sequence[OutputItem]) -> list[MessageDict]:
    """Return the items of a reply as messages, for later turns."""
    return input_messages(_ITEMS.validate_python(msgspec.to_builtins(items)))


def _add(messages: list[MessageDict], message: MessageDict) -> None:
    """Add a message. Items of one turn of the assistant (reasoning, content, calls, in this order) are one message."""
    last = messages[-1] if messages else {}
    if message["role"] != "assistant" or last.get("role") != "assistant":
        messages.append(message)
    elif "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
    elif "content" in message and "content" not in last and "tool_calls" not in last:
        last["content"] = message["content"]
    else:
        messages.append(message)


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
