"""Parses streamed tool calls in JSON. Returns the name once it is known, and arguments character by character as the
model writes them."""

import json
import re
from typing import NamedTuple

from cluster.http.text.json_text import parsed_repaired

_STRUCTURE = re.compile(r'["\\{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]]")
_KEY = re.compile(r'\s*[{,]?\s*("(?:[^"\\]|\\.)*")\s*:\s*')
_OBJECT_END = re.compile(r"\s*}")
_BETWEEN = re.compile(r"[\s,;]*")
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
CALL_KEYS = ARGUMENT_KEYS | {"name", "type", "id", "function"}


class CallPart(NamedTuple):
    """name: starts a call. arguments: further JSON text."""

    name: str | None
    arguments: str


class BracketSpan:
    """Finds, in streamed text, the bracket that closes the first one, or the end of a string before any bracket.

    structure: finds brackets, the quotation marks of strings, and backslashes."""

    def __init__(self, structure: re.Pattern[str] = _STRUCTURE) -> None:
        self._structure = structure
        self._depth = 0
        self._quote = ""  # the mark that ends the current string
        self._escaped = False

    def take(self, text: str) -> tuple[str, str | None]:
        """Return the part of `text` that belongs to the span, and the rest once it is complete, else None."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = self._structure.search(text, at)
            if found is None:
                break
            mark, at = found[0], found.end()
            if mark == "\\":
                self._escaped = bool(self._quote)
            elif self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "\"'":
                self._quote = mark
            else:
                self._depth += 1 if mark in "([{" else -1
            if self._depth <= 0 and not self._quote:
                return text[:at], text[at:]
        return text, None


class JsonSpan:
    """Finds the end of one JSON value in streamed text. Malformed JSON ends anywhere or not at all."""

    def __init__(self) -> None:
        self._brackets: BracketSpan | None = None
        self._started = False

    def take(self, text: str) -> tuple[str, str | None]:
        """See `BracketSpan.take`. White space before the value is dropped."""
        if not self._started:
            text = text.lstrip()
            if not text:
                return "", None
            self._started = True
            self._brackets = BracketSpan() if text[0] in '{["' else None
        if self._brackets is not None:
            return self._brackets.take(text)
        end = _SCALAR_END.search(text)
        return (text, None) if end is None else (text[: end.start()], text[end.start() :])


class CallObject:
    """Reads one object {"name": ..., "arguments" or "parameters": {...}}, with keys in any order."""

    def __init__(self) -> None:
        self._text = ""
        self._raw = ""
        self._key: str | None = None
        self._value = ""
        self._span = JsonSpan()
        self._named = False
        self._early = ""  # arguments before the name
        self._has_arguments = False
        self.failed = False

    @property
    def raw(self) -> str:
        """Return all text read, for an object that is no call."""
        return self._raw + self._text

    @property
    def named(self) -> bool:
        """Whether the name was returned."""
        return self._named

    def take(self, text: str) -> tuple[list[CallPart], str | None]:
        """Return parts of the call, and the rest of the text once the object is complete. Sets `failed` if it is no
        call."""
        parts: list[CallPart] = []
        self._text += text
        while not self.failed:
            if self._key is None:
                rest = self._next_key()
                if rest is not None:
                    return [*parts, *self._close()], rest
                if self._key is None:
                    break
            part, value_rest = self._span.take(self._text)
            self._raw += self._text[: len(self._text) - len(value_rest or "")]
            self._text = value_rest or ""
            parts += self._value_part(part, value_rest is not None)
            if value_rest is None:
                break
        return parts, None

    def _next_key(self) -> str | None:
        """Read the next key if it is complete. Return the rest of the text at the object's end."""
        end = _OBJECT_END.match(self._text)
        if end is not None and self._raw:
            rest = self._text[end.end() :]
            self._raw += self._text[: end.end()]
            self._text = ""
            return rest
        found = _KEY.match(self._text)
        if found is None:
            # Before a key's quotation mark there is at most white space and one comma or brace.
            self.failed = (
                len(self._text.lstrip().lstrip("{,").lstrip()) > 0
                and (self._text.lstrip().lstrip("{,").lstrip()[0]) != '"'
            )
            return None
        try:
            key = json.loads(found[1])
        except ValueError:
            key = ""
        self._key, self._value, self._span = key, "", JsonSpan()
        self.failed = key not in CALL_KEYS
        if not self.failed:
            self._raw += self._text[: found.end()]
            self._text = self._text[found.end() :]
        return None

    def _value_part(self, part: str, complete: bool) -> list[CallPart]:
        """Return the call parts in the next text `part` of a value."""
        parts = []
        if self._key in ARGUMENT_KEYS:
            self._has_arguments = True
            if self._named and part:
                parts.append(CallPart(None, part))
            elif part:
                self._early += part
        else:
            self._value += part
            if complete and self._key == "name":
                parts += self._name()
        if complete:
            self._key = None
        return parts

    def _name(self) -> list[CallPart]:
        try:
            name = parsed_repaired(self._value)
        except ValueError:
            name = None
        if not isinstance(name, str):
            self.failed = True
            return []
        self._named = True
        return [CallPart(name, ""), *([CallPart(None, self._early)] if self._early else [])]

    def _close(self) -> list[CallPart]:
        if not self._named:
            self.failed = True
            return []
        return [] if self._has_arguments else [CallPart(None, "{}")]


class CallList:
    """Consecutive call objects, in an array or separated by ";". num: maximum number; None: no limit."""

    def __init__(self, num: int | None = None) -> None:
        self._left = num
        self._object: CallObject | None = None
        self._held = ""
        self._in_array = False

    def take(self, text: str, end: bool) -> tuple[list[CallPart], str | None]:
        """Return parts of calls and, once the calls are over, the text after them. end: no text follows."""
        parts: list[CallPart] = []
        text, self._held = self._held + text, ""
        while True:
            if self._object is None:
                between = _BETWEEN.match(text)
                assert between is not None
                at = between.end()
                if at == len(text):
                    self._held = text
                    return parts, (text if end else None)
                if text[at] == "[" and not self._in_array:
                    self._in_array, text = True, text[at + 1 :]
                    continue
                if text[at] == "]" and self._in_array:
                    return parts, text[at + 1 :]
                if text[at] != "{" or self._left == 0:
                    return parts, text
                self._object, text = CallObject(), text[at:]
            found, rest = self._object.take(text)
            parts += found
            if self._object.failed and not self._object.named:
                raw, self._object = self._object.raw, None
                return parts, raw + (rest or "")
            if rest is None:
                unfinished = self._object.raw if end and not self._object.named else None
                return parts, unfinished
            self._object, text = None, rest
            if self._left is not None:
                self._left -= 1
                if self._left == 0 and not self._in_array:
                    return parts, text
