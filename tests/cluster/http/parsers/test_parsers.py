"""Every form of answer, cut at every place: streams add up to the whole, and nothing of the marks is shown."""

import functools
import json
from dataclasses import dataclass
from typing import Any

import pytest

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.families import FAMILIES, detect_family
from aerie.cluster.http.parsers.output_parser import joined_deltas
from aerie.cluster.http.parsers.table import parser_of
from tests.support.fake_engine import chat_tokenizer
from tests.support.slow import slow

DEEPSEEK_V3 = (
    "on it<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V3_1 = (
    "on it<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>"
    "{}<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
HERMES = (
    'on it\n<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>\n'
    '<tool_call>\n{{"arguments": {arguments}, "name": "{name}"}}\n</tool_call>'
)
HARMONY = (
    "<|channel|>analysis<|message|>so\n be it<|end|><|start|>assistant<|channel|>commentary<|message|>on it<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
    "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>{}"
)
XML = (
    "on it\n<tool_call>\n<function={}>\n<parameter=at>\n{at}\n</parameter>\n<parameter=b>\n{b}\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function={}>\n</function>\n</tool_call>"
)
GLM = (
    "on it\n<tool_call>{}\n<arg_key>at</arg_key>\n<arg_value>{at}</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>{b}</arg_value>\n</tool_call>\n<tool_call>{}\n</tool_call>"
)
MINIMAX = (
    'on it\n<minimax:tool_call>\n<invoke name="{}">\n<parameter name="at">{at}</parameter>\n'
    '<parameter name="b">{b}</parameter>\n</invoke>\n<invoke name="{}">\n</invoke>\n</minimax:tool_call>'
)
SEED = (
    "on it\n<seed:tool_call>\n<function={}>\n<parameter=at>{at}</parameter>\n<parameter=b>{b}</parameter>\n"
    "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function={}>\n</function>\n</seed:tool_call>"
)
KIMI = (
    "on it<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_call_begin|>functions.{}:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
_tokenizer = functools.cache(chat_tokenizer)
ARGUMENTS = '{"at": [1, {"x": "}]\\"\\\\"}], "b": "</tool_call"}'
CALLS = [("look_up", ARGUMENTS), ("stop.it-2", "{}")]
THOUGHT = "<think>\nso\n be it\n</think>\n\n"
FLAT = [part for call in CALLS for part in call]


@dataclass(frozen=True)
class Request:
    """The fields of an `EdgeRequest` that parsers read."""

    output_parser: OutputParserName
    separate_reasoning: bool = True
    reads_calls: bool = True
    parallel_calls: bool = True
    is_constrained: bool = False
    tools: tuple[Any, ...] = (
        {
            "type": "function",
            "function": {
                "name": "look_up",
                "parameters": {"type": "object", "properties": {"at": {"type": "array"}, "b": {"type": "string"}}},
            },
        },
    )


def _hermes() -> str:
    return HERMES.format(*CALLS[0], name=CALLS[1][0], arguments=CALLS[1][1])


def _xml(form: str = XML) -> str:
    values = json.loads(ARGUMENTS)
    return form.format(CALLS[0][0], CALLS[1][0], at=json.dumps(values["at"]), b=values["b"])


LISTED = json.dumps([{"name": name, "arguments": json.loads(arguments)} for name, arguments in CALLS])


FORMS: list[tuple[OutputParserName, str, str, str]] = [  # parser, answer, content, reasoning
    ("hermes", _hermes(), "on it", ""),
    ("hermes", THOUGHT + _hermes(), "on it", "so\n be it"),
    ("qwen3_coder", _xml(), "on it", ""),
    ("qwen3_coder", THOUGHT + _xml(), "on it", "so\n be it"),
    ("deepseek_v3", DEEPSEEK_V3.format(*FLAT), "on it", ""),
    ("deepseek_v3", THOUGHT + DEEPSEEK_V3_1.format(*FLAT), "on it", "so\n be it"),
    ("harmony", HARMONY.format(*FLAT), "on it", "so\n be it"),
    ("mistral", "on it[TOOL_CALLS]{}[ARGS]{}[TOOL_CALLS]{}{}".format(*FLAT), "on it", ""),
    (
        "mistral",
        "[THINK]so\n be it[/THINK]on it[TOOL_CALLS] "
        + json.dumps([{"name": name, "arguments": json.loads(arguments)} for name, arguments in CALLS]),
        "on it",
        "so\n be it",
    ),
    ("glm45", THOUGHT + _xml(GLM), "on it", "so\n be it"),
    ("glm45", _xml(GLM).replace("\n<arg", "<arg").replace("\n</tool", "</tool"), "on it", ""),
    ("minimax_m2", THOUGHT + _xml(MINIMAX), "on it", "so\n be it"),
    ("seed_oss", THOUGHT.replace("think", "seed:think") + _xml(SEED), "on it", "so\n be it"),
    ("kimi_k2", THOUGHT + KIMI.format(*FLAT), "on it", "so\n be it"),
    ("granite", f"{THOUGHT}<response>on it<|tool_call|>{LISTED}</response>", "on it", "so\n be it"),
    ("phi4_mini", f"on it<|tool_call|>{LISTED}<|/tool_call|>", "on it", ""),
    ("llama3", "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in CALLS), "", ""),
    (
        "llama3",
        f'<|python_tag|>{{"type": "function", "name": "look_up", "parameters": {ARGUMENTS}}}\n{{"name": "stop.it-2"}}',
        "",
        "",
    ),
]

MARKED = [name for name, family in FAMILIES.items() if family.thinking is not None]


def _parse(
    name: OutputParserName, pieces: list[str], finish: Any = "stop", prompt: str = "", **request: Any
) -> tuple[Any, Any, list[Any]]:
    parser = parser_of(Request(name, **request), prompt, _tokenizer())  # type: ignore[arg-type]
    deltas = [parser.push(Piece(text, (0,))) for text in pieces[:-1]]
    deltas.append(parser.push(Piece(pieces[-1], (0,), finish=finish)))
    whole, calls = joined_deltas(deltas)
    assert len({call.id for call in calls}) == len(calls)
    return whole, [(call.function.name, call.function.arguments) for call in calls], deltas


@pytest.mark.parametrize("step", [7, *slow(1)])
@pytest.mark.parametrize(("name", "answer", "content", "reasoning"), FORMS)
def test_every_form_cut_at_every_place(
    name: OutputParserName, answer: str, content: str, reasoning: str, step: int
) -> None:
    """Each form at other places than those of the form before it; slow: at every place."""
    for at in range(FORMS.index((name, answer, content, reasoning)) % step, len(answer) + 1, step):
        whole, calls, _ = _parse(name, [answer[:at], answer[at:]])
        assert (whole.content, whole.reasoning, whole.finish) == (content, reasoning, "tool_calls"), at
        assert [(n, json.loads(a)) for n, a in calls] == [(n, json.loads(a)) for n, a in CALLS], at


@pytest.mark.parametrize(("name", "answer", "content", "reasoning"), FORMS)
def test_characters_one_by_one_and_cut_short(name: OutputParserName, answer: str, content: str, reasoning: str) -> None:
    whole, calls, deltas = _parse(name, [*answer, ""])
    assert (whole.content, whole.reasoning, len(calls)) == (content, reasoning, 2)
    arguments = [part for delta in deltas for part in delta.tool_calls]
    assert len(arguments) >= 6, "arguments come as they are written, or value by value"
    for end in range(0, len(answer), 7):
        cut_short, found, _ = _parse(name, [*answer[:end], ""], "length")
        assert cut_short.finish == "length"
        # A mark that is cut itself cannot be known for one.
        assert cut_short.reasoning.partition("\n</")[0] in reasoning or reasoning in cut_short.reasoning
        assert len(found) <= 2
        for (found_name, found_arguments), (call_name, _) in zip(found, CALLS, strict=False):
            assert found_name == call_name and isinstance(found_arguments, str)


@pytest.mark.parametrize("step", [3, *slow(1)])
@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize(
    "text",
    ["plain", " two \n\n lines ", "a < b", "<tool", "<function=", "{", '{"a": 1}', '{"name": 5}', "[1]", "<thin", ""],
)
def test_text_without_calls_is_content_as_it_is(name: OutputParserName, text: str, step: int) -> None:
    """Each form cuts the text at other places than the form before it; slow: at every place."""
    for at in range(min(MARKED.index(name) % step, len(text)), len(text) + 1, step):
        whole, calls, _ = _parse(name, [text[:at], text[at:]])
        assert (whole.content, calls, whole.finish) == (text, [], "stop"), at


def test_what_is_no_call_after_all_is_content() -> None:
    whole, calls, _ = _parse("hermes", ["<tool_call>", '{"nam', 'e": 5}</tool_call>'])
    assert whole.content == '<tool_call>{"name": 5}</tool_call>' and not calls
    whole, calls, _ = _parse("hermes", ["<tool_call>", "not JSON"])
    assert whole.content == "<tool_call>not JSON" and not calls


def test_thinking_begins_in_the_prompt() -> None:
    whole, _, _ = _parse("hermes", ["so ", "be it</think>", "\n\nyes"], prompt="user: hi\nassistant: <think>\n")
    assert (whole.reasoning, whole.content) == ("so be it", "yes")
    whole, _, _ = _parse("hermes", ["so be it"], "length", prompt="<think>")
    assert (whole.reasoning, whole.content) == ("so be it", "")
    whole, _, _ = _parse("hermes", ["so be it"], prompt="<think>\n\n</think>\n\n")
    assert (whole.reasoning, whole.content) == ("", "so be it")


def test_without_tools_calls_are_text() -> None:
    whole, calls, _ = _parse("hermes", [_hermes()], reads_calls=False)
    assert (whole.content, calls, whole.finish) == (_hermes(), [], "stop")
    whole, calls, _ = _parse("harmony", [HARMONY.format(*FLAT)], reads_calls=False)
    assert (whole.content, calls, whole.finish) == (f"on it{ARGUMENTS}{{}}", [], "stop")


@pytest.mark.parametrize(("name", "answer", "content", "reasoning"), FORMS)
def test_one_call_at_most_where_calls_are_not_parallel(
    name: OutputParserName, answer: str, content: str, reasoning: str
) -> None:
    _, calls, _ = _parse(name, [answer], parallel_calls=False)
    assert calls == [(CALLS[0][0], json.dumps(json.loads(ARGUMENTS)))]


def test_harmony_without_heads_is_content() -> None:
    whole, _, _ = _parse("harmony", ['{"a":', " 1}"])
    assert whole.content == '{"a": 1}'
    whole, _, _ = _parse("harmony", ["<|channel|>final<|message|>yes"])
    assert (whole.content, whole.finish) == ("yes", "stop")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", "text"),
        ("", "text"),
        ("{{ '<|channel|>' }}{{ '<|message|>' }}<tool_call>", "harmony"),
        ("<think> <｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("[TOOL_CALLS]", "mistral"),
        ('<|start_header_id|> {% if tools %} "parameters"', "llama3"),
        ("<|start_header_id|>", "text"),
        ('<tool_call> "arguments" </think>', "hermes"),
        ('<tool_call> "arguments" <function= <parameter= <think> enable_thinking', "qwen3_coder"),
        ('<tool_call> "arguments" <function=', "text"),
        ('<tool_call> "arguments" <arg_key> </think>', "glm45"),
        ("<|tool_calls_section_begin|> <think>", "kimi_k2"),
        ("<minimax:tool_call> <invoke name=", "minimax_m2"),
        ("<seed:think> <seed:tool_call> <function= <parameter=", "seed_oss"),
        ("'<|tool_call>call:' <|channel>thought", "gemma4"),
        ("<|start_of_role|> <|tool_call|> <tool_call>", "granite"),
        ("<|tool_call|> <|/tool_call|>", "phi4_mini"),
        ("<|start_header_id|> tools parameters [func_name1(params_name1=params_value1)]", "pythonic"),
    ],
)
def test_the_template_tells_the_parser(template: str, name: str) -> None:
    assert detect_family(template, False) == name
    assert detect_family(template, True) == "response_template"
