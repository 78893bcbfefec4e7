"""The tools that a chat may or must call, the request's variables for the chat template, and the structural tag
(xgrammar's) that constrains answers by tools and tool_choice in the model's own format of calls. Raises ApiError."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aerie.cluster.http.config import EdgeConfig, OutputParserName
from aerie.cluster.http.errors import invalid, unsupported
from aerie.cluster.http.parsers.families import FAMILIES, CallSyntax
from aerie.cluster.http.parsers.reasoning import is_reasoning
from aerie.cluster.http.requests.parameters import chat_parser
from aerie.cluster.http.requests.structured_output import GrammarMaker
from aerie.cluster.http.schema.message import AllowedTools, NamedTool, OtherTool, Tool
from aerie.cluster.http.schema.request import ChatCompletionRequest
from aerie.cluster.http.text.harmony_prompt import RESPONSE_FORMAT, comment, is_harmony
from aerie.cluster.http.text.template_facts import NO_PARAMETERS
from aerie.cluster.http.text.tokenizer import ChatTokenizer
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
    """Return the structural tag of one tool's calls. forced: the model must call a tool, so that its schema applies."""
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


@dataclass(frozen=True)
class ToolCalling:
    """The tools of a chat, and whether it must call one.

    tools: tools shown to the model.
    forced: whether it must call one of `callable_tools`.
    parallel: whether it may call several.
    """

    tools: tuple[Tool, ...] = ()
    callable_tools: tuple[Tool, ...] = ()
    forced: bool = False
    parallel: bool = True


def functions(tools: Sequence[Tool | OtherTool] | None) -> tuple[Tool, ...]:
    """Return the tools that the model is shown."""
    return tuple(tool for tool in tools or () if isinstance(tool, Tool))


def tool_calling(body: ChatCompletionRequest, config: EdgeConfig, shows_tools: bool) -> ToolCalling:
    """Return the tools of a chat. With `tool_choice: "none"` no tools are shown to the model, with `allowed_tools` only
    those. shows_tools: whether the chat template shows tools."""
    tools, choice, parser = functions(body.tools), body.tool_choice, chat_parser(config)
    if len(tools) > config.max_tools:
        raise invalid(
            "tools",
            f"tools has {len(tools)} functions, more than {config.max_tools} (ingress.max_tools); send those that the "
            "conversation needs, or raise the limit",
        )
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice asks for a call, but tools has no functions")
        return ToolCalling()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "tools: two functions have the same name")
    if isinstance(choice, AllowedTools):
        allowed = [tool for tool in choice.allowed_tools.tools if isinstance(tool, NamedTool)]
        tools, choice = _named(tools, allowed), choice.allowed_tools.mode
    if choice == "none":
        return ToolCalling()
    if not FAMILIES[parser].reads_calls:
        known = ", ".join(sorted(name for name, family in FAMILIES.items() if family.reads_calls))
        raise unsupported(
            "tools",
            "this model's chat template shows no known form of tool calls; if the model has one, the server's "
            f"configuration can name it (ingress.output_parser: {known})",
        )
    if not shows_tools:
        raise unsupported(
            "tools",
            "this model's chat template does not show tools to the model; describe them in a system message, or add a "
            "template that shows them to the model's folder (additional_chat_templates/tool_use.jinja)",
        )
    parallel = body.parallel_tool_calls is not False
    if choice in (None, "auto"):
        return ToolCalling(tools, tools, False, parallel)
    if FAMILIES[parser].syntax is None:
        raise unsupported("tool_choice", f"calls in this model's form ({parser}) cannot be forced")
    if isinstance(choice, NamedTool):
        return ToolCalling(tools, _named(tools, [choice]), True, False)
    return ToolCalling(tools, tools, True, parallel)


def _named(tools: Sequence[Tool], choice: Sequence[NamedTool]) -> tuple[Tool, ...]:
    """Return the tools that `tool_choice` names."""
    by_name, names = {tool.function.name: tool for tool in tools}, {tool.function.name: None for tool in choice}
    if unknown := [name for name in names if name not in by_name]:
        raise invalid("tool_choice", f"tool_choice: '{unknown[0]}' is not among the tools")
    if not names:
        raise invalid("tool_choice", "tool_choice.allowed_tools has no functions; name some, or use none")
    return tuple(by_name[name] for name in names)


def answer_grammar(
    own: Grammar | None,
    calls: ToolCalling,
    parser: OutputParserName,
    prompt: str,
    template: str,
    maker: GrammarMaker,
    continued: str = "",
) -> Grammar | None:
    """Return the grammar of a chat's answer: tool calls, the request's own grammar `own`, or either, after optional
    reasoning. A forced call leaves no text for `own`. prompt, template, continued: texts; the last is of the message
    that the answer continues."""
    if calls.forced:
        own = None
    calls_tag: Any = None
    if calls.tools and FAMILIES[parser].syntax is not None:
        forced = calls.forced or own is not None
        calls_tag = calls_format(parser, calls.callable_tools, forced, calls.parallel, template)
        if calls_tag is not None:
            checked = maker.structural_tag("tools", {"format": calls_tag})
            calls_tag, end = json.loads(checked.text)["format"], checked.end_token_ids
    if own is None:
        if calls_tag is None:
            return None
        form = after_thinking(parser, calls_tag, prompt, template, continued) if calls.forced else calls_tag
        return Grammar("structural_tag", _structural_tag(form), end)
    content = content_format(parser, own)
    if content is None:  # an older structural tag without formats
        return own
    if calls_tag is not None:
        content = {"type": "or", "elements": [calls_tag, content]}
    form = after_thinking(parser, content, prompt, template, continued)
    if form is content and calls_tag is None and parser != "harmony":
        return own
    return Grammar("structural_tag", _structural_tag(form), own.end_token_ids, own.any_whitespace)


def _structural_tag(form: Mapping[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)


def template_variables(body: ChatCompletionRequest, tokenizer: ChatTokenizer) -> Mapping[str, Any] | None:
    """Return `chat_template_kwargs`, with `reasoning_effort` as the template takes it, if that has an effect, and for
    gpt-oss the format of the answer."""
    variables = body.chat_template_kwargs
    if is_harmony(tokenizer.template_source) and (form := _response_format(body.response_format)):
        variables = {RESPONSE_FORMAT: form, **(variables or {})}
    if body.reasoning_effort is None:
        return variables
    return {**tokenizer.efforts.get(body.reasoning_effort, {}), **(variables or {})}


def _response_format(response_format: Mapping[str, Any] | None) -> str:
    """Return the section of a harmony prompt that shows a JSON schema; "" without one."""
    form = (
        response_format.get("json_schema")
        if response_format is not None and response_format.get("type") == "json_schema"
        else None
    )
    if not isinstance(form, Mapping) or not isinstance(form.get("schema"), Mapping):
        return ""
    schema = json.dumps(form["schema"], ensure_ascii=False, separators=(",", ":"))
    description = form.get("description")
    described = comment(description) if isinstance(description, str) else ""
    return f"## {form.get('name') or 'response'}\n\n{described}{schema}"
