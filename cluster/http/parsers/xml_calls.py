"""Converts streamed XML tool calls to JSON arguments. Qwen3-Coder, Qwen3.5 and later:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Other families have other tags, see `XmlForm`. A value is text or JSON, and only the tool's schema says which
(`cluster.http.parsers.argument_types`). Text is streamed; other values are returned whole.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cluster.http.parsers.argument_types import ArgumentTypes, json_value
from cluster.http.parsers.json_calls import CallPart
from cluster.http.parsers.marks import cut


@dataclass(frozen=True)
class XmlForm:
    """The tags of a model family, after the mark that opens a call.

    opens, head: start of a function; group 1 of `head` is its name. opens "": the name itself.
    key, key_end: around a parameter's name; `key_end` ends where its value begins.
    value_end, function_end, call_end: closing tags; "": none.
    has_breaks: a line break after a value's opening tag, and one before its closing one, belong to the form.
    """

    opens: str
    head: re.Pattern[str]
    key: str
    key_end: re.Pattern[str]
    value_end: str
    function_end: str
    call_end: str
    has_breaks: bool = False

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Tags that end the parameters of a call."""
        return tuple(filter(None, (self.function_end, self.call_end)))

    @cached_property
    def unclosed(self) -> re.Pattern[str] | None:
        """Tags that end a value whose own closing tag is missing."""
        if not self.function_end:
            return None
        return re.compile(rf"{re.escape(self.function_end)}\s*(?P<call_end>{re.escape(self.call_end)})?")


_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_CLOSES = re.compile(">")
QWEN = XmlForm("<function=", _FUNCTION, "<parameter=", _CLOSES, "</parameter>", "</function>", "</tool_call>", True)
SEED = replace(QWEN, call_end="</seed:tool_call>", has_breaks=False)
MINIMAX = XmlForm(
    "<invoke name=",
    re.compile(r"""\s*<invoke name=["']?([^>"'\n]*)["']?>"""),
    "<parameter name=",
    _CLOSES,
    "</parameter>",
    "</invoke>",
    "</minimax:tool_call>",
)
GLM = XmlForm(
    "",
    re.compile(r"\s*([\w.-]+)[ \t]*(?=[\n<])"),
    "<arg_key>",
    re.compile(r"</arg_key>\s*<arg_value>"),
    "</arg_value>",
    "",
    "</tool_call>",
)
_NAME_BEGINS = re.compile(r"\s*[\w.-]*[ \t]*")


class XmlCalls:
    """A `cluster.http.parsers.tool_calls.CallBody`: the functions of one `<tool_call>`.

    types: argument types of each tool, by its name.
    opened: the text starts after `<function=`, because some models omit `<tool_call>`. Then only names of tools start a
        call.
    """

    def __init__(self, types: Mapping[str, ArgumentTypes], form: XmlForm = QWEN, opened: bool = False) -> None:
        self._types = types
        self._form = form
        self._held = form.opens if opened else ""
        self._only_tools = opened
        self._has_calls = False
        self._call: _Call | None = None

    def take(self, text: str, end: bool) -> tuple[list[CallPart], str | None]:
        """See `CallBody`."""
        parts: list[CallPart] = []
        text, self._held = self._held + text, ""
        while True:
            if self._call is not None:
                found, rest = self._call.take(text, end)
                parts += found
                if rest is None:
                    return parts, None
                self._call, text = None, rest
            head = self._form.head.match(text)
            if head is None:
                if not end and _may_begin_function(text, self._form):
                    self._held = text
                    return parts, None
                return parts, self._rest(text)
            name = head[1].strip()
            if not name or (self._only_tools and name not in self._types):
                return parts, self._rest(text)
            parts.append(CallPart(name, ""))
            self._has_calls, text = True, text[head.end() :]
            self._call = _Call(self._types.get(name, ArgumentTypes.unknown()), self._form)

    def _rest(self, text: str) -> str:
        """Return the text that belongs to no call, without the opening mark, which the caller shows."""
        return text.removeprefix(self._form.opens) if self._only_tools and not self._has_calls else text


class _Call:
    """The parameters of one function, from after its name to the function's end."""

    def __init__(self, types: ArgumentTypes, form: XmlForm) -> None:
        self._types = types
        self._form = form
        self._held = ""
        self._num = 0
        self._value: _Value | None = None

    def take(self, text: str, end: bool) -> tuple[list[CallPart], str | None]:
        """See `CallBody`."""
        arguments = ""
        text, self._held = self._held + text, ""
        while True:
            if self._value is not None:
                more, rest = self._value.take(text, end)
                arguments += more
                if rest is None:
                    return _parts(arguments), None
                self._value, text = None, rest
            _, mark, after = cut(text, (self._form.key, *self._form.ends))
            if mark in self._form.ends:
                arguments += "}" if self._num else "{}"
                return _parts(arguments), after if mark == self._form.function_end else f"{mark}{after}"
            closes = self._form.key_end.search(after)
            if mark is None or closes is None:
                self._held = "" if end else (mark or "") + after
                return _parts(arguments), None
            key, text = after[: closes.start()].strip().strip("\"'"), after[closes.end() :]
            arguments += (", " if self._num else "{") + json.dumps(key, ensure_ascii=False) + ": "
            self._num += 1
            self._value = _Value(self._types.of(key), self._form)


class _Value:
    """State of one parameter's value while it is parsed.

    types: its possible JSON types; empty: any.
    """

    def __init__(self, types: frozenset[str], form: XmlForm) -> None:
        self._types = types
        self._form = form
        self._is_text = types == {"string"}
        self._read: list[str] = []  # pieces of a value that is no text
        self._held = ""
        self._begun = False

    def take(self, text: str, end: bool) -> tuple[str, str | None]:
        """Return the JSON of further text of the value, and the rest of the text once it is complete."""
        text, self._held = self._held + text, ""
        if not self._begun:
            if not text and not end:
                return "", None
            text = text.removeprefix("\n") if self._form.has_breaks else text
            self._begun = True
            opening = '"' if self._is_text else ""
        else:
            opening = ""
        value, self._held, rest = _cut_value(text, end, self._form)
        if rest is None and end:
            value, self._held = value + self._held, ""
        if self._is_text:
            return opening + _escaped(value) + ("" if rest is None else '"'), rest
        self._read.append(value)
        if rest is None and not end:
            return "", None
        return json_value("".join(self._read), self._types), rest


def _cut_value(text: str, end: bool, form: XmlForm) -> tuple[str, str, str | None]:
    """Return value, text that may start its end, and text after its end or None.

    A value ends at its closing tag. If a model omits that, it ends with the call, which is less certain: text may
    contain `</function>`.
    """
    at = text.find("<")
    while at >= 0:
        tail = text[at:]
        rest: str | None = None
        if tail.startswith(form.value_end):
            rest = tail.removeprefix(form.value_end)
        elif tail.startswith(form.call_end):
            rest = tail
        elif form.unclosed is not None and (unclosed := form.unclosed.match(tail)):
            if unclosed["call_end"] or (end and unclosed.end() == len(tail)):
                rest = tail
            elif not end and form.call_end.startswith(tail[unclosed.end() :]):
                return _with_break(text[:at], tail, form)
        elif not end and any(mark.startswith(tail) for mark in (form.value_end, *form.ends)):
            return _with_break(text[:at], tail, form)
        if rest is not None:
            return text[:at].removesuffix("\n") if form.has_breaks else text[:at], "", rest
        at = text.find("<", at + 1)
    return _with_break(text, "", form)


def _with_break(value: str, tail: str, form: XmlForm) -> tuple[str, str, None]:
    """Split a final line break off `value` and put it before `tail`: it may be the break before the closing tag."""
    kept = value.removesuffix("\n") if form.has_breaks else value
    return kept, value[len(kept) :] + tail, None


def _may_begin_function(text: str, form: XmlForm) -> bool:
    if not form.opens:
        return _NAME_BEGINS.fullmatch(text) is not None
    stripped = text.lstrip()
    return form.opens.startswith(stripped[: len(form.opens)]) and not set(stripped) & {">", "\n"}


def _escaped(text: str) -> str:
    """Return the text escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _parts(arguments: str) -> list[CallPart]:
    return [CallPart(None, arguments)] if arguments else []


def types_of_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, ArgumentTypes]:
    """Return the argument types of each function, by its name. tools: in the chat template's form."""
    functions = (tool.get("function", tool) for tool in tools)
    return {function["name"]: ArgumentTypes.of_schema(function.get("parameters")) for function in functions}
