"""Parses tool calls whose arguments are neither JSON nor XML; each call is returned whole. Llama 3.2 and 4 (some
templates) use Python: `[NAME(KEY=VALUE, ...), ...]`. Gemma 4 uses `call:NAME{KEY:<|"|>TEXT<|"|>,KEY:NUMBER}`. Also
reads Python's literals where a model writes them in place of JSON."""

import ast
import json
import re
import warnings
from typing import Any

from aerie.cluster.http.parsers.json_calls import Parsed
from aerie.cluster.http.parsers.source import SPACES, Marks, Reading, Source
from aerie.cluster.http.text.json_text import parsed, without_surrogates

_PYTHON_CONSTANTS = {"true": True, "false": False, "null": None}


def literal_json(text: str) -> str:
    """Return the JSON of a literal, such as a dictionary. Raises ValueError: it is none, or JSON does not have it."""
    return _json(_value(_expression(text)))


def keywords_json(text: str) -> str:
    """Return the JSON of the arguments of a call with keywords alone. text: the call. Raises ValueError, as
    `literal_json`."""
    call = _expression(text)
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise ValueError("no call with keywords alone")
    return _json({_keyword(keyword): _value(keyword.value) for keyword in call.keywords})


def _expression(text: str) -> ast.expr:
    """Parse a Python expression. Raises ValueError."""
    try:
        with warnings.catch_warnings():  # of unknown escapes
            warnings.simplefilter("ignore")
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no expression") from None


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("** is no argument")
    return keyword.arg


def _value(node: ast.expr) -> Any:
    """Return the value of a Python literal that JSON can have. Raises ValueError for other expressions."""
    try:
        match node:
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [_value(part) for part in parts]
            case ast.Dict(keys=keys, values=values):
                named = [_value(key) if key is not None else None for key in keys]
                if not all(isinstance(key, str) for key in named):
                    raise ValueError("JSON's objects have texts as keys")
                return dict(zip(named, map(_value, values), strict=True))
            case ast.Name(id=name) if name in _PYTHON_CONSTANTS:
                return _PYTHON_CONSTANTS[name]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Constant(value=str() | int() | float() | None as value):
                return value
    except RecursionError:
        raise ValueError("nested too deeply") from None
    raise ValueError("no value of JSON")


def _json(value: Any) -> str:
    """Return JSON that `parsed` accepts. Raises ValueError."""
    try:
        written = without_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    parsed(written)
    return written


PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
GEMMA_END, GEMMA_QUOTE = "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[\w.]*")
_PYTHON_NAME = re.compile(r"[^\W\d][\w.]*")
_BETWEEN = re.compile(r"[,\s]*")
_PLAIN = re.compile(r"[^\"'\\()\[\]{}]*")
_GEMMA_ENDS = Marks((GEMMA_END,))
_GEMMA_HEAD = re.compile(r"\s*call:([\w.-]+)\s*(?={)")
_GEMMA_SCALAR = re.compile(r"[^,}\]]*")
_GEMMA_STRING = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')\s*(?=[,}\]])""", re.DOTALL)
_GEMMA_KEY = re.compile(r"([^:{}<,]*):")
_CONSTANTS = {"True": True, "False": False, "None": None}
_MAX_DEPTH = 64


def read_python_calls(source: Source, parsed: Parsed) -> Reading[None]:
    """Read an answer, which is either a list of calls from its start, or content."""
    source.record()
    yield from source.run(SPACES)
    yield from source.take(PYTHON_START)
    yield from source.run(SPACES)
    position: int | None = 0
    if (yield from source.take("[")):
        position = yield from _read_list(source, parsed)
    text = source.recorded(position or 0)
    if position is not None:
        parsed.text(text)
        return
    yield from source.run(SPACES)
    yield from source.take(PYTHON_END)
    source.record()
    yield from source.run(SPACES)
    text = source.recorded()
    parsed.text("" if source.is_over else text)


def _read_list(source: Source, parsed: Parsed) -> Reading[int | None]:
    """Read calls up to the list's end. Return None, or the position of text that is no call."""
    start = 0
    while True:
        yield from source.run(_BETWEEN)
        if parsed.num_calls:
            if (yield from source.take("]")):
                return None
            start = source.position
        name = yield from source.run(_NAME)
        yield from source.run(SPACES)
        if not _PYTHON_NAME.fullmatch(name) or (yield from source.peek()) != "(":
            return start
        arguments = yield from _parenthesized(source)
        yield from source.run(SPACES)
        if (yield from source.peek()) not in (",", "]"):  # such as a list comprehension
            return start
        try:
            written = keywords_json(f"f{arguments}")
        except ValueError:
            return start
        parsed.call(name)
        parsed.arguments(written)


def _parenthesized(source: Source) -> Reading[str]:
    """Read up to the bracket that closes the first one."""
    parts: list[str] = []
    depth, quote = 0, ""
    while True:
        parts.append((yield from source.run(_PLAIN)))
        mark = yield from source.peek()
        if mark == "\\":
            yield from source.has(2)
            mark = source.ahead(2)
        parts.append(mark)
        source.skip(len(mark))
        if quote:
            quote = "" if mark == quote else quote
        elif mark in ("'", '"'):
            quote = mark
        elif len(mark) == 1:
            depth += 1 if mark in "([{" else -1
        if not mark or (not depth and not quote):
            return "".join(parts)


def read_gemma_call(source: Source, parsed: Parsed) -> Reading[int | None]:
    """Read one call after Gemma 4's mark, up to the mark that ends it, or the end of the answer."""
    start = source.position
    parts: list[str] = []
    mark: str | None = ""
    while mark == "":
        text, mark = yield from _GEMMA_ENDS.find(source)
        parts.append(text)
    source.back(mark or "")
    call = gemma_call("".join(parts))
    if call is None:
        return start
    parsed.call(call[0])
    parsed.arguments(call[1])
    return None


def gemma_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of one call in Gemma 4's format; None if it is no call."""
    head = _GEMMA_HEAD.match(text)
    if head is None:
        return None
    try:
        value, end = _gemma_value(text, head.end(), _MAX_DEPTH)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    return None if text[end:].strip() else (head[1], written)


def _gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at `at`, and its end. Raises ValueError."""
    if not depth:
        raise ValueError("nested too deeply")
    at = _blank(text, at)
    if text.startswith(GEMMA_QUOTE, at):
        end = text.index(GEMMA_QUOTE, at + len(GEMMA_QUOTE))
        return text[at + len(GEMMA_QUOTE) : end], end + len(GEMMA_QUOTE)
    if text[at : at + 1] not in ("{", "["):
        scalar = _GEMMA_STRING.match(text, at) or _GEMMA_SCALAR.match(text, at)
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
    match = _GEMMA_KEY.match(text, at)
    if match is None:
        raise ValueError("a value without a name")
    return match[1].strip().strip("\"'"), match.end()


def _scalar(text: str) -> Any:
    """Return the value of a number, constant or quoted string; other text is a string itself."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return json.loads(literal_json(text)) if text[:1] in ("'", '"') else parsed(text)
    except ValueError:
        return text


def _blank(text: str, at: int) -> int:
    match = SPACES.match(text, at)
    assert match is not None
    return match.end()
