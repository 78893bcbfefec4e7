"""Every field of bodies of all routes, replaced by values of other types: a refusal names a field of the body in
`param` and in its message, never one of the chat that the body becomes."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from aerie.cluster.http.schema.messages import MessagesRequest
from aerie.cluster.http.schema.request import ChatCompletionRequest, CompletionRequest
from aerie.cluster.http.schema.responses import ResponsesRequest
from tests.cluster.http.parsers.test_tools import tool_tokenizer
from tests.support.edge_client import CHAT, JSON, MODEL, RESPONSES, TEXT, in_process
from tests.support.fake_engine import FakeEngine, refuses, says

MESSAGES = "/v1/messages"
Body = dict[str, Any]
Place = tuple[str | int, ...]
WRONG: list[Any] = [0, 2**70, "x", [], [{}], {}, {"type": "x"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": False}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]}
BODIES: dict[str, tuple[Any, Body]] = {
    CHAT: (
        ChatCompletionRequest,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "a", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ],
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
            "response_format": SCHEMA,
            "stream_options": {"include_usage": True},
            "stream": True,
            "logit_bias": {"1": 2},
            "stop": ["a"],
        },
    ),
    TEXT: (CompletionRequest, {"prompt": ["a"], "stop": ["x"], "logit_bias": {"1": 1}}),
    RESPONSES: (
        ResponsesRequest,
        {
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
            ],
            "tools": [
                {"type": "function", "name": "f", "parameters": {}},
                {"type": "namespace", "name": "n", "tools": []},
            ],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
            "reasoning": {"effort": "low"},
        },
    ),
    MESSAGES: (
        MessagesRequest,
        {
            "model": MODEL,
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                {"role": "user", "content": [RESULT]},
            ],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "stop_sequences": ["a"],
        },
    ),
}
ASKED: Body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
CHATS_NAMES = (
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "response_format",
    "thinking_token_budget",
    "continue_final_message",
)


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """The place of every value in a body."""
    if above:
        yield above
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(entry, (*above, key))


def replaced(value: Any, place: Place, by: Any) -> Any:
    if not place:
        return by
    first: Any = place[0]
    changed = value.copy()
    changed[first] = replaced(value[first] if len(place) > 1 else None, place[1:], by)
    return changed


def check(reply: Any, body: Body) -> None:
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code == 200:
        return
    error = reply.json()["error"]
    assert re.fullmatch(r"\w+(\.\w+|\[\d+\])*", error["param"]), error
    assert re.match(r"\w+", error["param"])[0] in body, error  # type: ignore[index]
    foreign = [name for name in CHATS_NAMES if name not in body and re.search(rf"\b{name}\b", error["message"])]
    assert not foreign or error["code"] == "missing_required_parameter", error


@pytest.mark.parametrize("route", BODIES)
async def test_a_fault_is_named_by_a_field_of_the_body(route: str) -> None:
    kind, body = BODIES[route]
    wrong = [*places(body), *((name,) for name in kind.model_fields if name not in body)]
    async with in_process(FakeEngine(says("x")), tool_tokenizer(), max_model_len=4096) as client:
        for place in wrong:
            for value in WRONG:
                changed = replaced(body, place, value)
                check(await client.post(route, content=json.dumps(changed), headers=JSON), changed)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a" * 9000}]}),
        (RESPONSES, {"input": "a" * 9000, "instructions": "be brief"}),
        (RESPONSES, {"input": "a", "max_output_tokens": 9000}),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}),
        (MESSAGES, ASKED | {"max_tokens": 9000}),
        (MESSAGES, ASKED | {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}]}]}),
        (MESSAGES, ASKED | {"stop_sequences": [""]}),
    ],
)
async def test_what_the_chat_refuses_is_named_too(route: str, body: Body) -> None:
    async with in_process(FakeEngine(says("x")), tool_tokenizer(), max_model_len=4096) as client:
        reply = await client.post(route, json=body)
    assert reply.status_code == 400
    check(reply, body)


async def test_an_image_in_a_later_turn_is_not_said_to_be_in_another_one() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x/"}}
    body = BODIES[MESSAGES][1] | {"messages": [{"role": "user", "content": [image]}]}
    async with in_process(FakeEngine(says("x")), tool_tokenizer(), max_model_len=4096) as client:
        error = (await client.post(MESSAGES, json=body)).json()["error"]
    assert error["param"] == "messages" and error["message"].startswith("messages is not supported: images"), error


@pytest.mark.parametrize(("route", "param"), [(CHAT, "messages"), (TEXT, "prompt"), (RESPONSES, "input")])
async def test_a_prompt_that_no_engine_can_hold_is_named(route: str, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} if route == CHAT else {param: "a"}
    async with in_process(FakeEngine(refuses("too_large")), tool_tokenizer(), max_model_len=4096) as client:
        assert (await client.post(route, json=body)).json()["error"]["param"] == param
