"""Turns with tool calls: every kind of chat template shows the call, whatever stands beside it."""

from typing import Any

import pytest

from cluster.http.text.chat_template import ChatTemplate
from tests.cluster.http.parsers.test_tools import WEATHER, tool_tokenizer
from tests.support.edge_client import CHAT, MODEL, RESPONSES, in_process
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
