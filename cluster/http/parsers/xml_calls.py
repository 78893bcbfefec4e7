"""Tool calls written as XML (Qwen3-Coder, Qwen3.5 and later), turned into JSON arguments while they are written:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is text or JSON, and only the tool's schema says which (`cluster.http.parsers.argument_types`). Text is
streamed; any other value comes out whole.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.http.parsers.argument_types import ArgumentTypes, json_value
from cluster.http.parsers.json_calls import CallPart
from cluster.http.parsers.marks import cut

_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_FUNCTION_MARK = "<function="
_PARAMETER, _VALUE_END, _FUNCTION_END, _CALL_END = "<parameter=", "</parameter>", "</function>", "</tool_call>"
_ENDS_UNCLOSED_VALUE = re.compile(r"</function>\s*(?P<call_end></tool_call>)?")


class XmlCalls:
    """A `cluster.http.parsers.tool_calls.CallBody`: the functions of one `<tool_call>`.

    types: of the arguments of each tool, by the tool's name.
    opened: the text begins after `<function=`, as some models leave `<tool_call>` out. Only names of tools count then.
    """

    def __init__(self, types: Mapping[str, ArgumentTypes], opened: bool = False) -> None:
        self._types = types
        self._held = _FUNCTION_MARK if opened else ""
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
            head = _FUNCTION.match(text)
            if head is None:
                if not end and _may_begin_function(text):
                    self._held = text
                    return parts, None
                return parts, self._rest(text)
            name = head[1].strip()
            if not name or (self._only_tools and name not in self._types):
                return parts, self._rest(text)
            parts.append(CallPart(name, ""))
            self._has_calls, text = True, text[head.end() :]
            self._call = _Call(self._types.get(name, ArgumentTypes.unknown()))

    def _rest(self, text: str) -> str:
        """What belongs to no call; without the mark that opened this body, which its owner shows."""
        return text.removeprefix(_FUNCTION_MARK) if self._only_tools and not self._has_calls else text


class _Call:
    """The parameters of one function, from after its name to `</function>`."""

    def __init__(self, types: ArgumentTypes) -> None:
        self._types = types
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
            _, mark, after = cut(text, (_PARAMETER, _FUNCTION_END, _CALL_END))
            if mark in (_FUNCTION_END, _CALL_END):
                arguments += "}" if self._num else "{}"
                return _parts(arguments), after if mark == _FUNCTION_END else mark + after
            if mark is None or ">" not in after:
                self._held = "" if end else (mark or "") + after
                return _parts(arguments), None
            key, _, text = after.partition(">")
            arguments += (", " if self._num else "{") + json.dumps(key.strip(), ensure_ascii=False) + ": "
            self._num += 1
            self._value = _Value(self._types.of(key.strip()))


class _Value:
    """One parameter's value. The line breaks after its opening mark and before its closing one are the form's.

    types: of JSON that it may have; empty: any.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._is_text = types == {"string"}
        self._read: list[str] = []  # of a value that is no text
        self._held = ""
        self._begun = False

    def take(self, text: str, end: bool) -> tuple[str, str | None]:
        """JSON of more of the value, and the rest of the text once it is complete."""
        text, self._held = self._held + text, ""
        if not self._begun:
            if not text and not end:
                return "", None
            text = text.removeprefix("\n")
            self._begun = True
            opening = '"' if self._is_text else ""
        else:
            opening = ""
        value, self._held, rest = _cut_value(text, end)
        if rest is None and end:
            value, self._held = value + self._held, ""
        if self._is_text:
            return opening + _escaped(value) + ("" if rest is None else '"'), rest
        self._read.append(value)
        if rest is None and not end:
            return "", None
        return json_value("".join(self._read), self._types), rest


def _cut_value(text: str, end: bool) -> tuple[str, str, str | None]:
    """(value, what may begin its end, what follows its end or None).

    A value ends at `</parameter>`. Where a model leaves that out, it ends where the call does, which is less sure: text
    may have `</function>` in it.
    """
    at = text.find("<")
    while at >= 0:
        tail = text[at:]
        rest: str | None = None
        if tail.startswith(_VALUE_END):
            rest = tail.removeprefix(_VALUE_END)
        elif tail.startswith(_CALL_END):
            rest = tail
        elif unclosed := _ENDS_UNCLOSED_VALUE.match(tail):
            if unclosed["call_end"] or (end and unclosed.end() == len(tail)):
                rest = tail
            elif not end and _CALL_END.startswith(tail[unclosed.end() :]):
                return _with_break(text[:at], tail)
        elif not end and any(mark.startswith(tail) for mark in (_VALUE_END, _CALL_END, _FUNCTION_END)):
            return _with_break(text[:at], tail)
        if rest is not None:
            return text[:at].removesuffix("\n"), "", rest
        at = text.find("<", at + 1)
    return _with_break(text, "")


def _with_break(value: str, tail: str) -> tuple[str, str, None]:
    """A line break in front of `tail` may be the one before the end."""
    kept = value.removesuffix("\n")
    return kept, value[len(kept) :] + tail, None


def _may_begin_function(text: str) -> bool:
    stripped = text.lstrip()
    return _FUNCTION_MARK.startswith(stripped[: len(_FUNCTION_MARK)]) and not set(stripped) & {">", "\n"}


def _escaped(text: str) -> str:
    """As inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _parts(arguments: str) -> list[CallPart]:
    return [CallPart(None, arguments)] if arguments else []


def types_of_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, ArgumentTypes]:
    """By the name of each function. tools: as the chat template gets them."""
    functions = (tool.get("function", tool) for tool in tools)
    return {function["name"]: ArgumentTypes.of_schema(function.get("parameters")) for function in functions}
