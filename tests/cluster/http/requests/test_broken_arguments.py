"""Calls of earlier turns whose arguments are no JSON object: the conversation goes on, and the reply names them."""

import json
import time
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from aerie.cluster.http.text.json_text import Repaired, call_arguments
from tests.cluster.http.parsers.test_tools import in_process, tool_tokenizer
from tests.support.edge_client import CHAT, MODEL, RESPONSES
from tests.support.fake_engine import FakeEngine, says, small_tokenizer

BROKEN: list[tuple[str, Any]] = [
    ('{"s": "He sa', {"s": "He sa"}),  # cut by max_tokens
    ('{"s": "a", "l": ["x", {"y": "z', {"s": "a", "l": ["x", {"y": "z"}]}),
    ('{"s": "a", "n": 1, "fla', {"s": "a", "n": 1}),
    ('{"s": "a", "n": tr', {"s": "a"}),
    ('{"s": "a\\', {"s": "a"}),
    ('{"s": "a\nb', {"s": "a\nb"}),
    ('{"s": "\\ud83d', {"s": "\ufffd"}),
    ("{", {}),
    ('{"s": "x"}{"s": "y"}', {"s": "x"}),  # two calls in one
    ('{"s": "x"} and so on', {"s": "x"}),
    ("{'s': True, 't': None, 'u': ('a', 1)}", {"s": True, "t": None, "u": ["a", 1]}),  # Python's literals
    ('{"s": "a",}', {"s": "a"}),
    (json.dumps('{"s": 1}'), {"s": 1}),  # JSON in a JSON string
    ("[1]", {}),
    ("3", {}),
    ("{'s': {1, 2}}", {}),
    ("no JSON", {}),
    ("{" * 300, {}),
    ('{"a":' * 300 + "1" + "}" * 300, {}),
]
WHOLE: list[tuple[str, Any]] = [('{"s": "é\n"}', {"s": "é\n"}), ("{}", {}), ("", {}), ("null", {}), (" ", {})]


@pytest.mark.parametrize(("text", "expected"), BROKEN)
def test_broken_arguments_are_repaired_or_empty(text: str, expected: Any) -> None:
    found = call_arguments(text)
    assert found == expected and isinstance(found, Repaired)


@pytest.mark.parametrize(("text", "expected"), WHOLE)
def test_whole_arguments_are_not_called_repaired(text: str, expected: Any) -> None:
    found = call_arguments(text)
    assert found == expected and not isinstance(found, Repaired)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=4), part, max_size=3),
    max_leaves=6,
)


@hypothesis.given(st.dictionaries(st.text(max_size=4), _values, max_size=4), st.data())
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
def test_cut_arguments_keep_what_came_before_the_cut(value: dict[str, Any], data: Any) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    cut = data.draw(st.integers(1, len(text) - 1))
    found = call_arguments(text[:cut])
    assert isinstance(found, Repaired)
    assert list(found) == list(value)[: len(found)]
    assert all(found[key] == value[key] for key in list(found)[:-1])


@hypothesis.given(st.text(st.sampled_from("{}[]\"'\\,:1aN \n\x01\ud83d"), max_size=20))
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_any_text_becomes_an_object_that_can_be_sent(text: str) -> None:
    found = call_arguments(text)
    json.dumps(found, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "part", ['{"a":', "{'a':", '{"a": "', "\\", "[", "'", "1+", "-", '"', '{"a": [1, ', "\\u", "{'a': 1, "]
)
def test_long_broken_arguments_take_little_time(part: str) -> None:
    begin_s = time.monotonic()
    call_arguments(part * (2**20 // len(part)))
    assert time.monotonic() - begin_s < 5.0  # 20 ms each on one core


def body(route: str, arguments: str) -> dict[str, Any]:
    ask = {"role": "user", "content": "Do it."}
    if route == RESPONSES:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        return {"input": [ask, call, {"type": "function_call_output", "call_id": "c", "output": "no JSON"}]}
    if route == "/v1/messages":
        use: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c", "content": "no JSON"}
        turns = [ask, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        return {"max_tokens": 9, "messages": turns}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "no JSON"}
    return {"messages": [ask, {"role": "assistant", "content": None, "tool_calls": [call]}, result]}


PATHS = {
    CHAT: "messages[1].tool_calls[0].function.arguments",
    "/tokenize": "messages[1].tool_calls[0].function.arguments",
    RESPONSES: "input[1].arguments",
    "/v1/messages": "messages[1].content[0].input",
}


@pytest.mark.parametrize("route", PATHS)
@pytest.mark.parametrize("strict", [False, True])
async def test_conversation_goes_on_and_the_reply_names_the_arguments(route: str, strict: bool) -> None:
    for arguments in ('{"s": "He sa', '{"s": "x"}{"s": "y"}', "{'s': 1}", "?"):
        engine = FakeEngine(says("x"))
        async with in_process(engine, tool_tokenizer(), strict=strict) as client:
            reply = await client.post(route, json={"model": MODEL, **body(route, arguments)})
            whole = await client.post(route, json={"model": MODEL, **body(route, '{"s": 1}')})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-aerie-ignored"] == PATHS[route]
        assert whole.status_code == 200 and "x-aerie-ignored" not in whole.headers
        if engine.calls:
            shown = small_tokenizer().decode(engine.calls[0].prompt)
            assert f"[f {json.dumps(call_arguments(arguments))}]" in shown


async def test_a_stored_response_with_a_broken_call_is_continued() -> None:
    engine = FakeEngine(says('<tool_call>\n{"name": "weather", "arguments": {"place": "Be', finish="length"))
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    async with in_process(engine, tool_tokenizer()) as client:
        first = await client.post(RESPONSES, json={"model": MODEL, "input": "rain?", "tools": tools})
        more = {"model": MODEL, "input": "go on", "previous_response_id": first.json()["id"]}
        second = await client.post(RESPONSES, json=more)
    assert second.status_code == 200, second.text
