"""Fields that no schema knows: ignored and told wherever they stand, or refused by a server that is strict."""

import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from aerie.cluster.http.endpoint import ignored_header
from aerie.cluster.http.errors import ApiError
from aerie.cluster.http.schema.body import Schema, parse_body
from aerie.cluster.http.schema.messages import MessagesRequest
from aerie.cluster.http.schema.request import BatchRequest, ChatCompletionRequest, CompletionRequest, Invocation
from aerie.cluster.http.schema.responses import ResponsesRequest
from tests.cluster.http.parsers.test_tools import CALL as HERMES_CALL
from tests.cluster.http.parsers.test_tools import WEATHER, tool_tokenizer
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, RESPONSES, TEXT, in_process
from tests.support.fake_engine import FakeEngine, says, small_tokenizer

MESSAGES = "/v1/messages"
HEADER = "x-aerie-ignored"
ASK = {"model": MODEL, "input": "hi"}
HI = HELLO | {"max_tokens": 9}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Bern"}'}}
RAIN = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"}
# What litellm 1.106 sends in the second turn of a chat: the first answer as it returned it.
LITELLM = {"content": "so", "role": "assistant", "tool_calls": None, "function_call": None}
LITELLM |= {"provider_specific_fields": {"refusal": None}}
OPENROUTER = {"role": "assistant", "content": "so", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}, *messages], **more}


CASES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, HELLO | {"surprise": 1, "other": None}, "surprise,other"),
    (TEXT, PROMPT | {"surprise": 1}, "surprise"),
    (RESPONSES, ASK | {"surprise": 1}, "surprise"),
    (MESSAGES, HI | {"surprise": 1}, "surprise"),
    (CHAT, HELLO | {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (CHAT, chat(LITELLM, {"role": "user", "content": "and?"}), "messages[1].provider_specific_fields"),
    (CHAT, chat(OPENROUTER, {"role": "user", "content": "and?"}), "messages[1].reasoning_details"),
    (
        CHAT,
        chat({"role": "assistant", "content": "", "tool_calls": [CALL | {"extra": 1}]}, RAIN),
        "messages[1].tool_calls[0].extra",
    ),
    (
        CHAT,
        chat({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}),
        "messages[1].content[0].cache_control",
    ),
    (CHAT, HELLO | {"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading"),
    (
        CHAT,
        HELLO | {"tools": [{"type": "function", "function": WEATHER["function"] | {"examples": []}}]},  # type: ignore[operator]
        "tools[0].function.examples",
    ),
    (RESPONSES, ASK | {"input": [{"role": "user", "content": "hi", "mood": 1}]}, "input[0].mood"),
    (
        RESPONSES,
        ASK | {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "mood": 1}]}]},
        "input[0].content[0].mood",
    ),
    (
        MESSAGES,
        HI | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}]},
        "messages[0].content[0].mood",
    ),
    *(
        (f"{prefix}{route}", body | {"surprise": 1}, "surprise")
        for prefix in ("", "/v1")
        for route, body in (("/tokenize", PROMPT), ("/detokenize", {"tokens": [5, 6]}))
    ),
    ("/tokenize", HELLO | {"messages": [HELLO["messages"][0] | {"mood": 1}]}, "messages[0].mood"),  # type: ignore[index]
    ("/generate", {"text": "hi", "surprise": 1}, "surprise"),
    ("/generate", {"text": "hi", "sampling_params": {"mood": 1}}, "sampling_params.mood"),
    ("/generate", {"text": ["hi", "you"], "sampling_params": [{}, {"mood": 1}]}, "sampling_params[1].mood"),
    (f"{CHAT}/batch", HELLO | {"messages": [HELLO["messages"]] * 2, "surprise": 1}, "surprise"),
    (
        f"{CHAT}/batch",
        HELLO | {"messages": [HELLO["messages"], [{"role": "user", "content": "hi", "mood": 1}]]},
        "messages[1][0].mood",
    ),
    ("/invocations", PROMPT | {"surprise": 1}, "surprise"),
    (f"{MESSAGES}/count_tokens", HELLO | {"surprise": 1}, "surprise"),
    (
        f"{MESSAGES}/count_tokens",
        HELLO | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}]},
        "messages[0].content[0].mood",
    ),
]


@pytest.mark.parametrize(("route", "body", "told"), CASES)
async def test_unknown_fields_are_ignored_and_told_or_refused_where_strict(
    route: str, body: dict[str, Any], told: str
) -> None:
    async with in_process(FakeEngine(says("hello")), tool_tokenizer(), max_model_len=4096) as client:
        reply = await client.post(route, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER] == told
    engine = FakeEngine(says("hello"))
    async with in_process(engine, tool_tokenizer(), max_model_len=4096, strict=True) as client:
        reply = await client.post(route, json=body)
    assert reply.status_code == 400 and not engine.calls
    error = reply.json()["error"]
    first = told.partition(",")[0]
    assert (error["param"], error["code"]) == (first, "unknown_parameter")
    assert error["message"] == f"Unknown parameter: {told.replace(',', ', ')} (ingress.strict)"


async def test_known_fields_are_not_told() -> None:
    async with in_process(FakeEngine(says("hello")), tool_tokenizer(), max_model_len=4096, strict=True) as client:
        for route, body in ((CHAT, HELLO), (TEXT, PROMPT), (RESPONSES, ASK), (MESSAGES, HI)):
            reply = await client.post(route, json=body)
            assert reply.status_code == 200 and HEADER not in reply.headers, route


async def _answered(client: Any, route: str, body: dict[str, Any]) -> Any:
    reply = await client.post(route, json=body)
    assert reply.status_code == 200 and HEADER not in reply.headers, reply.text
    return reply.json()


async def test_a_strict_server_takes_its_own_replies_back() -> None:
    """As openai, openai-agents, langchain and anthropic send them: with all their fields, and null for absent ones."""
    tool = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    message = HI | {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]}
    engine = FakeEngine(says("<think>hm</think>so" + HERMES_CALL))
    async with in_process(engine, tool_tokenizer(), max_model_len=4096, strict=True, output_parser="hermes") as client:
        asked = ASK | {"tools": [tool], "include": ["message.output_text.logprobs"]}
        items = (await _answered(client, RESPONSES, asked))["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
        result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "rain"}
        await _answered(client, RESPONSES, asked | {"input": [*items, result]})
        turn = (await _answered(client, CHAT, chat(tools=[WEATHER])))["choices"][0]["message"]
        turn |= dict.fromkeys(("audio", "function_call", "annotations"))
        await _answered(client, CHAT, chat(turn, RAIN, tools=[WEATHER]))
        blocks = (await _answered(client, MESSAGES, message))["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        blocks[1]["citations"] = None
        turns = [*message["messages"], {"role": "assistant", "content": blocks}]
        used = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": "rain"}]}
        await _answered(client, MESSAGES, message | {"messages": [*turns, used]})


async def test_ignored_fields_do_not_reach_the_template() -> None:
    prompts = []
    for extra in ({}, {"extra": 1, "provider_specific_fields": {"x": "y"}}):
        engine = FakeEngine(says("x"))
        turn = {"role": "assistant", "content": "", "tool_calls": [CALL | extra]} | extra
        async with in_process(engine, tool_tokenizer(), max_model_len=4096) as client:
            assert (await client.post(CHAT, json=chat(turn, RAIN))).status_code == 200
        prompts.append(small_tokenizer().decode(engine.calls[0].prompt))
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("role", ["function", "ipython", "latest_reminder", "tool responder"])
async def test_other_roles_are_the_templates_affair(role: str) -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine, tool_tokenizer(), max_model_len=4096) as client:
        reply = await client.post(CHAT, json=chat({"role": role, "content": "so"}))
    assert reply.status_code == 200
    assert f"{role}: so" in small_tokenizer().decode(engine.calls[0].prompt)


async def test_parts_of_every_kind_of_text_are_read() -> None:
    engine = FakeEngine(says("x"))
    parts = [{"type": kind, "text": kind} for kind in ("text", "input_text", "output_text")]
    turn = {"role": "assistant", "content": [*parts, {"type": "refusal", "refusal": "no"}]}
    async with in_process(engine, tool_tokenizer(), max_model_len=4096) as client:
        reply = await client.post(CHAT, json=chat(turn, {"role": "assistant", "content": None, "refusal": "never"}))
    assert reply.status_code == 200, reply.text
    prompt = small_tokenizer().decode(engine.calls[0].prompt)
    assert "assistant: text\ninput_text\noutput_text\nno\nassistant: never" in prompt


@hypothesis.given(st.lists(st.text(max_size=200), max_size=30))
@hypothesis.settings(max_examples=100, deadline=None)
def test_the_header_has_no_character_that_could_end_it(names: list[str]) -> None:
    header = ignored_header(names)
    assert all(0x20 < byte < 0x7F for byte in header) and len(header) < 2200
    assert header.count(b",") == max(0, min(len(names), 21) - 1)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**33) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "name", "id", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)
_KINDS = (ChatCompletionRequest, BatchRequest, CompletionRequest, Invocation, ResponsesRequest, MessagesRequest)
_NAMES = sorted(
    {name for kind in _KINDS if issubclass(kind, Schema) for name in kind.model_fields}
    | {"model_config", "model_fields_set", "model_dump", "refused", "copy", "__class__", "_private", "", "a.b"}
)


@hypothesis.given(st.sampled_from(_KINDS), st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=6), st.booleans())
@hypothesis.settings(max_examples=100, deadline=None)
def test_any_body_is_checked_or_refused_by_name(kind: Any, body: dict[str, Any], strict: bool) -> None:
    whole = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "model": "m", "max_tokens": 5}
    known = {name: whole[name] for name in whole.keys() & getattr(kind, "model_fields", {}).keys()}
    try:
        _, ignored = parse_body(json.dumps(known | body).encode(), kind, strict)
    except ApiError as error:
        assert error.status == 400 and error.message and error.code
    else:
        assert not (strict and ignored)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("video_url", "models read text and images only"),
        ("input_audio", "models read text and images only"),
        ("image", "images are parts of type image_url"),  # of transformers' and Anthropic's messages
        ("image_pil", "images are parts of type image_url"),
        ("image_embeds", "images are parts of type image_url"),
    ],
)
def test_other_media_are_refused_with_the_reason(kind: str, reason: str) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": "data:,"}}]}]}
    with pytest.raises(ApiError, match=rf"type '{kind}': {reason}; .* image_url") as refused:
        parse_body(json.dumps(body).encode(), ChatCompletionRequest)
    assert refused.value.status == 400
