"""gpt-oss over the four routes: what comes out of one answer, whole and as a stream, and loops of agents' tools."""

import json
from typing import Any

import pytest

from aerie.cluster.transport.messages import TokenDelta
from tests.cluster.http.parsers.test_tools import TIME, WEATHER
from tests.support.edge_client import CHAT, HELLO, MODEL, RESPONSES, TEXT, events, in_process
from tests.support.fake_engine import FakeEngine
from tests.support.harmony import harmony_chat_tokenizer, harmony_tokenizer

TOKENIZER = harmony_tokenizer()
PLACE = '{"place": "Bern"}'
ANSWER = (
    "<|channel|>analysis<|message|>so be it<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PLACE}<|call|>"
)
FINAL = "<|channel|>analysis<|message|>done<|end|><|start|>assistant<|channel|>final<|message|>Sun.<|return|>"
MESSAGES = "/v1/messages"
ITEM = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}  # type: ignore[index]
ANTHROPIC_TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]


def says(*answers: str) -> FakeEngine:
    """Each answer for one request, three tokens a time."""
    left = list(answers)

    def script(prompt: list[int], sampling: Any) -> Any:
        tokens = TOKENIZER.encode(left.pop(0), add_special_tokens=False).ids
        for at in range(0, len(tokens), 3):
            finish = "stop" if at + 3 >= len(tokens) else None
            yield TokenDelta("", tuple(tokens[at : at + 3]), finish=finish)

    return FakeEngine(script)


def client(engine: FakeEngine) -> Any:
    return in_process(engine, harmony_chat_tokenizer(), output_parser="auto", max_model_len=4096)


def prompt_of(engine: FakeEngine, number: int = -1) -> str:
    return str(TOKENIZER.decode(engine.calls[number].prompt, skip_special_tokens=False))


def sse(text: str) -> list[dict[str, Any]]:
    return [json.loads(part.partition("data: ")[2]) for part in text.split("\n\n") if "data: {" in part]


async def test_chat_completions() -> None:
    body = HELLO | {"tools": [WEATHER, TIME], "reasoning_effort": "high"}
    engine = says(ANSWER, ANSWER)
    async with client(engine) as http:
        (choice,) = (await http.post(CHAT, json=body)).json()["choices"]
        stream = events((await http.post(CHAT, json=body | {"stream": True})).text)
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "so be it")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "weather", "arguments": PLACE}]
    assert choice["finish_reason"] == "tool_calls"
    deltas = [event["choices"][0]["delta"] for event in stream if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "so be it"
    parts = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert parts[0]["name"] == "weather" and "".join(part.get("arguments") or "" for part in parts) == PLACE
    assert "Reasoning: high" in prompt_of(engine) and "type weather = (_: {" in prompt_of(engine)
    ends = {TOKENIZER.token_to_id(mark) for mark in ("<|return|>", "<|call|>")}
    assert set(engine.calls[0].sampling.stop_token_ids) == ends


async def test_the_form_of_an_answer_is_shown_and_forced() -> None:
    """docs/format.md of openai/harmony: "Structured output"."""
    schema = {"type": "object", "properties": {"items": {"type": "array", "items": {"type": "string"}}}}
    form = {"name": "shopping_list", "description": "entries", "schema": schema}
    engine = says("<|channel|>final<|message|>{}<|return|>")
    async with client(engine) as http:
        body = HELLO | {"response_format": {"type": "json_schema", "json_schema": form}}
        reply = (await http.post(CHAT, json=body)).json()
    assert reply["choices"][0]["message"]["content"] == "{}"
    shown = json.dumps(schema, separators=(",", ":"))
    expected = f"<|start|>developer<|message|># Response Formats\n\n## shopping_list\n\n// entries\n{shown}<|end|>"
    assert expected in prompt_of(engine) and engine.calls[0].sampling.grammar is not None


async def test_messages() -> None:
    body = {"model": MODEL, "max_tokens": 99, "messages": HELLO["messages"], "tools": [ANTHROPIC_TOOL]}
    async with client(says(ANSWER, ANSWER)) as http:
        whole = (await http.post(MESSAGES, json=body)).json()
        stream = sse((await http.post(MESSAGES, json=body | {"stream": True})).text)
    kinds = ["thinking", "text", "tool_use"]
    assert [block["type"] for block in whole["content"]] == kinds and whole["stop_reason"] == "tool_use"
    assert whole["content"][2]["input"] == {"place": "Bern"}
    begun = [event["content_block"]["type"] for event in stream if event["type"] == "content_block_start"]
    assert begun == kinds


async def test_completions_stay_raw() -> None:
    async with client(says(ANSWER)) as http:
        reply = await http.post(TEXT, json={"model": MODEL, "prompt": "x", "skip_special_tokens": False})
    assert reply.json()["choices"][0]["text"] == ANSWER.removesuffix("<|call|>")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_tools_over_responses(stream: bool) -> None:
    """As openai-agents and codex do: reasoning, text and call of a turn come back as items, and the model is shown all
    of them, with the result; after the answer its reasoning is gone."""
    engine = says(ANSWER, FINAL, FINAL)
    body: dict[str, Any] = {"model": MODEL, "tools": [ITEM], "stream": stream, "input": [], "store": False}
    conversation: list[dict[str, Any]] = [{"role": "user", "content": "rain in Bern?"}]
    async with client(engine) as http:
        for number in range(3):
            reply = await http.post(RESPONSES, json=body | {"input": conversation})
            assert reply.status_code == 200, reply.text
            response = sse(reply.text)[-1]["response"] if stream else reply.json()
            conversation += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            assert bool(calls) == (number == 0)
            for call in calls:
                conversation.append({"type": "function_call_output", "call_id": call["call_id"], "output": "sun"})
            if number == 1:
                conversation.append({"role": "user", "content": "thanks"})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    turn = (
        "rain in Bern?<|end|><|start|>assistant<|channel|>analysis<|message|>so be it<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"place":"Bern"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sun<|end|>"
    )
    assert prompt_of(engine, 1).endswith(turn + "<|start|>assistant")
    assert "so be it" not in prompt_of(engine, 2) and "done" not in prompt_of(engine, 2)
    assert prompt_of(engine, 2).endswith(
        "final<|message|>Sun.<|end|><|start|>user<|message|>thanks<|end|><|start|>assistant"
    )
