"""How a chat template wants an earlier answer with tool calls: decided once, by rendering one.

Used by `cluster.http.text.chat_template`. Searching the template's text decides wrongly: `content is none` also stands
in `reasoning_content is none`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_VALUE = "aerie1argument"  # an argument: text of this call that nothing else in the prompt contains
_CALL_ID = "aerie0001"  # Mistral's templates want nine letters and digits
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "What."}}},
    },
}
Rendering = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str | None]


@dataclass(frozen=True)
class CallTurns:
    """empty_content: content of a turn that has calls and no text. as_text: arguments are JSON texts, not objects."""

    empty_content: str | None = ""
    as_text: bool = False

    def of(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Return an assistant's turn with calls in this form. Arguments of `turn` are objects."""
        calls = turn["tool_calls"]
        if self.as_text:
            calls = [call | {"function": call["function"] | {"arguments": _text(call)}} for call in calls]
        return {**turn, "tool_calls": calls, "content": turn["content"] or self.empty_content}


def call_turns(rendered: Rendering) -> CallTurns:
    """Return the first form in which the template shows a call, with and without tools: objects before texts, and ""
    before None. Some templates omit a call beside a content; others fail on None or on one kind of arguments.

    rendered: returns the prompt of messages and tools; None if the template refuses them.
    """
    forms = [CallTurns(content, as_text) for content in ("", None) for as_text in (False, True)]
    return max(forms, key=lambda form: _num_shown(form, rendered))  # the first one of equal ones


def _num_shown(form: CallTurns, rendered: Rendering) -> int:
    messages = [{"role": "user", "content": "Hello"}, form.of(call_turn(""))]
    prompts = [rendered(messages, tools) for tools in ((), (_TOOL,))]
    # Arguments that are shown as Python writes them are not what the model was trained with.
    return sum(prompt is not None and _VALUE in prompt and "{'key': " not in prompt for prompt in prompts)


def call_turn(content: str) -> dict[str, Any]:
    """Return an assistant's turn with a call."""
    function = {"name": "look_up", "arguments": {"key": _VALUE}}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _text(call: Mapping[str, Any]) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)
