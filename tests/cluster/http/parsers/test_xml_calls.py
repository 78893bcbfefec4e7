"""Calls in Qwen3-Coder's XML: which values are text and which JSON, what models leave out, and streams cut anywhere."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.parsers.output_parser import joined_deltas
from aerie.cluster.http.parsers.table import parser_of
from tests.cluster.http.parsers.test_parsers import Request

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["a", "b"]},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": "boolean"},
        "rows": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/place"},
        "title": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
    },
    "$defs": {"place": {"type": "object"}},
}
TOOLS = ({"type": "function", "function": {"name": "edit", "parameters": PARAMETERS}},)


def _call(name: str = "edit", **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _parse(pieces: list[str], finish: Any = "stop", prompt: str = "") -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and the name and arguments of each call."""
    parser = parser_of(Request("qwen3_coder", tools=TOOLS), prompt, None)  # type: ignore[arg-type]
    deltas = [parser.push(Piece(text, (0,))) for text in pieces]
    whole, calls = joined_deltas([*deltas, parser.push(Piece("", (0,), finish=finish))])
    return whole.content, whole.reasoning, [(call.function.name, call.function.arguments) for call in calls]


def _arguments(text: str) -> Any:
    _, _, ((_, arguments),) = _parse([text])
    return json.loads(arguments)


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", "true", "true"),
        ("text", '"quoted"', '"quoted"'),
        ("text", "", ""),
        ("text", "\n two\n\tlines \n", "\n two\n\tlines \n"),
        ("text", "if a < b and c </d>: é \\", "if a < b and c </d>: é \\"),
        ("text", "a </function> b </parameter", "a </function> b </parameter"),
        ("kind", "a", "a"),
        ("count", "5", 5),
        ("count", " -12 ", -12),
        ("count", "five", "five"),
        ("share", "3", 3),
        ("share", "0.5", 0.5),
        ("share", "NaN", "NaN"),
        ("deep", "true", True),
        ("deep", "False", False),
        ("rows", '["a",\n "b"]', ["a", "b"]),
        ("where", '{"x": {"y": 1}}', {"x": {"y": 1}}),
        ("title", "null", None),
        ("title", "None", None),
        ("title", "5", "5"),
        ("any", "5", 5),
        ("any", "five", "five"),
        ("unheard_of", "[1]", [1]),
    ],
)
def test_a_value_has_the_type_of_the_tools_schema(name: str, written: str, value: Any) -> None:
    assert _arguments(_call(**{name: written})) == {name: value}


def test_arguments_of_unknown_tools_are_json_where_they_read_as_json() -> None:
    _, _, ((name, arguments),) = _parse([_call("other", a="1", b="x")])
    assert (name, json.loads(arguments)) == ("other", {"a": 1, "b": "x"})


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=edit><parameter=text>x</parameter><parameter=count>1</parameter></function></tool_call>",
        "<function=edit>\n<parameter=text>\nx\n</parameter>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=edit>\n<parameter=text>\nx\n</parameter>\n<parameter=count>\n1\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=edit>\n<parameter=count>\n1\n</parameter>\n<parameter=text>\nx\n</function>\n</tool_call>",
        "<tool_call>\n<function=edit>\n<parameter=count>\n1\n</parameter>\n<parameter=text>\nx\n</function>\n",
    ],
    ids=["no line breaks", "no tool_call", "no function end", "no parameter end", "nothing after"],
)
def test_what_models_leave_out_is_filled_in(text: str) -> None:
    for pieces in ([text], [*text]):
        content, _, ((name, arguments),) = _parse(pieces)
        assert (content, name, json.loads(arguments)) == ("", "edit", {"text": "x", "count": 1})


def test_functions_without_a_mark_are_calls_of_known_tools_alone() -> None:
    assert _parse(["<function=edit></function>"]) == ("", "", [("edit", "{}")])
    text = "write <function=f> and <function=g></function>"
    assert _parse([text]) == (text, "", [])


def test_text_arguments_are_streamed_and_an_answer_cut_short_closes_them() -> None:
    parser = parser_of(Request("qwen3_coder", tools=TOOLS), "", None)  # type: ignore[arg-type]
    text = _call(text="one two")
    at = text.index(" two")
    first, second = parser.push(Piece(text[:at], (0,))), parser.push(Piece(" tw", (0,), finish="length"))
    parts = [part.function.arguments for delta in (first, second) for part in delta.tool_calls]
    assert "".join(part for part in parts if part) == '{"text": "one tw"}'
    assert second.finish == "length"


def test_thinking_begins_in_the_prompt_and_may_be_off() -> None:
    text = "so be it\n</think>\n\nyes\n\n" + _call(text="x")
    assert _parse([text], prompt="assistant\n<think>\n") == ("yes", "so be it", [("edit", '{"text": "x"}')])
    off = _parse([_call(text="x")], prompt="assistant\n<think>\n\n</think>\n\n")
    assert off == ("", "", [("edit", '{"text": "x"}')])


@pytest.mark.parametrize("prompt", ["", "<think>\n"])
@pytest.mark.parametrize(
    ("rest", "reasoning", "content", "num_calls"),
    [
        (_call(text="x"), "so", "", 1),
        (_call(text="x") + "\n" + _call(count="1"), "so", "", 2),
        (_call(text="x") + "\nor not</think>\n\nno", f"so\n{_call(text='x')}\nor not", "no", 0),
        (_call(text="x") + "</think>" + _call(count="1"), f"so\n{_call(text='x')}", "", 1),
        (_call(text="x") + "\nhm " + _call(count="1"), f"so\n{_call(text='x')}\nhm", "", 1),
        ("<tool_call> is a mark</think>yes", "so\n<tool_call> is a mark", "yes", 0),
        ("<tool_call> is a mark", "so\n<tool_call> is a mark", "", 0),
    ],
)
def test_a_call_that_ends_the_thinking_is_one_and_a_draft_of_one_is_not(
    prompt: str, rest: str, reasoning: str, content: str, num_calls: int
) -> None:
    text = ("" if prompt else "<think>\n") + "so\n" + rest
    for pieces in ([text], [*text]):
        found = _parse(pieces, prompt=prompt)
        assert (found[1], found[0], len(found[2])) == (reasoning, content, num_calls)


_TOKENS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool_call>\n<function=edit>",
            "<function=edit>",
            "<function=",
            "</function>",
            "<think>",
            "</think>",
        ),
        *("<parameter=text>", "<parameter=count>", "<parameter=title>", "</parameter>", "<parameter=", ">"),
        *("\n", " ", "a", "1", "<", "</", "é", '"', "\\", "{", "null", "edit"),
    ]
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(_TOKENS, max_size=24), st.data())
def test_any_cut_of_any_text_gives_the_same_reply(tokens: list[str], data: st.DataObject) -> None:
    text = "".join(tokens)
    prompt, finish = data.draw(st.sampled_from(["", "<think>\n"])), data.draw(st.sampled_from(["stop", "length"]))
    whole = _parse([text], finish, prompt)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _parse(pieces, finish, prompt) == whole
    assert _parse([*text], finish, prompt) == whole


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.sampled_from(["text", "other_text"]), st.text(max_size=30), max_size=2),
    st.dictionaries(
        st.sampled_from(["rows", "where"]), st.recursive(st.none() | st.booleans() | st.text(max_size=5), st.lists)
    ),
    st.integers(1, 9),
)
def test_what_the_template_writes_comes_back(texts: dict[str, str], values: dict[str, Any], size: int) -> None:
    parameters = {"properties": {name: {"type": "string"} for name in texts} | {name: {} for name in values}}
    tools = ({"type": "function", "function": {"name": "edit", "parameters": parameters}},)
    texts = {name: text for name, text in texts.items() if "</parameter>" not in text and "</tool_call>" not in text}
    values = {name: value for name, value in values.items() if not isinstance(value, str)}
    text = _call(**texts, **{name: json.dumps(value) for name, value in values.items()})
    parser = parser_of(Request("qwen3_coder", tools=tools), "", None)  # type: ignore[arg-type]
    deltas = [parser.push(Piece(text[at : at + size], (0,))) for at in range(0, len(text), size)]
    _, calls = joined_deltas([*deltas, parser.push(Piece("", (0,), finish="stop"))])
    assert [json.loads(call.function.arguments) for call in calls] == [texts | values]
