"""Renders gpt-oss's prompts by the rules of the harmony format (openai/harmony, docs/format.md) instead of the
checkpoint's chat template.

That template refuses a turn with reasoning, text and calls, which agents send, shows the first of several calls only,
and writes results of tools as JSON strings. `openai-harmony` is not used: it needs a vocabulary file that checkpoints
do not have, and its parser raises on malformed answers. tests/cluster/http/text/test_harmony_prompt.py compares both.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from cluster.http.text.chat_template import ChatTemplateError
from cluster.http.text.typescript import comment, type_text

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
STOPS = ("<|return|>", "<|call|>")  # end a generation
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
RESPONSE_FORMAT = "response_format"  # template variable with the answer's format: a title, a line break and a schema
# Text that only the published template, and templates derived from it, contain.
_PUBLISHED = ("<|channel|>", "<|message|>", "# Valid channels:", "namespace functions")
_PREFIX = "functions."


def is_harmony(source: str) -> bool:
    """Whether a chat template is the published one of gpt-oss. source: its text."""
    return all(part in source for part in _PUBLISHED)


class HarmonyPrompt:
    """Renders messages as `cluster.http.text.chat_template.ChatTemplate` does.

    source: the checkpoint's template.
    today: returns the current date.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], today: Callable[[], date] = date.today) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._today = today

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        limit_s: float | None = None,
    ) -> str:
        """Return the prompt's text. Raises ChatTemplateError.

        variables: `reasoning_effort`, `model_identity` and `RESPONSE_FORMAT` are used.
        """
        given = variables or {}
        effort = given.get("reasoning_effort") or "medium"
        if effort not in EFFORTS:
            raise ChatTemplateError(
                f"reasoning_effort={effort!r}: this model always reasons; its efforts are low, medium and high"
            )
        num_leading = next((i for i, each in enumerate(messages) if not _instructs(each)), len(messages))
        instructions = [message["content"] for message in messages[:num_leading] if message["content"]]
        identity = given.get("model_identity") or IDENTITY
        parts = [_message("system", _system(identity, self._today(), EFFORTS[effort], bool(tools)))]
        if developer := _developer("\n\n".join(instructions), tools, given.get(RESPONSE_FORMAT)):
            parts.append(_message("developer", developer))
        parts += _conversation(messages[num_leading:])
        return "".join(parts) + ("<|start|>assistant" if add_generation_prompt else "")


def _system(identity: str, today: date, effort: str, has_tools: bool) -> str:
    channels = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    if has_tools:
        channels += "\nCalls to these tools must go to the commentary channel: 'functions'."
    dates = f"Knowledge cutoff: {KNOWLEDGE_CUTOFF}\nCurrent date: {today.isoformat()}"
    return f"{identity}\n{dates}\n\nReasoning: {effort}\n\n{channels}"


def _developer(instructions: str, tools: Sequence[Mapping[str, Any]], form: str | None) -> str:
    sections = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        types = "\n".join(_tool(tool.get("function", tool)) for tool in tools)
        sections.append(f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{types}\n}} // namespace functions")
    if form:
        sections.append(f"# Response Formats\n\n{form}")
    return "\n\n".join(sections)


def _tool(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters")
    has_some = isinstance(parameters, Mapping) and bool(parameters.get("properties"))
    arguments = f"_: {type_text(parameters)}" if has_some else ""
    return f"{comment(function.get('description') or '')}type {function['name']} = ({arguments}) => any;\n"


def _conversation(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each message in the format. Reasoning is included after the last answer only, where calls may follow."""
    answered = max((i for i, message in enumerate(messages) if _answers(message)), default=-1)
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    waiting: list[str] = []  # functions whose calls have no result yet
    for i, message in enumerate(messages):
        content = message["content"] or ""
        match message["role"]:
            case "assistant":
                calls = message.get("tool_calls") or ()
                yield from _assistant(message, content, calls, i > answered)
                waiting = [call["function"]["name"] for call in calls]
                names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
            case "tool":
                name = names.get(message.get("tool_call_id", "")) or message.get("name")
                if name is None and not waiting:
                    raise ChatTemplateError("a message of role 'tool' answers no call; give its tool_call_id")
                name = name or waiting[0]
                waiting = waiting[1:]
                yield _message(f"{_PREFIX}{name.removeprefix(_PREFIX)} to=assistant<|channel|>commentary", content)
            case "system" | "developer":
                yield _message("developer", f"# Instructions\n\n{content}")
            case role:
                yield _message(role, content)


def _assistant(
    message: Mapping[str, Any], content: str, calls: Sequence[Mapping[str, Any]], reasons: bool
) -> Iterator[str]:
    reasoning = message.get("reasoning_content") or ""
    if reasoning and reasons:
        yield _message("assistant<|channel|>analysis", reasoning)
    if content or not (calls or reasoning):
        yield _message(f"assistant<|channel|>{'commentary' if calls else 'final'}", content)
    for call in calls:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False, separators=(",", ":"))
        head = f"assistant<|channel|>commentary to={_PREFIX}{function['name']} <|constrain|>json"
        yield _message(head, arguments, "<|call|>")


def _answers(message: Mapping[str, Any]) -> bool:
    """Whether a turn ended in an answer to the user, after which earlier reasoning is dropped."""
    return message["role"] == "assistant" and bool(message["content"]) and not message.get("tool_calls")


def _instructs(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _message(head: str, content: str, end: str = "<|end|>") -> str:
    return f"<|start|>{head}<|message|>{content}{end}"
