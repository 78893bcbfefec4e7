"""What templates support, as their renderings show: calls of earlier turns, tools, efforts of reasoning."""

import json
from pathlib import Path
from typing import Any

import pytest

from aerie.cluster.http.text.chat_template import ChatTemplate
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from tests.cluster.http.parsers.test_tools import TEMPLATE, WEATHER, tool_tokenizer
from tests.support.edge_client import CHAT, HELLO, MODEL, RESPONSES, in_process
from tests.support.fake_engine import FakeEngine, says, small_tokenizer

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"place": "Bern"}}}
AFTER = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
LOOP = "{% for m in messages %}{{ m.role }}:#{% endfor %}"
# What published templates do with an assistant's turn, in place of "#".
KINDS = {
    "reads the content of a turn without reasoning (Qwen3)": (
        "{% if m.reasoning_content is string %}{{ m.reasoning_content }}{% else %}{% if m.reasoning_content is not none"
        " and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
        "{% endif %}" + AFTER
    ),
    "takes the content's length (Ministral 3)": (
        "{% if m.reasoning_content is not none and m.content | length %}{{ m.content }}{% endif %}" + AFTER
    ),
    "omits a call beside a content (DeepSeek-R1's distillations)": (
        "{% if m['content'] is not none %}{{ m.content }}{% endif %}{% if m['content'] is none %}"
        + AFTER
        + "{% endif %}"
    ),
    "omits a call beside a content, under another name": "{% set text = m.content %}{% if text != none %}{{ text }}"
    "{% else %}" + AFTER + "{% endif %}",
    "joins the arguments": "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + "
    "c.function.arguments + ']' }}{% endfor %}",
    "writes the arguments as they are": "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
    "{{ c.function.arguments }}]{% endfor %}",
    "iterates over the arguments": "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name + '{' }}"
    """{% for k, v in c.function.arguments | items %}"{{ k }}": "{{ v }}"{% endfor %}}]{% endfor %}""",
    "needs tools": "{{ m.content }}{% for tool in tools %}{% endfor %}" + AFTER,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", ["", None, "text"])
def test_call_of_an_earlier_turn_is_shown(kind: str, content: str | None) -> None:
    template = ChatTemplate(LOOP.replace("#", KINDS[kind]), {})
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content, "tool_calls": [CALL]}]
    shown = template.render(messages, False, tools=[WEATHER] if "tools" in kind else [])
    if content == "text" and kind.startswith("omits"):
        assert shown == "user:Hiassistant:text"  # such a template has no place for the call
    else:
        assert shown == f'user:Hiassistant:{content or ""}[weather{{"place": "Bern"}}]'


def turns(route: str, content: str | None) -> dict[str, Any]:
    """A conversation after one call, as the route's clients send it."""
    if route == RESPONSES:
        call = {"type": "function_call", "call_id": "abcdefghi", "name": "weather", "arguments": '{"place": "Bern"}'}
        result = {"type": "function_call_output", "call_id": "abcdefghi", "output": "rain"}
        said = [] if content is None else [{"role": "assistant", "content": content}]
        return {"input": [{"role": "user", "content": "Hi"}, *said, call, result]}
    if route == CHAT:
        call = CALL | {"function": {"name": "weather", "arguments": '{"place": "Bern"}'}}
        made = {"role": "assistant", "content": content, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"}
        return {"messages": [{"role": "user", "content": "Hi"}, made, result]}
    use = {"type": "tool_use", "id": "abcdefghi", "name": "weather", "input": {"place": "Bern"}}
    text = [] if content is None else [{"type": "text", "text": content}]
    answer = [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": "rain"}]
    made = {"role": "assistant", "content": [*text, use]}
    return {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}, made, {"role": "user", "content": answer}]}


@pytest.mark.parametrize("route", [CHAT, RESPONSES, "/v1/messages"])
@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "needs tools"])
async def test_agent_goes_on_after_a_call_without_text(route: str, content: str | None, kind: str) -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine, tool_tokenizer(LOOP.replace("#", KINDS[kind]))) as client:
        reply = await client.post(route, json={"model": MODEL, **turns(route, content)})
    assert reply.status_code == 200, reply.text
    shown = small_tokenizer().decode(engine.calls[0].prompt)
    assert shown == 'user:Hiassistant:[weather{"place": "Bern"}]tool:rain'


def test_template_changes_lists_of_its_own_only() -> None:
    source = (
        "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% set _ = ns.ids.append(m.content) %}{% endfor %}"
        "{{ ns.ids.pop(0) }}{{ ns.ids | length }}{% set _ = messages.append(messages[0]) %}{{ messages | length }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]  # Kimi-K2's template does so
    assert [ChatTemplate(source, {}).render(messages) for _ in range(2)] == ["a13", "a13"]
    assert len(messages) == 2


EFFORTS = {
    "no switch": ("{# reasoning_effort, enable_thinking #}{{ enable_thinking if false }}", {}),
    "an off switch": (
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
        {"none": {"enable_thinking": False}, "high": {"enable_thinking": True}},
    ),
    "a switch by name": ("{{ 'T' if thinking_mode == 'enabled' }}", {"none": {"thinking_mode": "disabled"}}),
    "a budget": ("{{ 'Do not think.' if thinking_budget == 0 }}", {"none": {"thinking_budget": 0}}),
    "levels": (
        "Reasoning: {{ reasoning_effort }}",
        {"none": {"reasoning_effort": "none"}, "low": {"reasoning_effort": "low"}},
    ),
    "levels of reasoning that is switched on": (
        "{% if thinking %}<think>{{ reasoning_effort if reasoning_effort == 'max' }}{% endif %}",
        {
            "none": {"thinking": False},
            "low": {"thinking": True, "reasoning_effort": "low"},
            "max": {"thinking": True, "reasoning_effort": "max"},
        },
    ),
    "few levels": (
        "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high', 'no_think'] %}"
        "{{ raise_exception('no') }}{% endif %}{{ reasoning_effort | default('no_think') }}",
        {
            "none": {"reasoning_effort": "no_think"},
            "minimal": {"reasoning_effort": "low"},
            "medium": {"reasoning_effort": "high"},
            "max": {"reasoning_effort": "high"},
        },
    ),
    "no level for none": ("{{ 'Short.' if reasoning_effort == 'low' }}", {"low": {"reasoning_effort": "low"}}),
}


@pytest.mark.parametrize("kind", EFFORTS)
async def test_effort_has_its_effect_or_is_named(kind: str) -> None:
    source, expected = EFFORTS[kind]
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}" + source + "{% endif %}"
    )
    efforts = ChatTemplate(template, {}).efforts
    assert {effort: efforts[effort] for effort in expected} == expected
    assert bool(efforts) == bool(expected) and (kind != "no level for none" or "none" not in efforts)
    bodies = {
        CHAT: ("reasoning_effort", lambda effort: HELLO | {"reasoning_effort": effort}),
        RESPONSES: ("reasoning.effort", lambda effort: {"input": "Hi", "reasoning": {"effort": effort}}),
    }
    for route, (name, body) in bodies.items():
        for strict in (False, True):
            async with in_process(FakeEngine(says("x")), tool_tokenizer(template), strict=strict) as client:
                for effort in ("none", "low"):
                    reply = await client.post(route, json={"model": MODEL, **body(effort)})
                    assert reply.status_code == (400 if strict and effort not in efforts else 200), reply.text
                    assert reply.headers.get("x-aerie-ignored") == (None if strict or effort in efforts else name)


def folder_with(tmp_path: Path, config: dict[str, Any], files: dict[str, str]) -> ChatTokenizer:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return ChatTokenizer.from_folder(tmp_path)


DEFAULT, TOOL_USE = "{{ messages[0].content }}", "{{ tools[0].function.name }}<tool_call> arguments"
NAMED = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOL_USE}]
FILES = {"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": TOOL_USE}
ONE_FILE = {"chat_template.jinja": "{{ messages[0].content }}!"}


@pytest.mark.parametrize(
    ("config", "files", "plain", "with_tools"),
    [
        ({"chat_template": NAMED}, {}, "Hi", "weather"),
        ({}, FILES, "Hi", "weather"),
        ({"chat_template": NAMED}, ONE_FILE, "Hi!", "Hi!"),  # files replace the configuration's templates
        ({"chat_template": DEFAULT}, {"additional_chat_templates/tool_use.jinja": TOOL_USE}, None, "weather"),
        ({"chat_template": [*NAMED, {"name": "rag", "template": "{{ documents }}"}]}, {}, "Hi", "weather"),
        ({"chat_template": NAMED[:1]}, {}, "Hi", "Hi"),
        ({"chat_template": DEFAULT}, {}, "Hi", "Hi"),
    ],
)
async def test_template_for_tools_is_used_with_tools(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], plain: str | None, with_tools: str
) -> None:
    tokenizer = folder_with(tmp_path, config, files)
    engine = FakeEngine(says("x"))
    async with in_process(engine, tokenizer, output_parser="hermes") as client:
        reply = await client.post(CHAT, json=HELLO | {"messages": [{"role": "user", "content": "Hi"}]})
        tools = await client.post(
            CHAT, json=HELLO | {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
        )
    if plain is None:
        assert "with tools only" in reply.json()["error"]["message"]
    else:
        assert tokenizer.decode(engine.calls[0].prompt) == plain
    if "weather" in with_tools:
        assert tokenizer.decode(engine.calls[-1].prompt).startswith("weather")
    else:
        assert tools.json()["error"]["param"] == "tools" and "tool_use.jinja" in tools.json()["error"]["message"]


async def shown_tools(route: str, tool: dict[str, Any], template: str = TEMPLATE) -> Any:
    engine = FakeEngine(says("x"))
    body = HELLO | {"max_tokens": 9} if route != RESPONSES else {"input": "Hi"}
    async with in_process(engine, tool_tokenizer(template), max_model_len=4096) as client:
        reply = await client.post(route, json={"model": MODEL, **body, "tools": [tool]})
    assert reply.status_code == 200, reply.text
    prompt = small_tokenizer().decode(engine.calls[0].prompt)
    return prompt.partition("TOOLS ")[2].partition(" <tool_call>")[0]


SENT = [
    {"type": "function", "function": {"name": "f"}},
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}},
    {"function": {"parameters": {"type": "object"}, "strict": False, "name": "f"}, "type": "function"},
]


@pytest.mark.parametrize("tool", SENT)
async def test_tool_is_shown_as_it_was_sent(tool: dict[str, Any]) -> None:
    assert await shown_tools(CHAT, tool) == json.dumps([tool])
    nulls = tool | {"function": {**tool["function"], "strict": None, "unknown": 1}}
    expected = tool | {"function": {k: v for k, v in tool["function"].items() if k != "strict"}}
    assert await shown_tools(CHAT, nulls) == json.dumps([expected])


async def test_tools_of_other_routes_get_no_fields() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    shown = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert json.loads(await shown_tools(RESPONSES, tool)) == shown
    assert json.loads(await shown_tools("/v1/messages", {"name": "f", "input_schema": {"type": "object"}})) == shown


async def test_tool_gets_the_fields_without_which_the_template_fails() -> None:
    template = TEMPLATE.replace(
        "{{ tools | tojson }}",
        "{% for t in tools %}{{ t.function.name + t.function.description }}"
        "{{ t.function.parameters.properties | tojson }}{{ t.function.parameters | tojson }}{% endfor %}",
    )
    assert (
        await shown_tools(CHAT, SENT[0], template)
        == 'f{}{"type": "object", "properties": {}, "additionalProperties": false}'
    )
    assert await shown_tools(CHAT, SENT[2], template) == 'f{}{"type": "object", "properties": {}}'


async def test_tools_that_do_not_reach_the_prompt_are_refused() -> None:
    template = TEMPLATE.replace("{% if tools %}", "{% if system_tools %}")
    async with in_process(FakeEngine(says("x")), tool_tokenizer(template)) as client:
        reply = await client.post(CHAT, json=HELLO | {"tools": [WEATHER]})
        unused = await client.post(CHAT, json=HELLO | {"tools": [WEATHER], "tool_choice": "none"})
    assert reply.status_code == 400 and "does not show tools" in reply.json()["error"]["message"]
    assert unused.status_code == 200
