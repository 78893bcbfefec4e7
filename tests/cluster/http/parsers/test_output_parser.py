"""The seam between an answer and its reply: plain text through it, and what another parser's deltas become."""

from typing import Any, get_args

import openai
import pytest

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.families import FAMILIES, Family
from aerie.cluster.http.parsers.output_parser import ReplyDelta, TextParser, joined_deltas
from aerie.cluster.http.parsers.table import PARSERS
from aerie.cluster.http.schema.completions import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, TEXT, events, in_process, served
from tests.support.fake_engine import FakeEngine, says

ANSWER = says("~let me", "~ see", "now: ", "!look", '+{"at":', "+ 1}", "!find", "+{}", "")
WHOLE = {
    "role": "assistant",
    "content": "now: ",
    "refusal": None,
    "reasoning_content": "let me see",
    "reasoning": "let me see",
    "tool_calls": [
        {"id": "call-0", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
        {"id": "call-1", "type": "function", "function": {"name": "find", "arguments": "{}"}},
    ],
}


class MarkedParser:
    """A piece's first character says what it is: ~reasoning, !name of a call, +its arguments, else content."""

    def __init__(self) -> None:
        self._num_calls = 0

    def push(self, piece: Piece) -> ReplyDelta:
        mark, rest = piece.text[:1], piece.text[1:]
        finish = "tool_calls" if piece.finish == "stop" and self._num_calls else piece.finish
        if mark == "~":
            return ReplyDelta(reasoning=rest, finish=finish)
        if mark == "!":
            self._num_calls += 1
            index = self._num_calls - 1
            call = ToolCallDelta(index=index, id=f"call-{index}", type="function", function=FunctionDelta(name=rest))
        elif mark == "+":
            call = ToolCallDelta(index=self._num_calls - 1, function=FunctionDelta(arguments=rest))
        else:
            return ReplyDelta(piece.text, finish=finish)
        return ReplyDelta(tool_calls=(call,), finish=finish)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSERS, "marked", lambda request, prompt, tokenizer: MarkedParser())
    monkeypatch.setitem(FAMILIES, "marked", Family(has_own_parser=True))


def test_the_table_has_what_the_configuration_may_name() -> None:
    assert set(FAMILIES) == set(get_args(OutputParserName))


def test_plain_text_is_content_and_keeps_the_answers_end() -> None:
    parser = TextParser()
    assert parser.push(Piece("a", (1,))) == ReplyDelta("a")
    assert parser.push(Piece("", (2,), finish="length")) == ReplyDelta("", finish="length")


def test_deltas_are_joined_by_call() -> None:
    def call(index: int, arguments: str, **head: Any) -> ToolCallDelta:
        name = {"name": head.pop("name")} if head else {}
        return ToolCallDelta(index=index, function=FunctionDelta(arguments=arguments, **name), **head)

    deltas = [
        ReplyDelta("a", "x", (call(0, "{", id="i", name="f"), call(1, "[", id="j", name="g"))),
        ReplyDelta("b", "y", (call(1, "]"), call(0, "}"))),
        ReplyDelta(finish="tool_calls"),
    ]
    joined, calls = joined_deltas(deltas)
    assert joined == ReplyDelta("ab", "xy", finish="tool_calls")
    assert calls == [
        ToolCall(id="i", function=FunctionCall("f", "{}")),
        ToolCall(id="j", function=FunctionCall("g", "[]")),
    ]


async def test_whole_reply_has_the_parsers_parts(marked: None) -> None:
    async with in_process(FakeEngine(ANSWER), output_parser="marked") as client:
        (choice,) = (await client.post(CHAT, json=HELLO)).json()["choices"]
    assert choice["message"] == WHOLE
    assert choice["finish_reason"] == "tool_calls"


async def test_content_is_null_where_there_are_only_tool_calls(marked: None) -> None:
    async with in_process(FakeEngine(says("!f", "+{}")), output_parser="marked") as client:
        message = (await client.post(CHAT, json=HELLO)).json()["choices"][0]["message"]
        plain = (await client.post(CHAT, json=HELLO | {"stop": "!"})).json()["choices"][0]["message"]
    assert message["content"] is None and message["tool_calls"][0]["function"]["name"] == "f"
    assert plain["content"] == "" and "tool_calls" not in plain


@pytest.mark.parametrize("extra", [{}, {"logprobs": True}, {"return_token_ids": True}])
async def test_stream_has_a_delta_for_each_part(marked: None, extra: dict[str, Any]) -> None:
    async with in_process(FakeEngine(ANSWER), output_parser="marked") as client:
        chunks = events((await client.post(CHAT, json=HELLO | extra | {"stream": True})).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    call = {"index": 0, "id": "call-0", "type": "function", "function": {"name": "look"}}
    expected = [
        {"role": "assistant", "content": "", "reasoning_content": None},
        {"reasoning_content": "let me", "reasoning": "let me"},
        {"reasoning_content": " see", "reasoning": " see"},
        {"content": "now: "},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
        {"tool_calls": [call | {"index": 1, "id": "call-1", "function": {"name": "find"}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    for delta in expected[4:]:
        delta["reasoning_content"] = None
    if extra:
        expected.insert(-1, {"content": "", "reasoning_content": None})  # the last token, which has no text
    assert [choice["delta"] for choice in choices] == expected
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(expected) - 1) + ["tool_calls"]
    if "logprobs" in extra:
        assert all(choice["logprobs"] for choice in choices[1:-1])


async def test_openai_client_reads_streamed_tool_calls(marked: None) -> None:
    messages: Any = HELLO["messages"]
    async with (
        served(FakeEngine(ANSWER), output_parser="marked") as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model=MODEL, messages=messages) as stream,
    ):
        reply = await stream.get_final_completion()
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "now: "
    assert [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []] == [
        ("call-0", "look", '{"at": 1}'),
        ("call-1", "find", "{}"),
    ]


async def test_each_choice_has_a_parser_of_its_own(marked: None) -> None:
    async with in_process(FakeEngine(ANSWER), output_parser="marked") as client:
        choices = (await client.post(CHAT, json=HELLO | {"n": 2})).json()["choices"]
    assert [choice["message"] for choice in choices] == [WHOLE, WHOLE]


async def test_completions_are_text_whatever_the_model_is(marked: None) -> None:
    async with in_process(FakeEngine(says("~a", "!b")), output_parser="marked") as client:
        (choice,) = (await client.post(TEXT, json=PROMPT)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("~a!b", "stop")
