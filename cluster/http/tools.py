"""Which tools a chat may call, and must; and what of a request goes to the chat template by name. Raises ApiError."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.http.config import OutputParserName
from cluster.http.errors import invalid, unsupported
from cluster.http.parsers.call_grammar import SYNTAX
from cluster.http.schema.message import NamedTool, Tool
from cluster.http.schema.request import ChatCompletionRequest

# What templates call the switch between thinking and not thinking: Qwen3, DeepSeek V3.1.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class ToolCalling:
    """tools: those that the model is shown. forced: it must call one of `callable_tools`. parallel: or several."""

    tools: tuple[Tool, ...] = ()
    callable_tools: tuple[Tool, ...] = ()
    forced: bool = False
    parallel: bool = True


def tool_calling(body: ChatCompletionRequest, parser: OutputParserName) -> ToolCalling:
    """With `tool_choice: "none"` the model is shown no tools."""
    tools, choice = tuple(body.tools or ()), body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice asks for a call, but there are no tools")
        return ToolCalling()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "tools: two functions have one name")
    if choice == "none":
        return ToolCalling()
    if parser not in SYNTAX and parser != "response_template":
        known = ", ".join(sorted([*SYNTAX, "response_template"]))
        raise unsupported(
            "tools",
            "this model's chat template shows no known form of tool calls; if the model has one, the server's "
            f"configuration can name it (ingress.output_parser: {known})",
        )
    parallel = body.parallel_tool_calls is not False
    if choice in (None, "auto"):
        return ToolCalling(tools, tools, False, parallel)
    if parser not in SYNTAX:
        raise unsupported("tool_choice", "calls in the form of this model's response template cannot be forced")
    if isinstance(choice, NamedTool):
        named = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        if not named:
            raise invalid("tool_choice", f"tool_choice: '{choice.function.name}' is not among the tools")
        return ToolCalling(tools, named, True, False)
    return ToolCalling(tools, tools, True, parallel)


def template_variables(body: ChatCompletionRequest, template: str) -> Mapping[str, Any] | None:
    """`chat_template_kwargs`, and `reasoning_effort` under the name by which the template knows it."""
    variables, effort = body.chat_template_kwargs, body.reasoning_effort
    if effort is None:
        return variables
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort, **(variables or {})}
    for name in _THINKING_SWITCHES:
        if f" {name}" in template or f"({name}" in template:
            return {name: effort != "none", **(variables or {})}
    raise unsupported("reasoning_effort", "the model's chat template has no switch for it")
