"""Forced calls and forms of answer in chats, as xgrammar understands them: what is allowed, what is not, and that the
parser of the same form reads what is allowed."""

import functools
import json
from typing import Any

import pytest
import xgrammar

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.table import parser_of
from aerie.cluster.http.text.chat_template import ChatTemplate
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.compiler import MAX_WHITESPACE, compiled
from tests.cluster.http.parsers.test_parsers import Request
from tests.cluster.http.parsers.test_tools import TIME, WEATHER
from tests.support.edge_client import CHAT, HELLO, in_process
from tests.support.fake_engine import EOS, FakeEngine, chat_tokenizer, says, small_tokenizer

BERN = '{"place": "Bern"}'
# How one call and a second one are written, in the form of each parser.
ONE: dict[OutputParserName, tuple[str, str]] = {
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {BERN}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    ),
    "llama3": (f'{{"name": "weather", "parameters": {BERN}}}', '; {"name": "time", "parameters": {}}'),
    "mistral": (f'[TOOL_CALLS][{{"name": "weather", "arguments": {BERN}}}', ', {"name": "time", "arguments": {}}'),
    "deepseek_v3": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{BERN}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=place>\nBern\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{BERN}<|tool_call_end|>",
        "<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    "glm45": (
        "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>",
        "\n<tool_call>time\n</tool_call>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="place">Bern</parameter>\n</invoke>\n',
        '<invoke name="time">\n</invoke>\n',
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=weather>\n<parameter=place>Bern</parameter>\n</function>\n</seed:tool_call>",
        "\n<seed:tool_call>\n<function=time>\n</function>\n</seed:tool_call>",
    ),
    "granite": (f'<|tool_call|>[{{"name": "weather", "arguments": {BERN}}}', ', {"name": "time", "arguments": {}}'),
    "phi4_mini": (f'<|tool_call|>[{{"name": "weather", "arguments": {BERN}}}', ', {"name": "time", "arguments": {}}'),
    "harmony": (
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{BERN}",
        "<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}",
    ),
}
CLOSING = {
    "mistral": "]",
    "granite": "]",
    "phi4_mini": "]<|/tool_call|>",
    "deepseek_v3": "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_end|>",
    "minimax_m2": "</minimax:tool_call>",
}
PLAIN = "{{ tools }}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
AS_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}


@functools.cache
def _compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo([*(bytes([i]) for i in range(256)), b"</s>"], stop_token_ids=[256])
    )


def _allows(grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole answer."""
    assert grammar.kind == "structural_tag"
    matcher = xgrammar.GrammarMatcher(compiled(_compiler(), grammar))
    return matcher.accept_string(text) and matcher.accept_token(256)


async def _grammar(parser: OutputParserName, template: str = PLAIN, **extra: Any) -> Grammar | None:
    engine = FakeEngine(says("x"))
    tokenizer = small_tokenizer()
    end = tokenizer.token_to_id(EOS)
    chat = ChatTokenizer(tokenizer, ChatTemplate(template, {}), (end,))
    async with in_process(engine, chat, output_parser=parser, max_model_len=4096) as client:
        reply = await client.post(CHAT, json=HELLO | {"tools": [WEATHER, TIME]} | extra)
    assert reply.status_code == 200, reply.text
    grammar = engine.calls[0].sampling.grammar
    assert grammar is None or grammar.end_token_ids == (end,)
    return grammar


@pytest.mark.parametrize("parser", ONE)
async def test_required_calls_are_in_the_models_form(parser: OutputParserName) -> None:
    first, second = ONE[parser]
    close = CLOSING.get(parser, "")
    grammar = await _grammar(parser, tool_choice="required")
    assert grammar is not None
    assert _allows(grammar, first + close) and _allows(grammar, first + second + close)
    for wrong in ("", "no", first[:-1], first.replace("weather", "other"), first.replace("place", "plate")):
        assert not _allows(grammar, wrong + close), wrong
    single = await _grammar(parser, tool_choice="required", parallel_tool_calls=False)
    assert single is not None
    assert _allows(single, first + close) and not _allows(single, first + second + close)
    delta = parser_of(Request(parser), "", chat_tokenizer()).push(  # type: ignore[arg-type]
        Piece(first + second + close, (), finish="stop")
    )
    assert [call.function.name for call in delta.tool_calls if call.id] == ["weather", "time"]
    assert delta.content == ""


@pytest.mark.parametrize("parser", ONE)
async def test_a_named_tool_is_the_only_one(parser: OutputParserName) -> None:
    first, second = ONE[parser]
    close = CLOSING.get(parser, "")
    grammar = await _grammar(parser, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert grammar is not None
    assert _allows(grammar, first + close) and not _allows(grammar, first + second + close)


@pytest.mark.parametrize("parser", ONE)
async def test_strict_tools_are_constrained_where_they_are_called(parser: OutputParserName) -> None:
    assert await _grammar(parser) is None
    first, _ = ONE[parser]
    close = CLOSING.get(parser, "")
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    grammar = await _grammar(parser, tools=[strict])
    assert grammar is not None
    for allowed in ("I cannot", first + close, "so: " + first + close):
        assert _allows(grammar, allowed), allowed
    assert not _allows(grammar, first.replace("place", "plate") + close)


async def test_mistrals_later_templates_have_a_mark_for_each_call() -> None:
    first, second = f"[TOOL_CALLS]weather[ARGS]{BERN}", "[TOOL_CALLS]time[ARGS]{}"
    grammar = await _grammar("mistral", "{{ tools }}[TOOL_CALLS][ARGS]", tool_choice="required")
    assert grammar is not None
    assert _allows(grammar, first) and _allows(grammar, first + second) and not _allows(grammar, f"[{first}]")


async def test_strict_calls_of_gpt_oss_are_constrained_on_either_side_of_the_channel() -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    grammar = await _grammar("harmony", tools=[strict])
    assert grammar is not None
    head = "<|channel|>analysis<|message|>so to=functions.weather<|end|><|start|>assistant"
    call = head + " to=functions.weather<|channel|>commentary json<|message|>"
    assert _allows(grammar, call + BERN) and not _allows(grammar, call + BERN.replace("place", "plate"))


async def test_thinking_may_come_first_where_the_model_thinks() -> None:
    first, _ = ONE["hermes"]
    begun = await _grammar("hermes", "{{ tools }}<think>\n", tool_choice="required")
    assert begun is not None
    assert _allows(begun, "so be it</think>\n\n" + first) and not _allows(begun, first)
    knows = await _grammar("hermes", "{{ tools }}{% if false %}<think>{% endif %}", tool_choice="required")
    assert knows is not None
    assert _allows(knows, "<think>so</think>" + first) and _allows(knows, first)
    off = await _grammar("hermes", "{{ tools }}<think></think>", tool_choice="required")
    assert off is not None
    assert _allows(off, first) and not _allows(off, "<think>so</think>" + first)


async def test_a_form_of_answer_is_the_contents() -> None:
    plain = await _grammar("hermes", tools=[], **AS_JSON)
    assert plain is not None and plain.kind == "json_schema"
    thinks = await _grammar("hermes", "<think>\n", tools=[], **AS_JSON)
    assert thinks is not None
    assert _allows(thinks, 'so</think>\n\n{"a": 1}') and not _allows(thinks, '{"a": 1}')
    harmony = await _grammar("harmony", tools=[], **AS_JSON)
    assert harmony is not None
    assert _allows(harmony, '<|channel|>final<|message|>{"a": 1}') and not _allows(harmony, '{"a": 1}')


async def test_an_answer_is_calls_or_the_form_that_is_asked_for() -> None:
    grammar = await _grammar("hermes", **AS_JSON)
    assert grammar is not None
    assert _allows(grammar, '{"a": 1}') and _allows(grammar, ONE["hermes"][0])
    assert not _allows(grammar, "no") and not _allows(grammar, '{"a": 1}' + ONE["hermes"][0])


@pytest.mark.parametrize("extra", [{"tools": []}, {}])
async def test_whitespace_is_bounded_as_where_nothing_may_come_first(extra: dict[str, Any]) -> None:
    """Else a model that likes spaces writes them until its tokens are used up."""
    grammar = await _grammar("hermes", "{{ tools }}<think>\n", **AS_JSON, **extra)
    assert grammar is not None
    assert _allows(grammar, 'so</think>{"a":' + " " * MAX_WHITESPACE + "1}")
    assert not _allows(grammar, 'so</think>{"a":' + " " * (MAX_WHITESPACE + 1) + "1}")


@pytest.mark.parametrize("extra", [{"tools": []}, {}])
async def test_whitespace_can_be_forbidden_where_something_may_come_first(extra: dict[str, Any]) -> None:
    asked = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    grammar = await _grammar("hermes", "{{ tools }}<think>\n", **asked, **extra)
    assert grammar is not None
    assert _allows(grammar, 'so</think>{"a": 1}')
    assert not _allows(grammar, 'so</think>{"a":1}') and not _allows(grammar, 'so</think>{"a":  1}')


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        ({"tool_choice": "required", "ignore_eos": True}, "tools"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "array", "uniqueItems": True}},
                    }
                ],
            },
            "tools",
        ),
    ],
)
async def test_what_cannot_be_forced_is_refused(extra: dict[str, Any], param: str) -> None:
    chat = ChatTokenizer(small_tokenizer(), ChatTemplate(PLAIN, {}), (1,))
    async with in_process(FakeEngine(says("x")), chat, output_parser="hermes", max_model_len=4096) as client:
        reply = await client.post(CHAT, json=HELLO | {"tools": [WEATHER]} | extra)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param, json.dumps(reply.json())
