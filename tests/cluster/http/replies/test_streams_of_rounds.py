"""Rounds of 1 to 16 tokens: what clients join of a stream is the whole answer, on every route and for every family."""

import json
from typing import Any

import openai
import pytest

from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.families import FAMILIES
from tests.cluster.http.parsers.test_parsers import ARGUMENTS, CALLS, FORMS
from tests.cluster.http.parsers.test_tools import tool_tokenizer
from tests.support.clients.streams import by_type, chat_message, data_of, in_rounds, message_blocks, response_items
from tests.support.edge_client import CHAT, HELLO, MODEL, RESPONSES, in_process, served
from tests.support.fake_engine import FakeEngine, small_tokenizer
from tests.support.slow import slow

MESSAGES = "/v1/messages"
PARAMETERS = {"type": "object", "properties": {"at": {"type": "array"}, "b": {"type": "string"}}}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
PYTHONIC = f"[look_up(at={json.loads(ARGUMENTS)['at']!r}, b={json.loads(ARGUMENTS)['b']!r}), stop.it()]"
GEMMA = (
    '<|channel>thought\nso<channel|>on it<|tool_call>call:look_up{at:[1,<|"|>}]<|"|>],b:<|"|>x<|"|>}<tool_call|>'
    "<|tool_call>call:stop.it{}<tool_call|>"
)
ANSWERS: list[tuple[OutputParserName, str]] = [
    *((form[0], form[1]) for form in FORMS),
    ("pythonic", PYTHONIC),
    ("gemma4", GEMMA),
    ("hermes", FORMS[0][1] + "\nthat was all"),
    ("mistral", FORMS[7][1] + "\nthat was all"),
    ("llama3", FORMS[-2][1] + "\nthat was all"),
    ("think", "<think>so be it</think>\n\nyes"),
    ("think", "<think>so be it</think>"),
    ("text", "yes"),
    ("text", ""),
]
IDS = [f"{i}-{name}" for i, (name, _) in enumerate(ANSWERS)]
FIRST = dict(reversed(ANSWERS))
CALLING = [(name, answer) for name, answer in ANSWERS if FAMILIES[name].reads_calls]
TOKENIZER = small_tokenizer()
LONG: Any = {"max_model_len": 4096}


def client(name: OutputParserName, answer: str, seed: int) -> Any:
    engine = FakeEngine(in_rounds(answer, seed, TOKENIZER))
    return in_process(engine, tool_tokenizer(), output_parser=name, **LONG)


def _plain(message: dict[str, Any]) -> tuple[Any, ...]:
    """A chat's message without ids."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    assert len({call["id"] for call in message.get("tool_calls") or []}) == len(calls)
    return message["content"] or "", message["reasoning_content"] or "", calls


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 4, 5)])
@pytest.mark.parametrize(("name", "answer"), ANSWERS, ids=IDS)
async def test_chats(name: OutputParserName, answer: str, seed: int) -> None:
    tools = {"tools": [LOOK_UP]} if FAMILIES[name].reads_calls else {}
    for body in (HELLO | tools, HELLO | tools | {"n": 3, "logprobs": True, "return_token_ids": True}):
        async with client(name, answer, seed) as http:
            whole = (await http.post(CHAT, json=body)).json()["choices"]
            stream = (await http.post(CHAT, json=body | {"stream": True})).text
        found = chat_message(data_of(stream))
        assert [_plain(choice["message"]) for choice in found] == [_plain(choice["message"]) for choice in whole]
        assert [choice["finish_reason"] for choice in found] == [choice["finish_reason"] for choice in whole]
        assert [c["logprobs"] for c in found] == [(c["logprobs"] or {}).get("content", []) for c in whole]
        assert [choice["token_ids"] for choice in found] == [choice["token_ids"] or [] for choice in whole]


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 4, 5)])
@pytest.mark.parametrize(("name", "answer"), ANSWERS, ids=IDS)
async def test_responses_and_messages(name: OutputParserName, answer: str, seed: int) -> None:
    response: dict[str, Any] = {"model": MODEL, "input": "hi"}
    message = HELLO | {"max_tokens": 999}
    if FAMILIES[name].reads_calls:
        response["tools"] = [{"type": "function", "name": "look_up", "parameters": PARAMETERS}]
        message["tools"] = [{"name": "look_up", "input_schema": PARAMETERS}]
    async with client(name, answer, seed) as http:
        whole = (await http.post(RESPONSES, json=response)).json()["output"]
        stream = data_of((await http.post(RESPONSES, json=response | {"stream": True})).text)
        assert stream[-1]["type"] == "response.completed", stream[-1]
        assert by_type(response_items(stream)) == by_type(whole)
        whole = (await http.post(MESSAGES, json=message)).json()["content"]
        stream = data_of((await http.post(MESSAGES, json=message | {"stream": True})).text)
        assert stream[-1]["type"] == "message_stop", stream[-1]
        blocks = message_blocks(stream)
    assert by_type(blocks) == by_type(whole)
    assert {block["type"] for block in blocks} == {block["type"] for block in whole}


@pytest.mark.parametrize("seed", [6, *slow(7, 8, 9)])
@pytest.mark.parametrize(
    ("name", "answer"),
    [pytest.param(*each, marks=() if FIRST[each[0]] == each[1] else pytest.mark.slow) for each in CALLING],
)
async def test_openais_own_streams(name: OutputParserName, answer: str, seed: int) -> None:
    messages: Any = HELLO["messages"]
    tools: Any = [LOOK_UP]
    async with (
        served(FakeEngine(in_rounds(answer, seed, TOKENIZER)), tool_tokenizer(), output_parser=name, **LONG) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai_client,
    ):
        asked: Any = {"model": MODEL, "messages": messages, "tools": tools, "n": 3}
        whole = (await openai_client.chat.completions.create(**asked)).choices
        async with openai_client.chat.completions.stream(**asked) as stream:
            ended = [event.index async for event in stream if event.type == "tool_calls.function.arguments.done"]
            choices = (await stream.get_final_completion()).choices
        assert [_plain(c.message.model_dump()) for c in choices] == [_plain(c.message.model_dump()) for c in whole]
        assert sorted(ended) == [0, 0, 0, 1, 1, 1] and [c.index for c in choices] == [0, 1, 2]
        asked = {"model": MODEL, "input": "hi", "tools": [{"type": "function", **LOOK_UP["function"]}]}  # type: ignore[dict-item]
        response = (await openai_client.responses.create(**asked)).model_dump()["output"]
        async with openai_client.responses.stream(**asked) as events:
            output = (await events.get_final_response()).model_dump()["output"]
    assert by_type(output) == by_type(response) and len(by_type(output)["calls"]) == len(CALLS)
