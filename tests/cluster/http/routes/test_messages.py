"""/v1/messages: Anthropic's form over the machinery of chats."""

import json
from typing import Any

import httpx
import pytest

from aerie.cluster.transport.messages import TokenDelta
from tests.cluster.http.parsers.test_tools import CALL, tool_tokenizer
from tests.support.edge_client import MODEL, in_process
from tests.support.fake_engine import FakeEngine, refuses, says, small_tokenizer

MESSAGES = "/v1/messages"
HI = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
WEATHER = {
    "name": "weather",
    "description": "of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}
WITH_TOOLS = HI | {"tools": [WEATHER]}


def client(engine: FakeEngine, **config: Any) -> httpx.AsyncClient:
    return in_process(engine, tool_tokenizer(), max_model_len=4096, **config)


async def post(engine: FakeEngine, body: dict[str, Any], **config: Any) -> Any:
    async with client(engine, **config) as http:
        reply = await http.post(MESSAGES, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def stream(engine: FakeEngine, body: dict[str, Any], **config: Any) -> list[dict[str, Any]]:
    """The events, whose names are their types."""
    async with client(engine, **config) as http:
        reply = await http.post(MESSAGES, json=body | {"stream": True})
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def prompt_of(body: dict[str, Any]) -> str:
    engine = FakeEngine(says("x"))
    await post(engine, body)
    return str(small_tokenizer().decode(engine.calls[0].prompt))


async def test_a_reply_is_a_message_of_blocks() -> None:
    reply = await post(FakeEngine(says("hello", " world", cached_tokens=4)), HI)
    assert reply.pop("id").startswith("msg_")
    usage = reply.pop("usage")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["cache_read_input_tokens"] == 4 and usage["output_tokens"] == 3
    async with client(FakeEngine(says("x"))) as http:
        count = (await http.post(MESSAGES + "/count_tokens", json={k: HI[k] for k in ("model", "messages")})).json()
    assert count == {"input_tokens": usage["input_tokens"] + 4}


async def test_a_stream_has_anthropics_events_in_their_order() -> None:
    events = await stream(FakeEngine(says("hello", " world")), HI)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[1]["content_block"]["type"] == "text" and events[1]["index"] == 0
    assert "".join(event["delta"]["text"] for event in events[2:4]) == "hello world"
    assert events[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[5]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("change", "script", "reason"),
    [
        ({}, says("hello", finish="length"), ("max_tokens", None)),
        ({"stop_sequences": ["wor"]}, says("hello world"), ("stop_sequence", "wor")),
        ({"stop_sequences": ["never"]}, says("hello world"), ("end_turn", None)),
    ],
)
async def test_why_an_answer_ends(change: dict[str, Any], script: Any, reason: tuple[str, str | None]) -> None:
    reply = await post(FakeEngine(script), HI | change)
    assert (reply["stop_reason"], reply["stop_sequence"]) == reason
    events = await stream(FakeEngine(script), HI | change)
    assert tuple(events[-2]["delta"].values()) == reason


async def test_calls_of_tools_are_blocks() -> None:
    script = says("I look. ", *CALL)
    reply = await post(FakeEngine(script), WITH_TOOLS)
    text, use = reply["content"]
    assert text["text"].strip() == "I look." and reply["stop_reason"] == "tool_use"
    assert use == {"type": "tool_use", "id": use["id"], "name": "weather", "input": {"place": "Bern"}}
    events = await stream(FakeEngine(script), WITH_TOOLS)
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["text", "tool_use"]
    assert starts[1]["name"] == "weather" and starts[1]["input"] == {}
    parts = [event["delta"]["partial_json"] for event in events if event.get("delta", {}).get("partial_json")]
    assert json.loads("".join(parts)) == {"place": "Bern"}
    assert [event["index"] for event in events if "index" in event] == sorted(
        e["index"] for e in events if "index" in e
    )
    assert sum(event["type"] == "content_block_stop" for event in events) == 2
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_thinking_is_a_block_of_its_own() -> None:
    script, body = says("I wonder", "</think>", "hello"), HI | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    reply = await post(FakeEngine(script), body, output_parser="hermes")
    assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
    assert reply["content"][0]["thinking"].strip() == "I wonder"
    events = await stream(FakeEngine(script), body, output_parser="hermes")
    kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert kinds == ["thinking", "text"]


async def test_turns_blocks_and_system_reach_the_template() -> None:
    body = WITH_TOOLS | {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Bern"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
    }
    prompt = await prompt_of(body)
    assert prompt.startswith("TOOLS ") and '"weather"' in prompt
    assert prompt.partition("\n")[2] == (
        'system: Be brief.\nuser: one\ntwo\nassistant: I look.[weather {"place": "Bern"}]\ntool: rain\n'
        "user: and now?\nassistant:"
    )


async def test_a_last_turn_of_the_assistant_goes_on() -> None:
    body = HI | {"messages": [*HI["messages"], {"role": "assistant", "content": "The answer is"}]}  # type: ignore[misc]
    assert (await prompt_of(body)).endswith("assistant: The answer is")


@pytest.mark.parametrize(
    ("choice", "forced"),
    [({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True), ({"type": "auto"}, False)],
)
async def test_tool_choice_forces_calls(choice: dict[str, Any], forced: bool) -> None:
    engine = FakeEngine(says(CALL))
    await post(engine, WITH_TOOLS | {"tool_choice": choice})
    grammar = engine.calls[0].sampling.grammar
    assert (grammar is not None) == forced


async def test_output_config_is_a_grammar() -> None:
    engine = FakeEngine(says("{}"))
    await post(engine, HI | {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}})
    assert engine.calls[0].sampling.grammar is not None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"compaction": {}}, "compaction"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages[0].content[0].type"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": [1] * 2000}, "stop_sequences[0]"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": [{}] * 4096}] * 5}]}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"model": "other"}, "model"),
    ],
)
async def test_errors_are_in_anthropics_form_with_the_requests_own_names(change: dict[str, Any], param: str) -> None:
    async with client(FakeEngine(says("x"))) as http:
        reply = await http.post(MESSAGES, json=WITH_TOOLS | change)
    document = reply.json()
    assert reply.status_code == (404 if param == "model" else 400)
    assert document["type"] == "error" and document["error"]["param"] == param
    assert document["error"]["type"] == ("not_found_error" if param == "model" else "invalid_request_error")


async def test_thinking_that_cannot_be_switched_is_ignored_and_named() -> None:
    async with in_process(FakeEngine(says("x"))) as http:  # its template has no switch
        off = await http.post(MESSAGES, json=HI | {"thinking": {"type": "disabled"}})
        on = await http.post(MESSAGES, json=HI | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert (off.status_code, off.headers.get("x-aerie-ignored")) == (200, None)
    assert (on.status_code, on.headers.get("x-aerie-ignored")) == (200, "thinking")


async def test_failures_before_and_inside_a_stream() -> None:
    async with client(FakeEngine(refuses("queue_full"))) as http:
        full = await http.post(MESSAGES, json=HI)
    assert full.status_code == 429 and full.json()["error"]["type"] == "rate_limit_error"
    ids = tuple(small_tokenizer().encode("hello", add_special_tokens=False).ids)
    broken = FakeEngine(lambda prompt, sampling: [TokenDelta("", ids), TokenDelta("", (), "error", error="gone")])
    events = await stream(broken, HI)
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"


async def test_anthropics_header_carries_the_key() -> None:
    async with client(FakeEngine(says("x")), api_keys=("sk-12345678",)) as http:
        assert (await http.post(MESSAGES, json=HI)).status_code == 401
        assert (await http.post(MESSAGES, json=HI, headers={"x-api-key": "sk-wrongwrong"})).status_code == 401
        assert (await http.post(MESSAGES, json=HI, headers={"x-api-key": "sk-12345678"})).status_code == 200


@pytest.mark.parametrize("kind", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_thread_is_refused_in_the_form_after_which_the_client_sends_whole_conversations(
    kind: dict[str, str],
) -> None:
    """anthropic 2.14's tool runner sends only a tool's result after an answer to a request with `thread`."""
    engine = FakeEngine(says("x"))
    async with client(engine) as http:
        reply = await http.post(MESSAGES, json=HI | {"thread": kind})
        assert (await http.post(MESSAGES, json=HI | {"thread": None})).status_code == 200
    assert reply.status_code == 400 and len(engine.calls) == 1
    error = reply.json()["error"]
    assert (error["param"], error["details"]) == ("thread", {"error_code": "thread_unsupported_request"})


async def test_a_summary_instead_of_an_answer_is_refused_and_counted() -> None:
    body = HI | {"compaction": {"type": "enabled"}}
    async with client(FakeEngine(says("x"))) as http:
        assert (await http.post(MESSAGES, json=body)).json()["error"]["param"] == "compaction"
        assert (await http.post(f"{MESSAGES}/count_tokens", json=body)).status_code == 200


# What the AI SDK's Anthropic provider (3.0.140) and Anthropic's clients add: name, what is added to a request, and what
# the header names.
AI_SDK_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    *(
        (name, {"tools": [WEATHER | {name: value}]}, f"tools[0].{name}")
        for name, value in {
            "eager_input_streaming": True,
            "defer_loading": True,
            "input_examples": [{"place": "Bern"}],
            "allowed_callers": ["direct"],
        }.items()
    ),
    ("output_config.effort", {"output_config": {"effort": "high"}}, "output_config.effort"),
    ("context_management", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, ""),
    ("speed", {"speed": "standard", "inference_geo": "us"}, "speed,inference_geo"),
]


@pytest.mark.parametrize(("name", "extra", "ignored"), AI_SDK_FIELDS, ids=[row[0] for row in AI_SDK_FIELDS])
@pytest.mark.parametrize("route", [MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_fields_of_the_ai_sdk_are_ignored_and_named(
    route: str, name: str, extra: dict[str, Any], ignored: str
) -> None:
    engine = FakeEngine(says("x"))
    body = {key: value for key, value in (WITH_TOOLS | extra).items() if route == MESSAGES or key != "max_tokens"}
    async with client(engine) as http:
        plain = await http.post(route, json={key: value for key, value in body.items() if key not in extra})
        reply = await http.post(route, json=body)
    assert (plain.status_code, reply.status_code) == (200, 200), reply.text
    assert reply.headers["x-aerie-ignored"] == (ignored or name)
    assert "x-aerie-ignored" not in plain.headers


async def test_an_effort_that_the_template_knows_is_honoured() -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine, tool_tokenizer("{{ reasoning_effort }}"), max_model_len=4096) as http:
        reply = await http.post(MESSAGES, json=HI | {"output_config": {"effort": "high"}})
    assert reply.status_code == 200 and "x-aerie-ignored" not in reply.headers
    assert small_tokenizer().decode(engine.calls[0].prompt) == "high"


@pytest.mark.parametrize("citations", [None, [], [{"type": "char_location", "cited_text": "x"}]])
async def test_citations_are_neither_sent_nor_missed(citations: Any) -> None:
    """Anthropic's clients read null or a list, the AI SDK a list: without the key, both have none."""
    reply = await post(FakeEngine(says("so")), HI)
    assert reply["content"] == [{"type": "text", "text": "so"}]
    start = (await stream(FakeEngine(says("so")), HI))[1]
    assert start["content_block"] == {"type": "text", "text": ""}
    turns = [{"role": "assistant", "content": [reply["content"][0] | {"citations": citations}]}, *HI["messages"]]
    async with client(FakeEngine(says("x")), strict=True) as http:
        again = await http.post(MESSAGES, json=HI | {"messages": [*HI["messages"], *turns]})
    assert again.status_code == 200, again.text


async def test_a_text_after_a_call_is_a_block_after_it() -> None:
    async with client(FakeEngine(says("I ", "look. ", CALL[:20], CALL[20:], " and", " then"))) as http:
        content = (await http.post(MESSAGES, json=WITH_TOOLS)).json()["content"]
    assert [block["type"] for block in content] == ["text", "tool_use", "text"]
    assert content[0]["text"].startswith("I look.") and content[2]["text"].endswith("and then")
