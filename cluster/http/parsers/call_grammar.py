"""Constrains answers by tools and tool_choice, with xgrammar's structural tags in the model's own format of calls."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.families import FAMILIES, CallSyntax
from aerie.cluster.http.parsers.reasoning import is_reasoning
from aerie.cluster.http.schema.message import Tool
from aerie.cluster.http.text.template_facts import NO_PARAMETERS
from aerie.workers.scheduling.plan import Grammar

MAX_WHITESPACE = 8  # consecutive characters between parts of arguments: a model could write them forever


def calls_format(
    parser: OutputParserName, tools: Sequence[Tool], forced: bool, parallel: bool, template: str
) -> dict[str, Any] | None:
    """Return the format of answers that call `tools`; None without a constraint.

    forced: the answer consists of calls, at least one. Else the model may call, and only calls of strict tools are
        constrained.
    template: the chat template's text.
    """
    syntax = FAMILIES[parser].syntax
    assert syntax is not None, "`tool_calling` refuses to force other calls"
    if parser == "deepseek_v3" and "```json" not in template:  # V3.1
        begin, end = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
        syntax = replace(syntax, begin=begin, end=end, separator="")
    elif parser == "mistral" and "[ARGS]" in template:  # tokenizers from version 11 on
        syntax = CallSyntax("[TOOL_CALLS]{name}[ARGS]", "", "", "[TOOL_CALLS]")
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


def after_thinking(
    parser: OutputParserName, calls: dict[str, Any], prompt: str, template: str, continued: str = ""
) -> dict[str, Any]:
    """Return `calls`, or another format, with optional reasoning before it, if the prompt has started reasoning or the
    template has it. prompt, template, continued: see `is_reasoning`."""
    if parser == "harmony":
        analysis = _thinking("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
        return {"type": "sequence", "elements": [{"type": "optional", "content": analysis}, calls]}
    if (marks := FAMILIES[parser].thinking) is None:
        return calls
    opens, closes = marks
    if is_reasoning(opens, closes, prompt, continued):
        thinking = _thinking("", closes)
    elif opens in template and not prompt.rstrip().endswith(closes):
        thinking = {"type": "optional", "content": _thinking(opens, closes)}
    else:
        return calls
    return {"type": "sequence", "elements": [thinking, {"type": "regex", "pattern": "[ \\n]{0,2}"}, calls]}


def _thinking(opens: str, closes: str) -> dict[str, Any]:
    return {"type": "tag", "begin": opens, "content": {"type": "any_text"}, "end": closes}
