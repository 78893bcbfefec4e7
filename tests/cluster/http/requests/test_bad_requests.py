"""Refused requests: status, form of the error, and the parameter that it names."""

import json
from typing import Any

import pytest

from aerie.cluster.http.schema.request import REFUSED
from tests.support.edge_client import CHAT, HELLO, JSON, MODEL, PROMPT, TEXT, in_process
from tests.support.fake_engine import FakeEngine, says

NAN = float("nan")
A_CALL = {"function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_refused_parameters_are_named_unless_they_ask_for_nothing(name: str) -> None:
    reason, harmless = REFUSED[name]
    async with in_process(FakeEngine(says("x"))) as client:
        for route, body in ((CHAT, HELLO), (TEXT, PROMPT)):
            reply = await client.post(route, json=body | {name: {"asks": "for much"}})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
            assert error["message"] == f"{name} is not supported: {reason}"
            for value in (None, *harmless):
                assert (await client.post(route, json=body | {name: value})).status_code == 200, value


BAD_SHARED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [10**9, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream_options": []}, "stream_options"),
    ({"speculative": "no"}, "speculative"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": ""}, "request_id"),
    ({"model": 5}, "model"),
    ({"user": 5}, "user"),
    ({"Temperature": 1}, "Temperature"),
    ({"maxTokens": 1}, "maxTokens"),
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "<|im_end|>", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [A_CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"prompt": "x"}, "prompt"),
    ({"input_ids": [10**6]}, "input_ids[0]"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a"),
]
BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [5, "a"]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [10**30]}, "prompt[0]"),
    ({"prompt": [[0], [10**6]]}, "prompt[1][0]"),
    ({"prompt": [0.5]}, "prompt[0]"),
    ({"prompt": [[0], "a"]}, "prompt[1]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 20, "n": 8}, "n"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]
BAD = (
    [(CHAT, HELLO | extra, param) for extra, param in BAD_SHARED + BAD_CHAT]
    + [(TEXT, PROMPT | extra, param) for extra, param in BAD_SHARED + BAD_TEXT]
    + [(CHAT, {"model": MODEL}, "messages")]
)


@pytest.mark.parametrize(("route", "body", "param"), BAD)
async def test_bad_input_is_400_in_openais_form_with_the_parameter(route: str, body: Any, param: str) -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine) as client:
        reply = await client.post(route, json=body)
    assert reply.status_code == 400, reply.text
    assert set(reply.json()) == {"error"}
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.partition(".")[0].partition("[")[0] in error["message"]
    assert not engine.calls


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({f"u{i}": 0 for i in range(200)}, None),
        ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
        ({"messages": [HELLO["messages"][0] | {f"u{i}": 0 for i in range(40)}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [A_CALL] * 129}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [{}] * 4096}] * 5}, "messages"),
        ({"logit_bias": {str(i): "a" for i in range(1025)}}, "logit_bias"),
        ({"stream_options": {str(i): 1 for i in range(1025)}}, "stream_options"),
    ],
)
async def test_more_elements_than_an_honest_request_has_are_refused(extra: dict[str, Any], param: str | None) -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(CHAT, json=HELLO | extra)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert " at most " in reply.text


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'"\xed\xa0\x80"',
        b"{'a': 1}",
        b"\x00",
        json.dumps({"temperature": NAN}).encode(),
    ],
)
async def test_bodies_that_are_no_json_object_are_400(raw: bytes) -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        for route in (CHAT, TEXT, "/tokenize", "/detokenize"):
            reply = await client.post(route, content=raw, headers=JSON)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json"), raw[:20]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"prompt": [1] * 256},
            "maximum context length is 256 tokens, prompt and answer together, but the prompt alone has 256",
        ),
        ({"prompt": [1] * 200, "max_tokens": 57}, "wants 257: 200 in the prompt and 57 in the answer"),
    ],
)
async def test_too_long_is_context_length_exceeded_with_the_lengths(body: dict[str, Any], message: str) -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(TEXT, json=PROMPT | body)
        assert (await client.post(TEXT, json=PROMPT | {"prompt": [1] * 200, "max_tokens": 56})).status_code == 200
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert message in error["message"]


async def test_unknown_model_is_404_with_the_model_there_is() -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(CHAT, json=HELLO | {"model": "gpt"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert reply.json()["error"]["message"] == f"The model 'gpt' does not exist here; this server serves '{MODEL}'"
