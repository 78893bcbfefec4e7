"""A chat template may take so much time and make so much text, and renders beside the event loop."""

import asyncio
import time

import pytest

from aerie.cluster.http.text import template_facts
from aerie.cluster.http.text.chat_template import ChatTemplate, ChatTemplateError, SlowTemplateError
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from tests.support.edge_client import CHAT, MODEL, in_process
from tests.support.fake_engine import FakeEngine, says, small_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
LONG_LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LONG_LOOP,
        "{% for i in range(100000) if i < 0 %}{% for j in range(100000) %}{% endfor %}{% endfor %}" + LONG_LOOP,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for m in messages recursive %}{{ loop([m, m]) }}{% endfor %}",
    ],
    ids=["loops", "loops with a condition", "macros", "recursion"],
)
def test_a_template_that_takes_long_is_ended(source: str) -> None:
    begin_s = time.monotonic()
    with pytest.raises(ChatTemplateError) as error:
        ChatTemplate(source, {}, limit_s=0.05).render(HELLO)
    assert time.monotonic() - begin_s < 30.0  # they would take hours
    if isinstance(error.value, SlowTemplateError):  # the last one may reach the depth that Python allows before
        assert str(error.value) == (
            "the model's chat template takes more than 0.05 s for these messages; send fewer or shorter ones"
        )


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 100000000 }}",
        "{{ [messages[0]] * 100000000 }}",
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set t %}{{ ns.t }}{{ ns.t }}{% endset %}"
        "{% set ns.t = t %}{% endfor %}{{ ns.t }}",
        "{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}",
    ],
    ids=["repeated", "repeated list", "joined", "added", "block", "output"],
)
def test_a_template_that_makes_much_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_facts, "MAX_CHARS", 100_000)
    with pytest.raises(ChatTemplateError, match="makes more than 100000 characters of these messages; send fewer"):
        ChatTemplate(source, {}).render(HELLO, limit_s=30.0)


def test_loops_know_where_they_are() -> None:
    """Templates ask for it, also of what has no length."""
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ' last' if loop.last }};{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.length }}{% else %}none{% endfor %}"
        "{% for x in messages | selectattr('role', 'equalto', 'tool') %}x{% else %}none{% endfor %}"
        "{% for x in missing %}x{% else %}none{% endfor %}{{ 'a' ~ 1 ~ 'b' }}{{ ['a'] + ['b'] }}"
        "{{ 'ab' * 2 }}{{ 2 * 3 }}"
    )
    found = ChatTemplate(source, {}).render(HELLO * 2)
    assert found == "1/2;2/2 last;a11nonenonea1b['a', 'b']abab6"


async def test_the_event_loop_goes_on_beside_a_slow_template() -> None:
    edge = ChatTokenizer(small_tokenizer(), ChatTemplate(LONG_LOOP, {}, limit_s=0.5), (1,))
    rendering = asyncio.ensure_future(edge.rendered(HELLO))
    turns = 0
    while not rendering.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert isinstance(rendering.exception(), SlowTemplateError)
    assert turns >= 3, "it is tried in the loop for 50 ms, and then in a thread"


async def test_a_slow_template_is_a_400_with_its_reason() -> None:
    tokenizer = ChatTokenizer(small_tokenizer(), ChatTemplate(LONG_LOOP, {}, limit_s=0.1), (1,))
    async with in_process(FakeEngine(says("x")), tokenizer) as client:
        reply = await client.post(CHAT, json={"model": MODEL, "messages": HELLO})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "chat_template_error", "messages")
    assert "takes more than 0.1 s" in error["message"]
