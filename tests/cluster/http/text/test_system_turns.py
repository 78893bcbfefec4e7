"""System messages between later turns, as coding agents send them, with templates that refuse, omit or move them."""

from typing import Any

import pytest

from aerie.cluster.http.text.chat_template import ChatTemplate, ChatTemplateError
from tests.cluster.http.parsers.test_tools import tool_tokenizer
from tests.support.edge_client import MODEL, RESPONSES, in_process
from tests.support.fake_engine import FakeEngine, says, small_tokenizer

SHOW = "[{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}]"
ALTERNATES = (
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' or (m.role == 'assistant' and not "
    "m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}"
)
# What published templates do.
KINDS = {
    "shows all": "{% for m in messages %}" + SHOW + "{% endfor %}",
    "refuses later ones (Qwen3.5)": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('at the beginning') }}{% endif %}" + SHOW + "{% endfor %}",
    "omits later ones (MiniMax-M2, SmolLM3)": "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    + SHOW
    + "{% endif %}{% endfor %}",
    "keeps the last one alone (DeepSeek-R1's distillations)": "{% set ns = namespace(s='') %}{% for m in messages if "
    "m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}[system: {{ ns.s }}]{% for m in messages if m.role != "
    "'system' %}" + SHOW + "{% endfor %}",
    "moves them to the front": "{% for m in messages if m.role == 'system' %}"
    + SHOW
    + "{% endfor %}{% for m in messages"
    " if m.role != 'system' %}" + SHOW + "{% endfor %}",
    "knows no other roles (Ministral 3)": "{% for m in messages %}{% if m.role not in ('user', 'assistant', 'tool') "
    "and not loop.first %}{{ raise_exception('roles') }}{% endif %}" + SHOW + "{% endfor %}",
    "wants turns to alternate (Mistral)": ALTERNATES + "{% for m in messages %}" + SHOW + "{% endfor %}",
    "has no system role (Gemma 2)": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}"
    "{% endif %}" + SHOW + "{% endfor %}",
    "shows developers only first": "{% for m in messages %}{% if m.role != 'developer' or loop.first %}"
    + SHOW
    + "{% endif "
    "%}{% endfor %}",
    "drops developers": "{% for m in messages %}{% if m.role == 'developer' %}{% else %}"
    + SHOW
    + "{% endif %}{% endfor %}",
}
USED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "R0"}


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CONVERSATIONS = {
    "codex": [turn("developer", "S0"), turn("developer", "S1"), turn("user", "U0"), turn("user", "U1"), USED, RESULT],
    "claude-code": [
        turn("system", "S0"),
        turn("user", "U0"),
        turn("system", "S1"),
        USED,
        RESULT,
        turn("system", "S2"),
        USED,
    ],
    "no system": [turn("user", "U0"), turn("assistant", "A0"), turn("user", "U1")],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_text_is_shown_in_its_place(name: str, kind: str) -> None:
    prompt = ChatTemplate(KINDS[kind], {}).render(CONVERSATIONS[name])
    texts = [message["content"] for message in CONVERSATIONS[name] if message["content"]]
    assert [prompt.count(text) for text in texts] == [1] * len(texts), prompt
    assert sorted(texts, key=prompt.index) == texts


def test_turns_that_the_template_shows_stay_as_they_are() -> None:
    prompt = ChatTemplate(KINDS["shows all"], {}).render(CONVERSATIONS["claude-code"])
    assert prompt == "[system: S0][user: U0][system: S1][assistant: <f>][tool: R0][system: S2][assistant: <f>]"
    prompt = ChatTemplate(KINDS["omits later ones (MiniMax-M2, SmolLM3)"], {}).render(CONVERSATIONS["codex"])
    assert prompt == "[system: S0\n\nS1][user: U0][user: U1][assistant: <f>][tool: R0]"


def test_a_template_that_refuses_everything_says_so() -> None:
    with pytest.raises(ChatTemplateError, match="never"):
        ChatTemplate("{{ raise_exception('never') }}", {}).render(CONVERSATIONS["no system"])


async def test_codex_is_answered_with_a_template_that_refuses_later_system_messages() -> None:
    engine = FakeEngine(says("x"))
    items = [{"type": "message", **message} for message in CONVERSATIONS["codex"][:4]]
    template = KINDS["refuses later ones (Qwen3.5)"]
    async with in_process(engine, tool_tokenizer(template), max_model_len=4096) as client:
        reply = await client.post(RESPONSES, json={"model": MODEL, "input": items})
    assert reply.status_code == 200, reply.text
    assert small_tokenizer().decode(engine.calls[0].prompt) == "[system: S0\n\nS1][user: U0][user: U1]"


def test_images_stay_images_where_turns_are_joined() -> None:
    parts = "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
    show = "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}" + parts + "{% endif %}]"
    edge = tool_tokenizer(ALTERNATES + show + "{% endfor %}")
    image = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "see"}]}
    for turns, text in (
        ([turn("user", "U0"), image], "[U0\n\n<image>see]"),
        ([image, turn("user", "U0"), image], "[<image>see\n\nU0\n\n<image>see]"),
        ([image, turn("system", "S0")], "[<image>see][S0]"),
    ):
        assert edge.render(turns, False).text == text
