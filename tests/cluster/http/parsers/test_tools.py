"""Tools over HTTP: what the model is shown, what is refused, and what OpenAI's client reads."""

import json
from typing import Any

import httpx
import openai
import pytest

from aerie.cluster.http.text.chat_template import ChatTemplate
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from tests.support.edge_client import CHAT, HELLO, MODEL, events, served
from tests.support.edge_client import in_process as any_length
from tests.support.fake_engine import EOS, FakeEngine, says, small_tokenizer

TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }} <tool_call> arguments{{ '\n' }}{% endif %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern"}}\n</tool_call>'
WITH_TOOLS = HELLO | {"tools": [WEATHER, TIME]}


def in_process(engine: FakeEngine, tokenizer: ChatTokenizer, **changes: Any) -> httpx.AsyncClient:
    return any_length(engine, tokenizer, max_model_len=4096, **changes)


def tool_tokenizer(template: str = TEMPLATE, **options: Any) -> ChatTokenizer:
    tokenizer = small_tokenizer()
    return ChatTokenizer(tokenizer, ChatTemplate(template, {}), (tokenizer.token_to_id(EOS),), **options)


async def _prompt(body: dict[str, Any], template: str = TEMPLATE) -> str:
    engine = FakeEngine(says("x"))
    async with in_process(engine, tool_tokenizer(template)) as client:
        reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    return small_tokenizer().decode(engine.calls[0].prompt)


async def _error(body: dict[str, Any], template: str = TEMPLATE, **config: Any) -> dict[str, Any]:
    engine = FakeEngine(says("x"))
    async with in_process(engine, tool_tokenizer(template), **config) as client:
        reply = await client.post(CHAT, json=body)
    assert reply.status_code == 400 and not engine.calls, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


async def test_the_model_is_shown_the_tools_unless_it_may_call_none() -> None:
    prompt = await _prompt(WITH_TOOLS)
    shown = json.loads(prompt.partition("TOOLS ")[2].partition(" <tool_call>")[0])
    assert shown == [WEATHER, TIME]
    assert await _prompt(WITH_TOOLS | {"tool_choice": "auto"}) == prompt
    assert "TOOLS" not in await _prompt(WITH_TOOLS | {"tool_choice": "none"})
    assert "TOOLS" not in await _prompt(HELLO | {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True})


HISTORY = [
    {"role": "user", "content": "rain?"},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [
            {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Bern"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "dry"}]},
]


async def test_calls_and_results_of_earlier_turns_reach_the_template() -> None:
    prompt = await _prompt(WITH_TOOLS | {"messages": HISTORY})
    assert prompt.endswith('user: rain?\nassistant: [weather {"place": "Bern"}]\ntool: dry\nassistant:')


async def test_whole_reply_has_the_call() -> None:
    engine = FakeEngine(says("I look. ", CALL[:30], CALL[30:]))
    async with in_process(engine, tool_tokenizer()) as client:
        (choice,) = (await client.post(CHAT, json=WITH_TOOLS)).json()["choices"]
        (plain,) = (await client.post(CHAT, json=WITH_TOOLS | {"tool_choice": "none"})).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"place": "Bern"}'}
    assert plain["message"]["content"] == "I look. " + CALL and plain["finish_reason"] == "stop"


async def test_openais_client_streams_calls_and_reasoning() -> None:
    engine = FakeEngine(says("hm", "m</think>\n", *CALL))
    messages: Any = HELLO["messages"]
    tools: Any = [WEATHER]
    async with (
        served(engine, tool_tokenizer(), max_model_len=4096) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, stream=True, reasoning_effort="high"
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hmm"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert calls[0].function and calls[0].function.name == "weather" and calls[0].id
    assert "".join((call.function and call.function.arguments) or "" for call in calls) == '{"place": "Bern"}'
    assert all(not delta.content for delta in deltas)
    assert small_tokenizer().decode(engine.calls[0].prompt).endswith("<think>")


async def test_a_form_of_answer_beside_a_forced_call_asks_for_nothing_more() -> None:
    """It is one of text, and there is none: clients that have an output type and tools send both."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "properties": {}}}}
    engine = FakeEngine(says(CALL))
    asked = WITH_TOOLS | {"tool_choice": "required"}
    async with in_process(engine, tool_tokenizer()) as client:
        (alone,) = (await client.post(CHAT, json=asked)).json()["choices"]
        beside = await client.post(CHAT, json=asked | {"response_format": form})
    assert beside.status_code == 200, beside.text
    assert beside.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert engine.calls[0].sampling.grammar == engine.calls[1].sampling.grammar


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_can_be_left_out(stream: bool) -> None:
    engine = FakeEngine(says("hm", "m</think>\n", "yes"))
    body = HELLO | {"reasoning_effort": "high", "include_reasoning": False, "stream": stream, "logprobs": True}
    async with in_process(engine, tool_tokenizer()) as client:
        reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200 and "hmm" not in reply.text, reply.text
    choices = [chunk["choices"][0]["delta"] for chunk in events(reply.text)] if stream else []
    message = {} if stream else reply.json()["choices"][0]["message"]
    assert "".join(delta.get("content", "") for delta in choices) + message.get("content", "") == "yes"


async def test_special_tokens_that_are_marks_reach_the_parser_and_no_client() -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    end = tokenizer.token_to_id(EOS)
    template = ChatTemplate("{{ tools }}[TOOL_CALLS]", {})
    script = says('[TOOL_CALLS][{"name": "time", "arguments": {}}]', tokenizer=tokenizer)
    async with in_process(FakeEngine(script), ChatTokenizer(tokenizer, template, (end,))) as client:
        message = (await client.post(CHAT, json=WITH_TOOLS)).json()["choices"][0]["message"]
        plain = (await client.post(CHAT, json=HELLO)).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}
    assert message["content"] is None
    assert "tool_calls" not in plain


async def test_a_checkpoints_response_template_is_read_by_transformers() -> None:
    template = {
        "version": 1,
        "start_anchor": "assistant:",
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>"},
            "content": {"content": "text"},
            "tool_calls": {"open": "<c>", "close": "</c>", "content": "json", "repeats": True},
        },
    }
    answer = '<t>so</t>yes<c>{"function": {"name": "time", "arguments": {"zone": 1}}}</c>'
    async with in_process(FakeEngine(says(*answer)), tool_tokenizer(response_template=template)) as client:
        (choice,) = (await client.post(CHAT, json=WITH_TOOLS)).json()["choices"]
        chunks = events((await client.post(CHAT, json=WITH_TOOLS | {"stream": True})).text)
        forced = (await client.post(CHAT, json=WITH_TOOLS | {"tool_choice": "required"})).json()["error"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == ("so", "yes", "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "time", "arguments": '{"zone": 1}'}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"
    assert forced["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TIME] * 129}, "tools"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
async def test_bad_tools_are_400_with_the_parameter(extra: dict[str, Any], param: str) -> None:
    assert (await _error(WITH_TOOLS | extra))["param"] == param


async def test_a_model_without_a_known_form_of_calls_refuses_tools_and_names_the_remedy() -> None:
    error = await _error(WITH_TOOLS, "{{ messages }}")
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert "ingress.output_parser: deepseek_v3, gemma4, glm45, granite, harmony, hermes" in error["message"]


@pytest.mark.parametrize(
    ("asked", "thinks"),
    [({}, True), ({"chat_template_kwargs": {"enable_thinking": False}}, False), ({"reasoning_effort": "none"}, False)],
)
async def test_the_servers_template_variables_are_defaults(asked: dict[str, Any], thinks: bool) -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine, tool_tokenizer(), chat_template_kwargs={"enable_thinking": True}) as client:
        assert (await client.post(CHAT, json=HELLO | asked)).status_code == 200
        count = (await client.post("/tokenize", json=HELLO | asked)).json()["count"]
    prompt = small_tokenizer().decode(engine.calls[0].prompt)
    assert prompt.endswith("<think>") == thinks
    if "reasoning_effort" not in asked:  # /tokenize has no such field
        assert count == len(engine.calls[0].prompt)


async def test_reasoning_effort_is_the_templates_switch() -> None:
    assert (await _prompt(HELLO | {"reasoning_effort": "low"})).endswith("<think>")
    assert not (await _prompt(HELLO | {"reasoning_effort": "none"})).endswith("<think>")
    assert (await _prompt(HELLO | {"reasoning_effort": "low"}, "{{ reasoning_effort }}")) == "low"


async def test_the_final_message_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well "}]
    body = HELLO | {"messages": messages, "continue_final_message": True}
    assert await _prompt(body) == "user: hi\nassistant: well "
    trimmed = "{% for m in messages %}{{ m.content | trim }}<end>{% endfor %}"
    assert await _prompt(body, trimmed) == "hi<end>well"
    assert (await _error(body | {"add_generation_prompt": True}))["param"] == "continue_final_message"
    assert (await _error(body, "{{ messages[0].content }}"))["param"] == "continue_final_message"


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_the_only_ones_that_the_model_is_shown(mode: str) -> None:
    def choice(*names: str, kind: str = "function") -> dict[str, Any]:
        tools = [{"type": kind, "function": {"name": name}} for name in names]
        return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}

    engine = FakeEngine(says(CALL))
    async with in_process(engine, tool_tokenizer()) as client:
        reply = await client.post(CHAT, json=WITH_TOOLS | choice("weather", "weather"))
    assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    prompt, grammar = small_tokenizer().decode(engine.calls[0].prompt), engine.calls[0].sampling.grammar
    assert '"weather"' in prompt and '"time"' not in prompt
    assert (grammar is not None) == (mode == "required") and (grammar is None or '"time' not in grammar.text)
    for given in (choice("other"), choice("weather", kind="custom"), choice()):
        assert (await _error(WITH_TOOLS | given))["param"].startswith("tool_choice")
