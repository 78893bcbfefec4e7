"""Calls as models really write them, which is not always as their templates do: each kind was reported of a published
model, and is read alike in any pieces. Arguments that a client receives are JSON objects."""

import functools
import json
from typing import Any

import pytest

from aerie.cluster.http.answer import EndReason, Piece
from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.output_parser import joined_deltas
from aerie.cluster.http.parsers.table import parser_of
from tests.cluster.http.parsers.test_parsers import Request
from tests.cluster.http.parsers.test_tools import WITH_TOOLS, in_process, tool_tokenizer
from tests.support.edge_client import CHAT
from tests.support.fake_engine import FakeEngine, chat_tokenizer, says

_tokenizer = functools.cache(chat_tokenizer)
Read = tuple[str, str, list[tuple[str, Any]], str]
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (
        ("f", {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "l": {"type": "array"}}),
        ("g", {}),
    )
)


def read(
    name: OutputParserName,
    text: str,
    finish: EndReason = "stop",
    prompt: str = "",
    continued: str = "",
    size: int | None = None,
) -> Read:
    """Content, reasoning, calls and finish reason. size: characters of a piece; None: all."""
    parser = parser_of(Request(name, tools=TOOLS), prompt, _tokenizer(), continued)  # type: ignore[arg-type]
    size = size or len(text) or 1
    deltas = [parser.push(Piece(text[at : at + size], (0,))) for at in range(0, len(text), size)]
    whole, calls = joined_deltas([*deltas, parser.push(Piece("", (0,), finish=finish))])
    arguments = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    assert all(isinstance(each, dict) for _, each in arguments)
    assert whole.finish is not None
    return whole.content, whole.reasoning, arguments, whole.finish


def read_alike(
    name: OutputParserName, text: str, finish: EndReason = "stop", prompt: str = "", continued: str = ""
) -> Read:
    """The same in any pieces."""
    whole = read(name, text, finish, prompt, continued)
    for size in (1, 2, 3, 7):
        assert read(name, text, finish, prompt, continued, size) == whole, size
    return whole


F, G = ("f", {"s": "x"}), ("g", {})


@pytest.mark.parametrize(
    ("inner", "calls"),
    [
        ('{"name": "f", "arguments": {"s": "x"}, "why": {"a": [1, "}"]}, "n": 1.5, "b": null}', [F]),
        ('{"name": "f", "description": "Does it.", "parameters": {"s": "x"}}', [F]),
        ('{"name": "f", "arguments": "{\\"s\\": \\"x\\"}"}', [F]),
        ('{"name": "f", "arguments": "{\\n  \\"s\\": \\"\\u0078\\"}\\n"}', [F]),
        ('{"arguments": "{\\"s\\": \\"x\\"}", "name": "f"}', [F]),
        ('{"name": "f", "arguments": {"s": "x"}', [F]),
        ('{"name": "f", "arguments": "{\\"s\\": \\"x\\""}', [F]),
        ('{"name": "f", "arguments": {"s": "x"', [F]),
        ('{"name": "f", "arguments": {"s": "x"}}}', [F]),
        ('[{"name": "f", "arguments": {"s": "x"}}, {"name": "g", "arguments": {}}]', [F, G]),
        ('{"name": "f", "arguments": {"s": "x"}}\n{"name": "g", "arguments": {}}', [F, G]),
        ('{"name": "f", "arguments": {"s": "x"}}, {"name": "g"}', [F, G]),
        ('{"name": "g", "arguments": null}', [G]),
        ('{"name": "g", "arguments": ""}', [G]),
        ('{"name": "g", "arguments": "null"}', [G]),
        ('{"name": "g"}', [G]),
        ('{"name": "g"', [G]),
        ('{"name": "f", "arguments": {"s": "a\nb\tc\x00"}}', [("f", {"s": "a\nb\tc\x00"})]),
        ('{"name": "f", "arguments": {"s": "\\d \\x \\\' \\u12"}}', [("f", {"s": "\\d \\x ' \\u12"})]),
        ('{"name": "f", "arguments": {"s": "\\ud83d\\ude00 \\ud83d \\ude00"}}',
         [("f", {"s": "\U0001f600 \ufffd \ufffd"})]),
        ("{'name': 'f', 'arguments': {'s': 'a \"b\" \\'c\\'', 'o': {'t': True, 'n': None}}}",
         [("f", {"s": "a \"b\" 'c'", "o": {"t": True, "n": None}})]),
        ('{"name": "f", "arguments": {s: x, "n": NaN, "l": [1, 01, -2e3, 1e999,], "o": }}',
         [("f", {"s": "x", "n": "NaN", "l": [1, "01", -2000.0, "1e999"], "o": None})]),
        ('{"name": "f", "arguments": {"s": "x" "n": 1,, "l": [1}}', [("f", {"s": "x", "n": 1, "l": [1]})]),
        ('{"type": "function", "function": {"name": "f", "arguments": {"s": "x"}}}', [F]),
        ('{"type": "function", "function": "f", "parameters": {"s": "x"}}', [F]),
        ('{"name": "f", "arguments": {"s": "</tool_call>"}}', [("f", {"s": "</tool_call>"})]),
        ('{"name": "f", "arguments": {"s": "x"}, "arguments": {"s": "y"}}', [F]),
        ('{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}", [("f", {"n": "9" * 5000})]),
        ('{"name": "f", "arguments": {"l": ' + "[" * 199 + "]" * 199 + "}}", None),
    ],
)  # fmt: skip
def test_json_is_read_as_models_write_it(inner: str, calls: list[Any] | None) -> None:
    text = f'Ok <tool_call>\n{inner}\n</tool_call>\n\nSo.\n<tool_call>\n{{"name": "g"}}\n</tool_call>'
    content, _, found, finish = read_alike("hermes", text)
    assert (content, finish) == ("Ok\n\nSo.", "tool_calls")
    assert found == [*calls, G] if calls is not None else len(found) == 2


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "not JSON",
        "{}",
        "[]",
        "[1]",
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f g", "arguments": {}}',
        '{"arguments": {"s": "x"}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": 5}',
        '{"name": "f", "arguments": }',
        '{"name": "Bern", "inhabitants": 5}',
        '{"s" "x"}',
    ],
)
def test_what_is_no_call_is_content_with_its_marks(inner: str) -> None:
    text = f"<tool_call>{inner}</tool_call>"
    assert read_alike("hermes", text) == (text, "", [], "stop")
    text += '<tool_call>{"name": "g"}</tool_call>'
    assert read_alike("hermes", text) == (text[: -len('<tool_call>{"name": "g"}</tool_call>')], "", [G], "tool_calls")


CUT: list[tuple[OutputParserName, str, Any]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "x', {"s": "x"}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "x\\', {"s": "x"}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "x\\u00', {"s": "x"}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "x", "n', {"s": "x"}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "x", "n": 12', {"s": "x"}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"l": [1, {"a": [2', {"l": [1, {"a": []}]}),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"s\\": \\"x', {"s": "x"}),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"s": "x', {"s": "x"}),
    ("phi4_mini", '<|tool_call|>[{"name": "f", "arguments": {"s": "x', {"s": "x"}),
    ("llama3", '{"name": "f", "parameters": {"s": "x', {"s": "x"}),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "x', {"s": "x"}),
    ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "x', {"s": "x"}),
    ("deepseek_v3", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x', {"s": "x"}),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>\nx", {"s": "x"}),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>\nx\n</parameter><parameter=n>\n12", {"s": "x"}),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>\nx\n</parameter><param", {"s": "x"}),
    ("seed_oss", "<seed:tool_call><function=f><parameter=s>x", {"s": "x"}),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="s">x', {"s": "x"}),
    ("glm45", "<tool_call>f\n<arg_key>s</arg_key><arg_value>x", {"s": "x"}),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"s": "x', {"s": "x"}),
]


@pytest.mark.parametrize(("name", "text", "arguments"), CUT)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_answer_that_ends_in_arguments_closes_them_and_says_so(
    name: OutputParserName, text: str, arguments: Any, finish: EndReason
) -> None:
    assert read_alike(name, text, finish) == ("", "", [("f", arguments)], finish)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "argu'),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0"),
        ("qwen3_coder", "<tool_call><function=f"),
        ("gemma4", "<|tool_call>call:f{s:"),
        ("pythonic", "[f(s='x'"),
    ],
)
def test_a_call_that_has_not_begun_is_content(name: OutputParserName, text: str) -> None:
    assert read_alike(name, text, "length") == (text, "", [], "length")


CALLS: list[tuple[OutputParserName, str]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>'),
    ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x</parameter>\n</invoke>\n'
     "</minimax:tool_call>"),
    ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=s>x</parameter>\n</function>\n</seed:tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
     '{"s": "x"}<|tool_call_end|><|tool_calls_section_end|>'),
    ("deepseek_v3", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x"}'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"s": "x"}}]'),
    ("phi4_mini", '<|tool_call|>[{"name": "f", "arguments": {"s": "x"}}]<|/tool_call|>'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "x"}'),
    ("gemma4", '<|tool_call>call:f{s:<|"|>x<|"|>}<tool_call|>'),
]  # fmt: skip
MARKS: dict[str, tuple[str, str]] = {
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought", "<channel|>"),
}


def _value_of(call: str) -> int:
    """The place of the argument `x`."""
    return call.replace("minimax", "minima-").index("x")


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_a_call_ends_reasoning_that_was_not_closed(name: OutputParserName, call: str) -> None:
    opens, closes = MARKS.get(name, ("<think>", "</think>"))
    assert read_alike(name, f"{opens}\nhm\n{call}") == ("", "hm", [F], "tool_calls")
    assert read_alike(name, f"hm\n{call}{call}", prompt=opens) == ("", "hm", [F, F], "tool_calls")
    assert read_alike(name, f"{opens}hm{closes}{call}") == ("", "hm", [F], "tool_calls")
    mark = call[: call.index(">") + 1] if ">" in call else "[TOOL_CALLS]"
    mentioned = f"{opens}the mark {mark} is one{closes}yes"
    assert read_alike(name, mentioned) == ("yes", f"the mark {mark} is one", [], "stop")
    cut_short = read_alike(name, f"{opens}hm {call[: _value_of(call) + 1]}", "length")
    assert cut_short[2:] == ([F], "length") or name == "gemma4"


@pytest.mark.parametrize("name", ["hermes", "glm45", "minimax_m2", "seed_oss", "qwen3_coder"])
def test_a_draft_of_a_call_is_reasoning(name: OutputParserName) -> None:
    call = dict(CALLS)[name]
    opens, closes = MARKS.get(name, ("<think>", "</think>"))
    draft = f"like {call}\n. So:"
    assert read_alike(name, f"{opens}{draft}{closes}{call}") == ("", draft, [F], "tool_calls")
    draft = f"like {call[: _value_of(call)]}..."
    assert read_alike(name, f"{opens}{draft}{closes}\n\nyes") == ("yes", draft, [], "stop")


@pytest.mark.parametrize("name", ["hermes", "think", "deepseek_v3", "kimi_k2", "qwen3_coder"])
def test_reasoning_that_the_client_began_is_carried_on(name: OutputParserName) -> None:
    begun = "<think>\nTwo and two"
    prompt = f"user: what is <think>?\nassistant: {begun}"
    answer = " is 4.\n</think>\n\nFour."
    assert read_alike(name, answer, "stop", prompt, begun) == ("Four.", " is 4.", [], "stop")
    closed = f"{begun}</think>The"
    assert read_alike(name, " rest", "stop", f"user: what is <think>?\nassistant: {closed}", closed)[0] == " rest"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("{'a': True, 'b': None}", {"a": True, "b": None}),
        ("['x', 'y']", ["x", "y"]),
        ("[1, (2, -3.5)]", [1, [2, -3.5]]),
        ("{\"a\": \"it's\", 'b': '\"'}", {"a": "it's", "b": '"'}),
        ("{'a': '\\d'}", {"a": "\\d"}),
        ("{'a': f(1)}", "{'a': f(1)}"),
        ("{1: 2}", "{1: 2}"),
        ("{1, 2}", "{1, 2}"),
        ("[x for x in y]", "[x for x in y]"),
        ("[" * 300 + "]" * 300, "[" * 300 + "]" * 300),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
def test_xml_reads_pythons_objects_and_lists(name: OutputParserName, written: str, value: Any) -> None:
    form = dict(CALLS)[name].replace("x<", f"{written}<").replace("\nx\n", f"\n{written}\n")
    form = form.replace("=s>", "=u>").replace('"s"', '"u"').replace(">s<", ">u<")
    assert read_alike(name, form)[2] == [("f", {"u": value})]


@pytest.mark.parametrize("text", ["[f(x) for x in y]", "[f(s='x') for x in y]", "[f(**x)]", "[f(s=1)(2)]"])
def test_an_expression_of_python_is_content(text: str) -> None:
    content, _, calls, finish = read_alike("pythonic", text)
    assert (content, calls, finish) == (text, [], "stop")


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("kimi_k2", "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|><|tool_call_end|>", [G]),
        ("kimi_k2", '<|tool_call_begin|>f:0 <|tool_call_argument_begin|> {"s": "x"<|tool_call_end|>', [F]),
        ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "x"\n```\n<｜tool▁call▁end｜>',
         [F]),
        ("mistral", '[TOOL_CALLS]f{"s": "x"}[TOOL_CALLS]g{}', [F, G]),
        ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": "{\\"s\\": \\"x\\"}"}', [F]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"s": "x"', [F]),
        ("llama3", '<|python_tag|>[{"name": "f", "parameters": {"s": "x"}}]', [F]),
        ("llama3", '{"name": "f", "parameters": {"s": "x"}};{"name": "g", "parameters": null}', [F, G]),
        ("granite", '<|tool_call|>{"name": "f", "arguments": {"s": "x"}}{"name": "g"}', [F, G]),
        ("gemma4", '<|tool_call>call:f{"s":"x", }<tool_call|>', [F]),
        ("gemma4", "<|tool_call>call:f{o:{t:True,n:None}}", [("f", {"o": {"t": True, "n": None}})]),
        ("qwen3_coder", "<tool_call><function=f><parameter=s>\nx\n</parameter>\n<function=g>\n</tool_call>", [F, G]),
        ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value><tool_call>g</tool_call>", [F, G]),
    ],
)  # fmt: skip
def test_other_forms_are_read_as_models_write_them(name: OutputParserName, text: str, calls: list[Any]) -> None:
    content, _, found, finish = read_alike(name, text + (" So." if name == "kimi_k2" else ""))
    assert found == calls and (content.strip(), finish) in (("", "tool_calls"), ("So.", "tool_calls"), ("", "stop"))


def test_text_in_place_of_a_functions_arguments_is_content() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>hello<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert read_alike("harmony", text) == ("helloyes", "", [], "stop")


def test_a_second_call_that_is_cut_but_not_shown_changes_nothing() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {"s": "x'
    parser = parser_of(Request("hermes", parallel_calls=False), "", _tokenizer())  # type: ignore[arg-type]
    delta = parser.push(Piece(text, (0,), finish="stop"))
    assert (len(delta.tool_calls), delta.finish) == (1, "tool_calls")
    assert read_alike("hermes", text)[2:] == ([("f", {}), F], "stop")


def test_long_arguments_are_streamed_while_they_are_written() -> None:
    """Each of the 1,000 characters of a string is sent with its piece."""
    for name, text in CALLS:
        if name == "gemma4":
            continue
        parser = parser_of(Request(name, tools=TOOLS), "", _tokenizer())  # type: ignore[arg-type]
        parser.push(Piece(text[: _value_of(text)], (0,)))
        for _ in range(1000):
            (part,) = parser.push(Piece("x", (0,))).tool_calls
            assert part.function.arguments and part.function.arguments.endswith("x"), name


@pytest.mark.parametrize("forced", [False, True])
async def test_reasoning_of_the_final_message_is_carried_on(forced: bool) -> None:
    """The user's text has the opening mark too, and begins no reasoning."""
    messages = [
        {"role": "user", "content": "what is <think>?"},
        {"role": "assistant", "content": "<think>\nTwo and two"},
    ]
    body = WITH_TOOLS | {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    engine = FakeEngine(says(" is 4.\n</think>\n\nFour."))
    async with in_process(engine, tool_tokenizer()) as client:
        (choice,) = (await client.post(CHAT, json=body)).json()["choices"]
        closed = [messages[0], {"role": "assistant", "content": "<think>\nx</think>So it"}]
        (after,) = (await client.post(CHAT, json=body | {"messages": closed})).json()["choices"]
        if forced:
            await client.post(CHAT, json=body | {"tool_choice": "required"})
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (" is 4.", "Four.")
    assert after["message"]["content"] == " is 4.\n</think>\n\nFour."
    if forced:
        grammar = engine.calls[-1].sampling.grammar
        assert grammar is not None
        reasoning = json.loads(grammar.text)["format"]["elements"][0]
        assert (reasoning["begin"], reasoning["end"]) == ("", "</think>")
