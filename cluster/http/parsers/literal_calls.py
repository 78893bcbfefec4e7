"""Parses tool calls whose arguments are neither JSON nor XML; each call is returned whole. Llama 3.2 and 4 (some
templates) use Python: `[NAME(KEY=VALUE, ...), ...]`. Gemma 4 uses `call:NAME{KEY:<|"|>TEXT<|"|>,KEY:NUMBER}`."""

import ast
import json
import re
from typing import Any

from cluster.http.parsers.json_calls import BracketSpan, CallPart
from cluster.http.parsers.marks import cut
from cluster.http.text.json_text import parsed, without_surrogates

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
GEMMA_END, GEMMA_QUOTE = "<tool_call|>", '<|"|>'
_LIST_BEGINS = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*)?")
_LIST = re.compile(r"\[\s*(?=[A-Za-z_][\w.]*\s*\()")
_BETWEEN = ", \t\r\n"
_STRUCTURE = re.compile(r"[\"'\\()\[\]{}]")
_GEMMA_HEAD = re.compile(r"\s*call:([\w.-]+)\s*(?={)")
_GEMMA_SCALAR = re.compile(r"[^,}\]]*")
_GEMMA_KEY = re.compile(r"\s*([^:{}<,]*):")
_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 64


class PythonCalls:
    """An answer is either a list of calls from its start, or content."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "start"  # then "list" and "end", or "content"
        self._call = ""  # the current call, as far as it has arrived
        self._span = BracketSpan(_STRUCTURE)

    def take(self, text: str, end: bool) -> tuple[str, list[CallPart]]:
        """See `cluster.http.parsers.tool_calls.CallReader`."""
        if self._state == "content":
            return text, []
        self._held += text
        if self._state == "start":
            self._start()
        parts = self._calls() if self._state == "list" else []
        if self._state == "end":
            left = self._held.lstrip()
            if not end and PYTHON_END.startswith(left):
                return "", parts
            self._state, left = "content", left.removeprefix(PYTHON_END)
            return left if left.strip() else "", parts
        if end or self._state == "content":
            self._state = "content"
            return self._call + self._held, parts
        return "", parts

    def _start(self) -> None:
        listed = self._held.lstrip()
        if PYTHON_START.startswith(listed):
            return
        listed = listed.removeprefix(PYTHON_START).lstrip()
        head = _LIST.match(listed)
        if head is not None:
            self._state, self._held = "list", listed[head.end() :]
        elif listed and _LIST_BEGINS.fullmatch(listed) is None:
            self._state = "content"

    def _calls(self) -> list[CallPart]:
        """Return the complete calls."""
        parts: list[CallPart] = []
        while True:
            if not self._call:
                self._held = self._held.lstrip(_BETWEEN)
                if self._held.startswith("]"):
                    self._state, self._held = "end", self._held[1:]
                    return parts
            part, rest = self._span.take(self._held)
            self._call, self._held = self._call + part, rest or ""
            if rest is None:
                return parts
            call = python_call(self._call)
            if call is None:
                self._state = "content"
                return parts
            parts += call
            self._call, self._span = "", BracketSpan(_STRUCTURE)


def python_call(text: str) -> list[CallPart] | None:
    """Return the parts of one call in Python; None if it is no call, such as one with positional arguments."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments = {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords if keyword.arg}
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return [CallPart(ast.unparse(node.func), ""), CallPart(None, without_surrogates(written))]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_python_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            named = [_python_value(key) if key is not None else None for key in keys]
            if not all(isinstance(key, str) for key in named):
                raise ValueError("JSON's objects have texts as keys")
            return dict(zip(named, map(_python_value, values), strict=True))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
    raise ValueError("no value of JSON")


class GemmaBody:
    """Reads one call after Gemma 4's mark. See `cluster.http.parsers.tool_calls.CallBody`."""

    def __init__(self) -> None:
        self._held = ""

    def take(self, text: str, end: bool) -> tuple[list[CallPart], str | None]:
        """See `cluster.http.parsers.tool_calls.CallBody`."""
        self._held += text
        before, mark, after = cut(self._held, (GEMMA_END,))
        if mark is None and not end:
            return [], None
        whole, rest = (before, after) if mark else (self._held, "")
        parts = gemma_call(whole)
        return (parts, rest) if parts is not None else ([], self._held)


def gemma_call(text: str) -> list[CallPart] | None:
    """Return the parts of one call in Gemma 4's format; None if it is no call."""
    head = _GEMMA_HEAD.match(text)
    if head is None:
        return None
    try:
        value, end = _gemma_value(text, head.end(), _MAX_DEPTH)
    except ValueError:
        return None
    if text[end:].strip():
        return None
    return [CallPart(head[1], ""), CallPart(None, json.dumps(value, ensure_ascii=False))]


def _gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at `at`, and its end. Raises ValueError."""
    if not depth:
        raise ValueError("nested too deeply")
    at = _blank(text, at)
    if text.startswith(GEMMA_QUOTE, at):
        end = text.index(GEMMA_QUOTE, at + len(GEMMA_QUOTE))
        return text[at + len(GEMMA_QUOTE) : end], end + len(GEMMA_QUOTE)
    if text[at : at + 1] not in ("{", "["):
        scalar = _GEMMA_SCALAR.match(text, at)
        assert scalar is not None
        return _scalar(scalar[0].strip()), scalar.end()
    is_object, closes = text[at] == "{", "}" if text[at] == "{" else "]"
    members: list[tuple[str, Any]] = []
    at = _blank(text, at + 1)
    while not text.startswith(closes, at):
        key = ""
        if is_object:
            key, at = _gemma_key(text, at)
        value, at = _gemma_value(text, at, depth - 1)
        members.append((key, value))
        at = _blank(text, at)
        if text.startswith(",", at):
            at = _blank(text, at + 1)
        elif not text.startswith(closes, at):
            raise ValueError("not closed")
    return (dict(members) if is_object else [value for _, value in members]), at + 1


def _gemma_key(text: str, at: int) -> tuple[str, int]:
    """Return a name, in quotes or not, and the start of its value."""
    if text.startswith(GEMMA_QUOTE, at):
        name, at = _gemma_value(text, at, 1)
        at = _blank(text, at)
        if not text.startswith(":", at):
            raise ValueError("a name without a value")
        return str(name), at + 1
    found = _GEMMA_KEY.match(text, at)
    if found is None:
        raise ValueError("a value without a name")
    return found[1].strip(), found.end()


def _scalar(text: str) -> Any:
    try:
        value = parsed(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | None) else text


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
