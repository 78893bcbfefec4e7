"""How each family of models writes answers, a row for each. Adding one: docs/add-a-parser.md."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.json_calls import Parsed, read_calls
from aerie.cluster.http.parsers.literal_calls import (
    GEMMA_END,
    GEMMA_QUOTE,
    PYTHON_END,
    PYTHON_START,
    read_gemma_call,
    read_python_calls,
)
from aerie.cluster.http.parsers.output_parser import CallIds, random_id
from aerie.cluster.http.parsers.source import Reading, Source
from aerie.cluster.http.parsers.tool_calls import (
    DEEPSEEK_HEAD,
    KIMI_HEAD,
    MISTRAL_MARK,
    PYTHON_TAG,
    ArgumentTypes,
    CallBody,
    MarkedCalls,
    named_call,
    read_llama3_calls,
    read_mistral_calls,
)
from aerie.cluster.http.parsers.xml_calls import GLM, MINIMAX, SEED, types_of_tools, xml_calls
from aerie.cluster.http.text import harmony_prompt

Types = Callable[[], Mapping[str, ArgumentTypes]]


@dataclass(frozen=True)
class CallSyntax:
    """Syntax of a model's tool calls, for a constraint on the answer.

    begin, end: text around the arguments of a call; "{name}" is replaced with the tool's name.
    separator: text between two calls.
    trigger: the start of every call.
    opening, closing: text around all calls.
    style: xgrammar's name for the syntax of the arguments.
    others: (trigger, begin) of other formats that a model may use unprompted.
    """

    begin: str
    end: str
    separator: str
    trigger: str
    opening: str = ""
    closing: str = ""
    style: str = "json"
    others: tuple[tuple[str, str], ...] = ()


_THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """A row of `FAMILIES`: models with the same format of reasoning and calls.

    shown_by: texts by which the family's chat template is recognised: it contains all of them. The template is more
        reliable than the architecture: DeepSeek's distillations of Llama and Qwen have DeepSeek's template.
    not_shown_by: a text that distinguishes another family whose template also has `shown_by`.
    thinking: opening and closing mark of reasoning.
    calls: marks of calls, each with a function that makes the reader of the text after it from the argument types of
        tools; None: the mark is dropped.
    reader: reads answers whose calls are not between marks.
    other_marks: marks besides those of `thinking` and `calls`. An answer's text contains all of these, even if they are
        special tokens, and no other special tokens. None: it contains all special tokens.
    calls_end_thinking: whether a call ends reasoning as soon as it begins, because its marks are tokens that reasoning
        does not have. Else reasoning may contain drafts of calls: a call ends it if only calls follow it.
    ids: function from the prompt to a source of ids for calls.
    syntax: format in which grammars force calls; None: calls cannot be forced.
    has_own_parser: whether `aerie.cluster.http.parsers.table` has a parser of its own for the family, which reads
        calls.
    """

    shown_by: tuple[str, ...] = ()
    not_shown_by: str | None = None
    thinking: tuple[str, str] | None = _THINK
    calls: Mapping[str, Callable[[Types], CallBody] | None] = field(default_factory=dict)
    reader: Callable[[Source, Parsed], Reading[None]] | None = None
    other_marks: tuple[str, ...] | None = ()
    calls_end_thinking: bool = False
    ids: Callable[[str], CallIds] = lambda prompt: random_id
    syntax: CallSyntax | None = None
    has_own_parser: bool = False

    @property
    def reads_calls(self) -> bool:
        """Whether tools can be used."""
        return bool(self.calls) or self.reader is not None or self.has_own_parser

    @property
    def marks(self) -> tuple[str, ...] | None:
        """All marks; None: all special tokens."""
        return None if self.other_marks is None else (*(self.thinking or ()), *self.calls, *self.other_marks)

    def marked_calls(self, tools: Sequence[Mapping[str, Any]]) -> MarkedCalls | None:
        """Return what reads calls after marks; None without marks. tools: in the chat template's form."""
        types = functools.cache(lambda: types_of_tools(tools))
        bodies = {mark: None if body is None else body(types) for mark, body in self.calls.items()}
        return MarkedCalls(bodies) if bodies else None


def _kimi_ids(prompt: str) -> CallIds:
    """Return Kimi-K2's ids: `functions.NAME:N`, where N counts the calls of the whole conversation."""
    num_before = prompt.count("<|tool_call_begin|>")
    return lambda name, number: f"functions.{name}:{num_before + number}"


_BAR = "<|tool_call|>"
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL = "<|tool_call_begin|>"
# Detection takes the first row whose `shown_by` fits the chat template.
FAMILIES: dict[OutputParserName, Family] = {
    "harmony": Family(
        shown_by=("<|channel|>", "<|message|>"),
        thinking=None,
        other_marks=harmony_prompt.MARKS,
        syntax=CallSyntax(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            "",  # the token that ends a call is an end-of-sequence token, which the constraint allows only at its end
            "<|start|>assistant",
            "<|channel|>commentary to=",
            others=(
                (
                    "<|start|>assistant to=",
                    "<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>",
                ),
            ),
        ),
        has_own_parser=True,
    ),
    "deepseek_v3": Family(  # V3 and R1 (with "function" and a fence around the arguments) and V3.1 (without)
        shown_by=(_DEEPSEEK_BEGIN,),
        calls_end_thinking=True,
        calls={
            _DEEPSEEK_BEGIN: None,
            _DEEPSEEK_CALL: lambda types: named_call(DEEPSEEK_HEAD, "<｜tool▁call▁end｜>", _DEEPSEEK_CALL),
            _DEEPSEEK_END: None,
        },
        other_marks=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        syntax=CallSyntax(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "\n",
            _DEEPSEEK_BEGIN,
            _DEEPSEEK_BEGIN,
            _DEEPSEEK_END,
        ),
    ),
    "kimi_k2": Family(  # <|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>
        shown_by=(_KIMI_BEGIN,),
        calls_end_thinking=True,
        calls={
            _KIMI_BEGIN: None,
            _KIMI_CALL: lambda types: named_call(KIMI_HEAD, "<|tool_call_end|>", _KIMI_CALL),
            _KIMI_END: None,
        },
        other_marks=("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ids=_kimi_ids,
        syntax=CallSyntax(
            "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "",
            _KIMI_BEGIN,
            _KIMI_BEGIN,
            _KIMI_END,
        ),
    ),
    "minimax_m2": Family(  # <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
        shown_by=("<minimax:tool_call>",),
        calls={"<minimax:tool_call>": lambda types: xml_calls(types(), MINIMAX), MINIMAX.call_end: None},
        syntax=CallSyntax(
            '<invoke name="{name}">\n',
            "</invoke>\n",
            "",
            "<minimax:tool_call>",
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
            style="minimax_xml",
        ),
    ),
    "seed_oss": Family(  # <seed:tool_call> and calls in Qwen3-Coder's format
        shown_by=("<seed:tool_call>",),
        thinking=("<seed:think>", "</seed:think>"),
        calls={"<seed:tool_call>": lambda types: xml_calls(types(), SEED), SEED.call_end: None},
        syntax=CallSyntax(
            "<seed:tool_call>\n<function={name}>\n",
            "</function>\n</seed:tool_call>",
            "\n",
            "<seed:tool_call>",
            style="qwen_xml",
        ),
    ),
    "gemma4": Family(  # <|tool_call>call:NAME{...}<tool_call|>
        shown_by=("<|tool_call>call:",),
        thinking=("<|channel>thought", "<channel|>"),
        calls_end_thinking=True,
        calls={"<|tool_call>": lambda types: read_gemma_call, GEMMA_END: None},
        other_marks=("<|channel>", GEMMA_QUOTE),
    ),
    "glm45": Family(  # <tool_call>NAME <arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
        shown_by=("<tool_call>", "<arg_key>"),
        calls={"<tool_call>": lambda types: xml_calls(types(), GLM), GLM.call_end: None},
        other_marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        syntax=CallSyntax("<tool_call>{name}\n", "</tool_call>", "\n", "<tool_call>", style="glm_xml"),
    ),
    "phi4_mini": Family(  # calls in JSON, in an array or not; so are Granite's
        shown_by=(_BAR, "<|/tool_call|>"),
        calls_end_thinking=True,
        calls={_BAR: lambda types: read_calls, "<|/tool_call|>": None},
        syntax=CallSyntax('{"name": "{name}", "arguments": ', "}", ", ", _BAR, f"{_BAR}[", "]<|/tool_call|>"),
    ),
    "granite": Family(
        shown_by=(_BAR, "<|start_of_role|>"),
        calls_end_thinking=True,
        calls={_BAR: lambda types: read_calls, "<response>": None, "</response>": None},
        syntax=CallSyntax('{"name": "{name}", "arguments": ', "}", ", ", _BAR, f"{_BAR}[", "]"),
    ),
    "mistral": Family(
        shown_by=("[TOOL_CALLS]",),
        thinking=("[THINK]", "[/THINK]"),
        calls_end_thinking=True,
        calls={MISTRAL_MARK: lambda types: read_mistral_calls},
        other_marks=("[ARGS]", "[CALL_ID]"),
        syntax=CallSyntax('{"name": "{name}", "arguments": ', "}", ", ", "[TOOL_CALLS]", "[TOOL_CALLS][", "]"),
    ),
    "pythonic": Family(
        shown_by=("[func_name1(params_name1",),
        reader=read_python_calls,
        other_marks=(PYTHON_START, PYTHON_END),
    ),
    "llama3": Family(
        shown_by=("<|start_header_id|>", "tools", "parameters"),
        reader=read_llama3_calls,
        other_marks=(PYTHON_TAG,),
        syntax=CallSyntax('{"name": "{name}", "parameters": ', "}", "; ", '{"name": '),
    ),
    "qwen3_coder": Family(  # XML (`aerie.cluster.http.parsers.xml_calls`): also Qwen3.5 and later
        shown_by=("<tool_call>", "<function=", "<parameter="),
        calls={
            "<tool_call>": lambda types: xml_calls(types()),
            "</tool_call>": None,
            "<function=": lambda types: xml_calls(types(), opened=True),
        },
        syntax=CallSyntax(
            "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", "\n", "<tool_call>", style="qwen_xml"
        ),
    ),
    "hermes": Family(  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>: also Qwen 2.5 and 3
        shown_by=("<tool_call>", "arguments"),
        not_shown_by="<function=",
        calls={"<tool_call>": lambda types: read_calls, "</tool_call>": None},
        syntax=CallSyntax('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n", "<tool_call>"),
    ),
    "think": Family(shown_by=("</think>",)),
    "text": Family(thinking=None),
    "response_template": Family(thinking=None, other_marks=None, has_own_parser=True),
}


def detect_family(template: str, has_response_template: bool) -> OutputParserName:
    """Return a model's family by its chat template, because models write turns like it. template: its source."""
    if has_response_template:
        return "response_template"
    for name, family in FAMILIES.items():
        is_other = family.not_shown_by is not None and family.not_shown_by in template
        if family.shown_by and all(text in template for text in family.shown_by) and not is_other:
            return name
    return "text"
