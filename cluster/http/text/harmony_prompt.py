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

from aerie.cluster.http.text.chat_template import ChatTemplateError
from aerie.cluster.http.text.template_facts import Efforts

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
    """Renders messages as `aerie.cluster.http.text.chat_template.ChatTemplate` does.

    source: the checkpoint's template.
    today: returns the current date.
    """

    efforts: Efforts = {effort: {"reasoning_effort": effort} for effort in EFFORTS}
    shows_tools = True

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
        settings = variables or {}
        effort = settings.get("reasoning_effort") or "medium"
        if effort not in EFFORTS:
            raise ChatTemplateError(
                f"reasoning_effort={effort!r}: this model always reasons; its efforts are low, medium and high"
            )
        num_leading = next((i for i, entry in enumerate(messages) if not _instructs(entry)), len(messages))
        instructions = [message["content"] for message in messages[:num_leading] if message["content"]]
        identity = settings.get("model_identity") or IDENTITY
        parts = [_message("system", _system(identity, self._today(), EFFORTS[effort], bool(tools)))]
        if developer := _developer("\n\n".join(instructions), tools, settings.get(RESPONSE_FORMAT)):
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
    """Return the content of the developer message: instructions, tools as TypeScript, and the answer's format."""
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
    names: dict[str, str] = {}  # call id -> name of its function
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
    """Yield an assistant's turn: reasoning if `reasons`, text, and each call."""
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


MAX_DEPTH = 32  # deeper types are `any`
_SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}


def type_text(schema: Any, indent: str = "", depth: int = MAX_DEPTH) -> str:
    """Return the TypeScript type of `schema`; `any` for schemas without one.

    indent: prefix of the lines of an object's properties.
    """
    if not isinstance(schema, Mapping) or not depth:
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        lines = [f"\n{indent} | {_variant(variant, indent, depth)}{_notes(variant)}" for variant in variants]
        return "".join(lines)
    if isinstance(variants := schema.get("anyOf"), list) and variants:
        return " | ".join(dict.fromkeys(type_text(variant, indent, depth - 1) for variant in variants))
    match schema.get("type"):
        case list() as kinds if kinds:
            return " | ".join("number" if kind == "integer" else str(kind) for kind in kinds)
        case "object":
            return _object(schema, indent, depth)
        case "array":
            items = schema.get("items")
            return "Array<any>" if items is None else f"{type_text(items, indent, depth - 1)}[]"
        case "string" if named := [f'"{variant}"' for variant in _listed(schema, "enum") if isinstance(variant, str)]:
            return " | ".join(named)
        case str() as kind:
            return _SCALARS.get(kind, "any")
    return "any"


def comment(text: str, indent: str = "") -> str:
    """Return `text` as comment lines."""
    return "".join(f"{indent}// {line}\n" for line in text.splitlines())


def _object(schema: Mapping[str, Any], indent: str, depth: int) -> str:
    """Return an object's schema as a TypeScript type, with a line per property."""
    text = comment(_string(schema, "description"), indent) + "{\n"
    properties, required = schema.get("properties"), set(filter(_is_text, _listed(schema, "required")))
    for key, value in properties.items() if isinstance(properties, Mapping) else ():
        named = f"{indent}{key}{'' if key in required else '?'}:"
        text += "".join(_property(named, value if isinstance(value, Mapping) else {}, indent, depth))
    return f"{text}{indent}}}"


def _property(named: str, schema: Mapping[str, Any], indent: str, depth: int) -> Iterator[str]:
    """Yield the lines of one property: title, description and examples as comments, then name, type and default.

    named: its indent, name and colon.
    depth: how deep schemas may still be nested.
    """
    if title := _string(schema, "title"):
        yield comment(title, indent) + f"{indent}//\n"
    variants = schema.get("oneOf")
    described = _string(schema, "description")
    if described and not isinstance(variants, list):
        yield comment(described, indent)
    if examples := [value for value in _listed(schema, "examples") if isinstance(value, str)]:
        yield f"{indent}// Examples:\n" + "".join(f'{indent}// - "{value}"\n' for value in examples)
    if isinstance(variants, list):
        yield from _union_property(named, schema, variants, indent, depth)
        return
    default = _default(schema)
    kind = _or_null(type_text(schema, f"{indent}    ", depth - 1), schema)
    yield f"{named} {kind},{f' // {default}' if default else ''}\n"


def _union_property(
    named: str, schema: Mapping[str, Any], variants: list[Any], indent: str, depth: int
) -> Iterator[str]:
    """Yield the lines of a property with oneOf: description and default as comments, the name, a line per variant."""
    described = _string(schema, "description")
    is_of_first = bool(variants) and described == _string(variants[0], "description")
    if described and not is_of_first:
        yield comment(described, indent)
    if default := _default(schema):
        yield f"{indent}// {default}\n"
    yield f"{named}\n"
    for i, variant in enumerate(variants):
        # below the property's own description, the first variant's is left out
        notes = _notes(variant, described, i == 0 and not is_of_first)
        yield f"{indent} | {_variant(variant, indent, depth)}{notes}\n"
    yield f"{indent},\n"


def _variant(schema: Any, indent: str, depth: int) -> str:
    return _or_null(type_text(schema, f"{indent}   ", depth - 1), schema)


def _notes(schema: Any, shown: str = "", is_described: bool = False) -> str:
    """Return the comment after a variant. shown: a description that is not repeated. is_described: no description is
    needed."""
    described = _string(schema, "description")
    keeps = described and described != shown and not (is_described and shown)
    notes = [*([" ".join(described.splitlines())] if keeps else []), *filter(None, [_default(schema)])]
    return f" // {' '.join(notes)}" if notes else ""


def _default(schema: Any) -> str:
    """Return the default value for a comment; strings are quoted unless they belong to an enumeration."""
    if not isinstance(schema, Mapping) or "default" not in schema:
        return ""
    value = schema["default"]
    if isinstance(value, str) and _listed(schema, "enum"):
        return f"default: {value}"
    return f"default: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"


def _or_null(kind: str, schema: Any) -> str:
    nullable = isinstance(schema, Mapping) and schema.get("nullable") is True
    return f"{kind} | null" if nullable and "null" not in kind else kind


def _string(schema: Any, key: str) -> str:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, str) else ""


def _listed(schema: Any, key: str) -> list[Any]:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, list) else []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
