"""Constrains answers by tools and tool_choice, with xgrammar's structural tags in the model's own format of calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.http.config import OutputParserName
from cluster.http.parsers.marks import THINKING_MARKS
from cluster.http.schema.message import NO_PARAMETERS, Tool
from workers.scheduling.plan import Grammar

MAX_WHITESPACE = 8  # consecutive characters between parts of arguments: a model could write them forever


@dataclass(frozen=True)
class CallSyntax:
    """Syntax of a model's tool calls.

    begin, end: text around the arguments of a call; "{name}" is replaced with the tool's name.
    separator: text between two calls.
    opening, closing: text around all calls.
    trigger: the start of every call.
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


_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
SYNTAX: dict[OutputParserName, CallSyntax] = {
    "hermes": CallSyntax('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n", "<tool_call>"),
    "llama3": CallSyntax('{"name": "{name}", "parameters": ', "}", "; ", '{"name": '),
    "mistral": CallSyntax(
        '{"name": "{name}", "arguments": ', "}", ", ", "[TOOL_CALLS]", opening="[TOOL_CALLS][", closing="]"
    ),
    "deepseek_v3": CallSyntax(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        _DEEPSEEK_BEGIN,
        _DEEPSEEK_BEGIN,
        _DEEPSEEK_END,
    ),
    "qwen3_coder": CallSyntax(
        "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", "\n", "<tool_call>", style="qwen_xml"
    ),
    "kimi_k2": CallSyntax(
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "glm45": CallSyntax("<tool_call>{name}\n", "</tool_call>", "\n", "<tool_call>", style="glm_xml"),
    "minimax_m2": CallSyntax(
        '<invoke name="{name}">\n',
        "</invoke>\n",
        "",
        "<minimax:tool_call>",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
        style="minimax_xml",
    ),
    "seed_oss": CallSyntax(
        "<seed:tool_call>\n<function={name}>\n",
        "</function>\n</seed:tool_call>",
        "\n",
        "<seed:tool_call>",
        style="qwen_xml",
    ),
    "granite": CallSyntax('{"name": "{name}", "arguments": ', "}", ", ", "<|tool_call|>", "<|tool_call|>[", "]"),
    "phi4_mini": CallSyntax(
        '{"name": "{name}", "arguments": ', "}", ", ", "<|tool_call|>", "<|tool_call|>[", "]<|/tool_call|>"
    ),
    "harmony": CallSyntax(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        "",  # the token that ends a call is an end-of-sequence token, which the constraint allows only at its end
        "<|start|>assistant",
        "<|channel|>commentary to=",
        others=(
            ("<|start|>assistant to=", "<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>"),
        ),
    ),
}
READ_ONLY: tuple[OutputParserName, ...] = ("response_template", "gemma4", "pythonic")  # no grammar forces these
_MISTRAL_V11 = CallSyntax("[TOOL_CALLS]{name}[ARGS]", "", "", "[TOOL_CALLS]")
_DEEPSEEK_V3_1 = CallSyntax(
    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "",
    _DEEPSEEK_BEGIN,
    _DEEPSEEK_BEGIN,
    _DEEPSEEK_END,
)


def calls_format(
    parser: OutputParserName, tools: Sequence[Tool], forced: bool, parallel: bool, template: str
) -> dict[str, Any] | None:
    """Return the format of answers that call `tools`; None without a constraint.

    forced: the answer consists of calls, at least one. Else the model may call, and only calls of strict tools are
        constrained.
    template: the chat template's text.
    """
    syntax = SYNTAX[parser]
    if parser == "deepseek_v3" and "```json" not in template:
        syntax = _DEEPSEEK_V3_1
    elif parser == "mistral" and "[ARGS]" in template:
        syntax = _MISTRAL_V11
    if not forced and not any(tool.function.strict for tool in tools):
        return None
    tags = [_tag(syntax, tool, forced) for tool in tools]
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    if syntax.opening:
        calls = {"type": "tag", "begin": syntax.opening, "content": calls, "end": syntax.closing}
    if forced:
        return calls
    others = [_tag(replace(syntax, begin=begin), tool, forced) for _, begin in syntax.others for tool in tools]
    return {
        "type": "triggered_tags",
        "triggers": [syntax.trigger, *(trigger for trigger, _ in syntax.others)],
        "tags": [calls] if syntax.opening else [*tags, *others],
        "at_least_one": False,
        "stop_after_first": not parallel,
    }


def content_format(parser: OutputParserName, grammar: Grammar) -> dict[str, Any]:
    """Return the format of answers whose content follows `grammar`."""
    match grammar.kind:
        case "json_schema":
            content: Any = {"type": "json_schema", "json_schema": json.loads(grammar.text)}
        case "regex":
            content = {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            content = {"type": "grammar", "grammar": grammar.text}
        case "choice":
            entries = [{"type": "const_string", "value": entry} for entry in json.loads(grammar.text)]
            content = {"type": "or", "elements": entries}
        case "structural_tag":
            content = json.loads(grammar.text).get("format")
    if parser != "harmony" or content is None:
        return content  # type: ignore[no-any-return]
    head = {"type": "const_string", "value": "<|channel|>final<|message|>"}
    return {"type": "sequence", "elements": [head, content]}


def _tag(syntax: CallSyntax, tool: Tool, forced: bool) -> dict[str, Any]:
    function = tool.function
    schema: Any = NO_PARAMETERS if function.parameters is None else function.parameters
    arguments = schema if forced or function.strict else True
    content = {"type": "json_schema", "json_schema": arguments, "max_whitespace_cnt": MAX_WHITESPACE}
    return {
        "type": "tag",
        "begin": syntax.begin.replace("{name}", function.name),
        "content": content if syntax.style == "json" else content | {"style": syntax.style},
        "end": syntax.end,
    }


def after_thinking(parser: OutputParserName, calls: dict[str, Any], prompt: str, template: str) -> dict[str, Any]:
    """Return `calls`, or another format, with optional reasoning before it, if the prompt has started reasoning or the
    template has it. prompt, template: texts."""
    if parser in ("text", "response_template"):
        return calls
    if parser == "harmony":
        analysis = _thinking("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
        return {"type": "sequence", "elements": [{"type": "optional", "content": analysis}, calls]}
    opens, closes = THINKING_MARKS[parser]
    if prompt.rstrip().endswith(opens):
        thinking = _thinking("", closes)
    elif opens in template and not prompt.rstrip().endswith(closes):
        thinking = {"type": "optional", "content": _thinking(opens, closes)}
    else:
        return calls
    return {"type": "sequence", "elements": [thinking, {"type": "regex", "pattern": "[ \\n]{0,2}"}, calls]}


def _thinking(opens: str, closes: str) -> dict[str, Any]:
    return {"type": "tag", "begin": opens, "content": {"type": "any_text"}, "end": closes}
