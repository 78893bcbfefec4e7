"""Calls in Python's and in Gemma 4's literals: every value, cut at every place, and texts that only look like calls."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.output_parser import joined_deltas
from aerie.cluster.http.parsers.table import parser_of
from tests.cluster.http.parsers.test_parsers import Request
from tests.support.fake_engine import chat_tokenizer

Read = tuple[str, str, list[tuple[str, Any]]]
SCALARS = st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9).map(lambda x: round(x, 2))


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        SCALARS | texts,
        lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(["k", "a b"]), part, max_size=2),
        max_leaves=6,
    )


def read(name: OutputParserName, text: str, cuts: list[int]) -> Read:
    parser = parser_of(Request(name), "", chat_tokenizer())  # type: ignore[arg-type]
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    deltas = [parser.push(Piece(piece, (0,))) for piece in pieces]
    whole, calls = joined_deltas([*deltas, parser.push(Piece("", (0,), finish="stop"))])
    assert whole.finish == ("tool_calls" if calls else "stop")
    named = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    return whole.content, whole.reasoning, named


def gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(gemma, value))}]"
        case dict():
            return "{" + ",".join(f'<|"|>{key}<|"|>:{gemma(part)}' for key, part in value.items()) + "}"
    return json.dumps(value)


CUTS = st.lists(st.integers(0, 999), max_size=6)


@given(arguments=st.dictionaries(st.sampled_from("abc"), values(st.text(max_size=9))), cuts=CUTS, marked=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_calls_in_python(arguments: dict[str, Any], cuts: list[int], marked: bool) -> None:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    text = f"[f({written}), g.h()]"
    text = f"<|python_start|>{text}<|python_end|>" if marked else text
    assert read("pythonic", text, cuts) == ("", "", [("f", arguments), ("g.h", {})])


@given(
    arguments=st.dictionaries(
        st.sampled_from("abc"), values(st.text(st.characters(codec="utf-8", exclude_characters="|"), max_size=9))
    ),
    cuts=CUTS,
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_calls_of_gemma(arguments: dict[str, Any], cuts: list[int]) -> None:
    written = ",".join(f"{key}:{gemma(value)}" for key, value in arguments.items())
    text = f"<|channel>thought\nso<channel|>on it<|tool_call>call:f{{{written}}}<tool_call|><|tool_call>call:g{{}}"
    assert read("gemma4", f"{text}<tool_call|>", cuts) == ("on it", "so", [("f", arguments), ("g", {})])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[1, 2]"),
        ("pythonic", "[f"),
        ("pythonic", "[the list] of f(x)"),
        ("pythonic", "<|python"),
        ("gemma4", "a < b"),
    ],
)
def test_what_is_no_call_is_content(name: OutputParserName, text: str) -> None:
    for at in range(len(text) + 1):
        assert read(name, text, [at]) == (text, "", [])


@pytest.mark.parametrize(
    "call",
    ["f(1)", "f(a=b)", "f(a=1", "f(a={1: 2})", "f(a=b'x')", "f(a=1j)", f"f(a={'[' * 500}{']' * 500})", "f(a=x())"],
)
def test_values_that_json_does_not_have_are_content(call: str) -> None:
    content, _, calls = read("pythonic", f"[{call}, g()]", [3])
    assert calls == [] and content == f"[{call}, g()]"


@pytest.mark.parametrize(
    "body", ["f{}", "call:f", "call:f{a", "call:f{a:<|", 'call:f{a:<|"|>x}', "call:f{a:1}}", "call:f{a 1}"]
)
def test_gemmas_broken_calls_are_content(body: str) -> None:
    for text in (f"<|tool_call>{body}<tool_call|>", f"<|tool_call>{body}"):
        content, _, calls = read("gemma4", text, [5])
        assert calls == [] and body in content


def test_true_and_null_are_read_as_json_has_them() -> None:
    assert read("pythonic", "[f(a=true, b=null, c=-1.5)]", [])[2] == [("f", {"a": True, "b": None, "c": -1.5})]


def test_kimis_ids_are_numbered_through_the_conversation() -> None:
    call = "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    answer = f"<|tool_calls_section_begin|>{call.format(0)}{call.format(1)}<|tool_calls_section_end|>"
    parser = parser_of(Request("kimi_k2"), f"so {call.format(0)} then", chat_tokenizer())  # type: ignore[arg-type]
    delta = parser.push(Piece(answer, (0,), finish="stop"))
    assert [call.id for call in delta.tool_calls if call.function.name] == ["functions.f:1", "functions.f:2"]
