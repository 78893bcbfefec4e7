"""Converts streamed XML tool calls to JSON arguments. Qwen3-Coder, Qwen3.5 and later:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Other families have other tags, see `XmlForm`. A value is text or JSON, and only the tool's schema says which
(`aerie.cluster.http.parsers.tool_calls`). Text is streamed; other values are written whole, and left out if the
answer ends in them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from aerie.cluster.http.parsers.json_calls import NAME, Parsed
from aerie.cluster.http.parsers.json_copy import Write
from aerie.cluster.http.parsers.source import SPACES, Marks, Reading, Source
from aerie.cluster.http.parsers.tool_calls import ArgumentTypes, CallBody, json_value


@dataclass(frozen=True)
class XmlForm:
    """The tags of a model family.

    opens: start of a function, before its name. "": the name is after `call`.
    name, name_end: characters of a name, and the text after it.
    key, key_end, value: before a parameter's name, after it, and before its value. "": none.
    value_end, function_end: closing tags; "": none.
    call, call_end: around the functions.
    has_breaks: a line break after a value's opening tag, and one before its closing one, belong to the form.
    """

    opens: str
    name: re.Pattern[str]
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    function_end: str
    call: str
    call_end: str
    has_breaks: bool = False

    @cached_property
    def next_marks(self) -> Marks:
        """Match the text between parameters, or after the last one. Another call's start ends a call without an end."""
        marks = (self.key, self.value_end, self.opens, self.function_end, self.call, self.call_end)
        return Marks(filter(None, marks))

    @cached_property
    def value_marks(self) -> Marks:
        """What may end a value."""
        return Marks(filter(None, (self.value_end, self.function_end, self.call_end)))

    @cached_property
    def key_marks(self) -> Marks:
        """What ends a parameter's name, or shows that it is none."""
        return Marks((self.key_end, *filter(None, (self.function_end, self.call_end))))


QWEN = XmlForm(
    opens="<function=",
    name=re.compile(r"[^<>\n]*"),
    name_end=">",
    key="<parameter=",
    key_end=">",
    value="",
    value_end="</parameter>",
    function_end="</function>",
    call="<tool_call>",
    call_end="</tool_call>",
    has_breaks=True,
)
SEED = replace(QWEN, call="<seed:tool_call>", call_end="</seed:tool_call>", has_breaks=False)
MINIMAX = XmlForm(
    opens="<invoke name=",
    name=re.compile(r"[^<>\n]*"),
    name_end=">",
    key="<parameter name=",
    key_end=">",
    value="",
    value_end="</parameter>",
    function_end="</invoke>",
    call="<minimax:tool_call>",
    call_end="</minimax:tool_call>",
)
GLM = XmlForm(
    opens="",
    name=re.compile(r"[\w.-]*"),
    name_end="",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    function_end="",
    call="<tool_call>",
    call_end="</tool_call>",
)


def xml_calls(types: Mapping[str, ArgumentTypes], form: XmlForm = QWEN, opened: bool = False) -> CallBody:
    """Return a reader of the functions of one call.

    types: argument types of each tool, by its name.
    opened: the text starts after `<function=`, because some models omit `<tool_call>`. Then only names of tools start a
        call.
    """

    def read(source: Source, parsed: Parsed) -> Reading[int | None]:
        """Read functions up to text that is none."""
        is_first = True
        while True:
            start = source.position
            if not (is_first and opened):
                yield from source.run(SPACES)
                if form.opens and not (yield from source.take(form.opens)):
                    return start if is_first else None
            name = yield from _name(source, form)
            if not name or (opened and name not in types):
                return start
            parsed.call(name)
            position = yield from _Function(source, parsed, form, types.get(name, ArgumentTypes.unknown())).read()
            if position is not None or not form.opens:
                return position
            is_first = False

    return read


def _name(source: Source, form: XmlForm) -> Reading[str]:
    """Read a function's name; return "" if it is none."""
    name = (yield from source.run(form.name)).strip().strip("\"'")
    if form.name_end:
        is_name = yield from source.take(form.name_end)
    else:
        yield from source.run(SPACES)
        mark = (yield from form.next_marks.take(source)) if name else ""
        source.back(mark)
        is_name = mark in (form.key, form.call_end)
    return name if is_name and NAME.fullmatch(name) else ""


class _Function:
    """The parameters of one function, from after its name to the function's end."""

    def __init__(self, source: Source, parsed: Parsed, form: XmlForm, types: ArgumentTypes) -> None:
        self._source = source
        self._parsed = parsed
        self._form = form
        self._types = types
        self._opens = "{"  # written before the next parameter
        self._has_ended = False

    def read(self) -> Reading[int | None]:
        """Read parameters up to the function's closing tag, or to text in place of a tag. Tags that end the call are
        left unread. Return the position of a tag that begins no parameter; None if there is none."""
        form, source = self._form, self._source
        position = None
        while not self._has_ended:
            text, mark = yield from form.next_marks.find(source)
            if text.strip():
                self._parsed.is_cut = source.is_over and form.next_marks.may_begin(text.strip())
                source.back("" if self._parsed.is_cut else text.lstrip() + (mark or ""))
                break
            if mark == form.key:
                start = source.position - len(mark)
                if not (yield from self._parameter()):
                    position = start
                    break
            elif mark is None:
                self._parsed.is_cut = True
                break
            elif mark not in ("", form.value_end):
                if mark != form.function_end:
                    source.back(mark)
                break
        self._parsed.arguments("}" if self._opens == ", " else "{}")
        return position

    def _parameter(self) -> Reading[bool]:
        """Read a parameter after its opening mark; return False if other text follows the mark. True also if the end of
        the answer cuts the parameter."""
        form, source = self._form, self._source
        parts: list[str] = []
        mark: str | None = ""
        while mark == "":  # further text of the key may follow
            text, mark = yield from form.key_marks.find(source)
            parts.append(text)
        if mark != form.key_end:
            source.back(mark or "")
            self._parsed.is_cut = mark is None
            return mark is None
        if form.value:
            yield from source.run(SPACES)
            if not (yield from source.take(form.value)):
                self._parsed.is_cut = source.is_over
                return source.is_over
        if form.has_breaks:
            yield from source.take("\n")
        key = "".join(parts).strip().strip("\"'")
        yield from self._value(json.dumps(key, ensure_ascii=False), self._types.of(key))
        return True

    def _write_text(self, text: str) -> None:
        """Write a part of a string to the arguments."""
        self._parsed.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _value(self, key: str, types: frozenset[str]) -> Reading[None]:
        """Read the value of `key`, which is JSON. types: its possible JSON types; empty: any."""
        is_text = types == {"string"}
        opens = f"{self._opens}{key}: "
        parts: list[str] = []
        if is_text:
            self._parsed.arguments(opens + '"')
            self._opens = ", "
        is_whole = yield from self._text(self._write_text if is_text else parts.append)
        if is_text:
            self._parsed.arguments('"')
        elif is_whole:
            self._parsed.arguments(opens + json_value("".join(parts), types))
            self._opens = ", "

    def _text(self, write: Write) -> Reading[bool]:
        """Write the text of a value. Return whether the value ends; else the end of the answer cuts it.

        A value ends at its closing tag. If a model omits that, it ends with the call, which is less certain: text may
        contain `</function>`. That tag ends the value only if the call's end or nothing follows it.
        """
        form, source = self._form, self._source
        text = ""
        while True:
            more, mark = yield from form.value_marks.find(source)
            if mark is None:
                write(text)
                self._parsed.is_cut = self._has_ended = True
                return False
            text += more
            break_at = len(text) - (form.has_breaks and text.endswith("\n"))
            write(text[:break_at])
            text = text[break_at:]
            if mark == form.value_end:
                return True
            if mark == form.call_end:
                source.back(mark)
                return True
            if mark:  # the function's closing tag, or text of the value
                spaces = yield from source.run(SPACES)
                if source.is_over:
                    self._has_ended = True
                elif (yield from source.take(form.call_end)):
                    source.back(form.call_end)
                    self._has_ended = True
                if self._has_ended:
                    return True
                text += mark + spaces


def types_of_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, ArgumentTypes]:
    """Return the argument types of each function, by its name. tools: in the chat template's form."""
    functions = (tool.get("function", tool) for tool in tools)
    return {function["name"]: ArgumentTypes.from_schema(function.get("parameters")) for function in functions}
