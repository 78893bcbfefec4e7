"""Renders a model's chat template like transformers, without importing transformers and torch, and puts system messages
where the template accepts them. tests/cluster/http/text/test_tokenizer.py compares it with
`PreTrainedTokenizerBase.apply_chat_template`.

Coding agents send several system messages at the beginning (Codex) and more between later turns (Claude Code). Some
templates refuse these; others leave them out, or put them first, which changes the prompt's beginning at every turn.
Trial conversations show which of these a template does.
"""

import copy
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from aerie.cluster.http.text import template_facts
from aerie.cluster.http.text.template_facts import (
    CallTurns,
    Efforts,
    LimitedEnvironment,
    Message,
    Rendering,
    TemplateLimitError,
    TemplateTimeError,
    call_turn,
    time_limit,
)

_FIRST, _SECOND = "Aerie's first text.", "Aerie's second text."  # nothing else in a trial's prompt contains them
_RESULT: Message = {"role": "tool", "tool_call_id": "aerie0001", "name": "aerie_look_up", "content": _FIRST}


Content = str | list[dict[str, str]]  # parts, if there are images


@dataclass(frozen=True)
class SystemTurns:
    """What the template shows.

    developer: messages of the role "developer" at the beginning, which else become system messages.
    first: a system message at the beginning.
    several: two of them.
    late: one after other turns, in its place.
    users: two user turns in a row.
    after_result: a user turn after a tool's result.
    """

    developer: bool = False
    first: bool = True
    several: bool = True
    late: bool = True
    users: bool = True
    after_result: bool = True

    def of(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the turns in a form that the template shows: a system message that it would not show becomes a user
        turn in its place, or a part of the turn before."""
        merged: list[dict[str, Any]] = []
        for turn in turns:
            if turn["role"] == "developer" and not self.developer:
                turn = {**turn, "role": "system"}
            last = merged[-1] if merged else {"role": ""}
            is_leading = last["role"] in ("", "system") and (len(merged) < 2 or merged[-2]["role"] == "system")
            if turn["role"] == "system" and not (self.first if is_leading else self.late):
                turn = {**turn, "role": "user"}
            joins = {
                "system": is_leading and last["role"] == "system" and not self.several,
                "user": (last["role"] == "user" and not self.users)
                or (last["role"] == "tool" and not self.after_result),
            }
            if joins.get(turn["role"], False):
                merged[-1] = {**last, "content": _joined(last["content"], turn["content"])}
            else:
                merged.append(turn)
        return merged


def _joined(first: Content, second: Content) -> Content:
    """Return two contents as one, with an empty line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    before, after = ([_text(content)] if isinstance(content, str) else content for content in (first, second))
    return [*before, _text("\n\n"), *after]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def system_turns(rendered: Rendering, names_developer: bool) -> SystemTurns:
    """Return where the template shows system messages; all, if it refuses a lone user turn. names_developer: whether
    the template names this role, because many write any role into the prompt."""

    def shows(*turns: Message) -> bool:
        prompt = rendered(turns, (), {}, False) or ""
        return _FIRST in prompt and prompt.find(_SECOND) > prompt.find(_FIRST)

    def turn(role: str, content: str) -> Message:
        return {"role": role, "content": content}

    user, later = turn("user", _FIRST), turn("user", _SECOND)
    if not shows(user, turn("assistant", _SECOND)):
        return SystemTurns()
    first = shows(turn("system", _FIRST), later)
    begin = (turn("system", "Help."),) if first else ()
    late = turn("system", _SECOND)
    called = (*begin, turn("user", "Hello"), call_turn(""))
    answered = _any_shows(rendered, (*called, _RESULT))
    return SystemTurns(
        developer=names_developer
        and shows(turn("developer", _FIRST), turn("developer", _SECOND), turn("user", "Hello")),
        first=first,
        several=shows(turn("system", _FIRST), late, turn("user", "Hello")),
        late=shows(*begin, user, late) and (not answered or shows(*called, _RESULT, late)),
        users=shows(*begin, user, later),
        after_result=not answered or shows(*called, _RESULT, later),
    )


def _any_shows(rendered: Rendering, turns: Iterable[Message]) -> bool:
    """Return whether the template shows a tool's result."""
    return _FIRST in (rendered(tuple(turns), (), {}, False) or "")


Fact = TypeVar("Fact")
MAX_RENDER_S = 5.0  # default limit on the time to render a template
END = "\uffff "  # a noncharacter; templates that trim a content remove the space
_CHANGES_LISTS = re.compile("append|pop")  # a method that `LimitedEnvironment` allows
_ESCAPED_MARK = re.compile(r"(?<!\\)((?:\\\\)*)\\u(fd[de][0-9a-f])")  # an escaped character of `user_text.MARKS`


class ChatTemplateError(ValueError):
    """The template refused the messages, or failed on them. The message may be shown to the client."""


class SlowTemplateError(ChatTemplateError):
    """The template exceeded its time limit."""


class ContinuationError(ChatTemplateError):
    """The template does not show the end of the last message."""


def with_end(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns with a mark after the last one's content, or after its reasoning if it has only that. Raises
    ContinuationError for a content that ends with an image."""
    last = turns[-1]
    if isinstance(parts := last["content"], list):
        if parts[-1]["type"] != "text":
            raise ContinuationError("continue_final_message needs a last message that ends with text")
        return [*turns[:-1], last | {"content": [*parts[:-1], _text(parts[-1]["text"] + END)]}]
    has_only_reasoning = last.get("reasoning_content") and not last["content"]
    names = ("reasoning_content", "reasoning", "thinking") if has_only_reasoning else ("content",)
    return [*turns[:-1], last | {name: last[name] + END for name in names}]


def up_to_end(text: str) -> str:
    """Return a rendered text up to the mark, as transformers cuts it. Raises ContinuationError."""
    at = text.rfind(END.strip())
    if at < 0:
        raise ContinuationError(
            "continue_final_message needs a last message whose text the chat template shows as it is"
        )
    is_trimmed = text[at : at + len(END)] != END  # then the content before the mark would be trimmed, too
    return text[:at].rstrip() if is_trimmed else text[:at]


class ChatTemplate:
    """Renders messages.

    source: Jinja text.
    special_tokens: names and texts for the template ("bos_token" -> "<s>").
    limit_s: time limit of one rendering.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], limit_s: float = MAX_RENDER_S) -> None:
        environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"chat template: {error.message} (line {error.lineno}); correct chat_template.jinja or "
                "tokenizer_config.json"
            ) from None
        self.source = source
        self._limit_s = limit_s
        self.special_tokens = dict(special_tokens)
        self._changes_lists = _CHANGES_LISTS.search(source) is not None
        self._call_turns = self._fact(template_facts.call_turns, CallTurns())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        limit_s: float | None = None,
    ) -> str:
        """Return the prompt's text. System and developer messages, and turns with tool calls, get a form that the
        template shows.

        Raises ChatTemplateError, or SlowTemplateError after `limit_s` (None: the template's own limit).
        """
        turns = [self._call_turns.of(message) if message.get("tool_calls") else dict(message) for message in messages]
        turns = self._system_turns.of(turns)
        tools = [template_facts.filled(tool, self._needed_fields) for tool in tools]
        return self._rendered(turns, add_generation_prompt, variables or {}, tools, limit_s)

    @functools.cached_property
    def efforts(self) -> Efforts:
        """Return the template's variables for each `reasoning_effort` that has an effect."""
        return self._fact(template_facts.reasoning_efforts, {})

    @functools.cached_property
    def shows_tools(self) -> bool:
        """Return whether tools reach the prompt."""
        return self._fact(template_facts.shows_tools, False)

    @functools.cached_property
    def _system_turns(self) -> SystemTurns:
        names_developer = "developer" in self.source
        return self._fact(lambda rendered: system_turns(rendered, names_developer), SystemTurns())

    @functools.cached_property
    def _needed_fields(self) -> frozenset[str]:
        return self._fact(template_facts.needed_fields, frozenset())

    def _fact(self, find: Callable[[Rendering], Fact], if_slow: Fact) -> Fact:
        try:
            return find(self.trial)
        except SlowTemplateError:
            return if_slow

    def trial(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str | None:
        """Return the prompt of messages as they are; None if the template refuses them. Raises SlowTemplateError."""
        try:
            return self._rendered(messages, add_generation_prompt, variables, tools, None)
        except SlowTemplateError:
            raise
        except ChatTemplateError:
            return None

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        limit_s: float | None,
    ) -> str:
        """Return the prompt. limit_s: None: the template's own limit. Raises SlowTemplateError after that time, and
        ChatTemplateError if the template refuses the messages or fails."""
        values = {**self.special_tokens, **variables}
        values |= {"messages": messages, "tools": list(tools) or None, "documents": None}
        values["add_generation_prompt"] = add_generation_prompt
        if self._changes_lists:
            values = copy.deepcopy(values)
        try:
            with time_limit(self._limit_s if limit_s is None else limit_s):
                return self._template.render(values)
        except TemplateTimeError as error:
            raise SlowTemplateError(str(error)) from None
        except TemplateLimitError as error:
            raise ChatTemplateError(str(error)) from None
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from None
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            # A template is code: with unexpected roles or fields it raises Python's exceptions.
            raise ChatTemplateError(
                f"the model's chat template cannot render these messages ({type(error).__name__})"
            ) from None


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training; when serving, its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON. Unlike Jinja's own filter, it does not escape HTML."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED_MARK.sub(lambda match: match[1] + chr(int(match[2], 16)), text) if ensure_ascii else text
