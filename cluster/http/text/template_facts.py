"""What a chat template supports and in which form, found once by rendering trial conversations.

Used by `aerie.cluster.http.text.chat_template`. Searching the template's text decides wrongly: `content is none` also
stands in `reasoning_content is none`, and a variable may occur without an effect.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
# Arguments: messages, tools, variables, whether the answer begins. None: the template refuses them.
Rendering = Callable[[Sequence[Message], Sequence[Message], Mapping[str, Any], bool], str | None]
Efforts = Mapping[str, Mapping[str, Any]]

LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
# Variables by which published templates switch reasoning: name, value for on, for off.
_SWITCHES: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("thinking_mode", "enabled", "disabled"),  # MiniMax-M3
    ("thinking_option", "on", "off"),  # Ling 3
    ("thinking_budget", -1, 0),  # Seed-OSS
    ("reasoning", True, False),  # Command A
)
_LEVEL_NAMES = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_NO_LEVELS = ("none", "no_think")  # levels for no reasoning
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_FILLS: Mapping[str, Any] = {"description": "", "parameters": NO_PARAMETERS}
_CALL_VALUE = "aerie1argument"  # nothing else in a trial's prompt contains these texts
_TOOL_NAME = "aerie_look_up"
_CALL_ID = "aerie0001"  # Mistral's templates want nine letters and digits
HELLO: Message = {"role": "user", "content": "Hello"}
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string", "description": "What to look up."}}}
TOOL = {
    "type": "function",
    "function": {"name": _TOOL_NAME, "description": "Looks it up.", "parameters": _PARAMETERS},
}


@dataclass(frozen=True)
class CallTurns:
    """Form of an assistant's turns with calls.

    empty_content: content of a turn without text. as_text: arguments are JSON texts, not objects."""

    empty_content: str | None = ""
    as_text: bool = False

    def of(self, turn: Message) -> dict[str, Any]:
        """Return a turn in this form. Arguments of `turn` are objects."""
        calls = turn["tool_calls"]
        if self.as_text:
            calls = [call | {"function": call["function"] | {"arguments": _text(call)}} for call in calls]
        return {**turn, "tool_calls": calls, "content": turn["content"] or self.empty_content}


def call_turns(rendered: Rendering) -> CallTurns:
    """Return the first form in which the template shows a call, with and without tools: objects before texts, and ""
    before None. Some templates omit a call beside a content; others fail on None or on one kind of arguments."""
    forms = [CallTurns(content, as_text) for content in ("", None) for as_text in (False, True)]
    return max(forms, key=lambda form: _num_shown(form, rendered))  # the first one of equal ones


def _num_shown(form: CallTurns, rendered: Rendering) -> int:
    messages = [HELLO, form.of(call_turn(""))]
    prompts = [rendered(messages, tools, {}, False) for tools in ((), (TOOL,))]
    # Arguments that are shown as Python writes them are not what the model was trained with.
    return sum(prompt is not None and _CALL_VALUE in prompt and "{'key': " not in prompt for prompt in prompts)


def call_turn(content: str) -> dict[str, Any]:
    """Return an assistant's turn with a call."""
    function = {"name": _TOOL_NAME, "arguments": {"key": _CALL_VALUE}}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def shows_call(prompt: str | None) -> bool:
    """Return whether a prompt has the call of `call_turn`."""
    return prompt is not None and _CALL_VALUE in prompt


def shows_tools(rendered: Rendering) -> bool:
    """Return whether tools reach the prompt."""
    return any(_TOOL_NAME in (rendered(turns, (TOOL,), {}, True) or "") for turns in _starts())


def needed_fields(rendered: Rendering) -> frozenset[str]:
    """Return the fields without which the template refuses a tool: `description`, `parameters`, and `properties` of the
    parameters. All other tools are shown as they were sent, as transformers does."""

    def is_refused(function: Mapping[str, Any]) -> bool:
        tool = {"type": "function", "function": function}
        return all(rendered(turns, (tool,), {}, True) is None for turns in _starts())

    whole: Mapping[str, Any] = TOOL["function"]  # type: ignore[assignment]
    if is_refused(whole):
        return frozenset()
    without = {name: {key: whole[key] for key in whole if key != name} for name in _FILLS}
    without["properties"] = {**whole, "parameters": {"type": "object"}}
    return frozenset(name for name, function in without.items() if is_refused(function))


def filled(tool: Message, needed: frozenset[str]) -> dict[str, Any]:
    """Return a tool with the fields that the template needs."""
    function = dict(tool["function"])
    for name in _FILLS:
        if name in needed:
            function.setdefault(name, _FILLS[name])
    if "properties" in needed and "parameters" in function:
        function["parameters"] = {**function["parameters"]}
        function["parameters"].setdefault("properties", {})
    return {**tool, "function": function}


def reasoning_efforts(rendered: Rendering) -> Efforts:
    """Return the template's variables for each `reasoning_effort`: "none" and `LEVELS`. Efforts without effect on the
    prompt are absent. A level that the template refuses has the variables of the nearest one."""

    def prompt(variables: Mapping[str, Any]) -> str | None:
        return rendered((HELLO,), (), variables, True)

    on: dict[str, Any] = {}
    off: dict[str, Any] = {}
    for name, value_on, value_off in _SWITCHES:
        shown = prompt({name: value_on}), prompt({name: value_off})
        if None not in shown and shown[0] != shown[1]:
            on, off = {name: value_on}, {name: value_off}
            break
    found: dict[str, dict[str, Any]] = dict.fromkeys(LEVELS, on) if on else {}
    if off:
        found["none"] = off
    for name in _LEVEL_NAMES:
        levels = {level: text for level in LEVELS if (text := prompt({**on, name: level})) is not None}
        if len({*levels.values(), prompt(on)}) > 1 and levels:
            found |= {level: {**on, name: _nearest(level, levels)} for level in LEVELS}
            others = (None, *levels.values())
            no_level = next((each for each in _NO_LEVELS if prompt({name: each}) not in others), None)
            if not off and no_level is not None:
                found["none"] = {name: no_level}
            break
    return found


def _nearest(level: str, accepted: Mapping[str, str]) -> str:
    rank = LEVELS.index
    return min(accepted, key=lambda each: (abs(rank(each) - rank(level)), -rank(each)))


def _starts() -> tuple[tuple[Message, ...], ...]:
    """Return beginnings of conversations: some templates show tools only beside a system prompt."""
    return (HELLO,), ({"role": "system", "content": "Help."}, HELLO)


def _text(call: Message) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)
