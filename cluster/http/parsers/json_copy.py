"""Copies JSON from a model's text while it arrives, repaired.

Repaired: raw control characters, unknown escapes and halves of surrogate pairs in strings; single quotes; Python's
constants; unquoted words; commas and brackets that are missing, superfluous or the wrong ones. A character that JSON
has only in strings, such as the `<` of a closing mark, ends the copy and closes what is open; so does the end of the
answer.
"""

import json
import math
import re
from collections.abc import Callable

from aerie.cluster.http.parsers.source import SPACES, Reading, Source
from aerie.cluster.http.text.json_text import MAX_NESTING

CLOSERS = {"{": "}", "[": "]"}
QUOTES = ("'", '"')
CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
WORD = re.compile(r"""[^\s,:{}\[\]"'<|]*""")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"""[^'"\\\x00-\x1f]*""")}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_DIGITS = 1000  # Python's json refuses whole numbers of more than 4,300
_CODE = re.compile(r"\\u([0-9a-fA-F]{0,4})")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
Write = Callable[[str], object]


def read_string(source: Source, quote: str, write: Write) -> Reading[bool]:
    """Copy a string's characters as JSON has them, from after its opening quotation mark to after its closing one.
    Return whether there is one. Each text written has whole escapes."""
    plain = _PLAIN[quote]
    while True:
        if text := source.available(plain):
            write(text)
        character = yield from source.peek()
        if character == "\\":
            write((yield from _escape(source)))
        elif character in ("", quote):
            source.skip(len(character))
            return bool(character)
        elif character < " " or character == '"':
            source.skip()
            write(json.dumps(character)[1:-1])


def _escape(source: Source) -> Reading[str]:
    """Read an escape, and return it as JSON has it; "" for one that the end of the answer cuts."""
    if not (yield from source.has(2)):
        source.skip()
        return ""
    character = source.ahead(2)[1]
    if character in '"\\/bfnrt':
        source.skip(2)
        return "\\" + character
    if character == "'":
        source.skip(2)
        return character
    if character != "u":
        source.skip()
        return "\\\\"
    yield from source.has(6)
    code = _CODE.match(source.ahead(6))
    assert code is not None
    source.skip(len(code[0]) if len(code[1]) == 4 or source.ahead(6) == code[0] else 1)
    if len(code[1]) < 4:
        return "" if source.is_over else "\\\\"
    if code[1][0] not in "dD" or code[1][1] in "01234567":
        return code[0]
    if code[1][1] in "89abAB" and (yield from source.has(6)) and _LOW.match(source.ahead(6)):
        low = source.ahead(6)
        source.skip(6)
        return code[0] + low
    return "\\ufffd"


def read_key(source: Source) -> Reading[str | None]:
    """Read a key, and return it as JSON; None if it is no key or the answer ends in it."""
    first = yield from source.peek()
    if first not in QUOTES:
        word = yield from source.run(WORD)
        return json.dumps(word, ensure_ascii=False) if word else None
    parts: list[str] = []
    source.skip()
    return f'"{"".join(parts)}"' if (yield from read_string(source, first, parts.append)) else None


def _scalar(word: str) -> str:
    """Return the JSON of a value without quotation marks; a string if it is neither number nor constant."""
    if _NUMBER.fullmatch(word) and len(word) <= _MAX_DIGITS and math.isfinite(float(word)):
        return word
    return CONSTANTS.get(word) or json.dumps(word, ensure_ascii=False)


class JsonCopy:
    """Copies one object or list, repaired: what was written is JSON once `read` returns.

    White space, commas and keys are held back until the value after them begins, and so can be left out.
    """

    def __init__(self, source: Source, write: Write) -> None:
        self._source = source
        self._write = write
        self._closers: list[str] = []
        self._num = {"}": 0, "]": 0}  # number of each bracket in `_closers`
        self._gap: list[str] = []  # held back
        self.end = source.position  # after what was written
        self._expects = "value"  # or "key", or "more": a comma or a bracket

    def read(self) -> Reading[bool]:
        """Return whether the model closed the value. The source is at its opening bracket."""
        going_on = yield from self._value((yield from self._source.peek()))
        self.end = self._source.position
        while going_on and self._closers:
            self._gap.append((yield from self._source.run(SPACES)))
            going_on = yield from self._next()
            self.end = self.end if self._gap else self._source.position
        self._write("".join(reversed(self._closers)))
        return not self._closers

    def _next(self) -> Reading[bool]:
        """Read the next part; return whether there is one that fits."""
        character = yield from self._source.peek()
        in_object = self._closers[-1] == "}"
        if character in ("}", "]"):
            self._close(character)
            return True
        if character == ",":
            self._source.skip()
            if self._expects == "value" and in_object:
                self._put("null")
            if self._expects == "more":
                self._gap.append(",")
                self._expects = "key" if in_object else "value"
            return True
        if self._expects == "more":
            if not in_object or character not in QUOTES:
                return False
            self._gap, self._expects = [", "], "key"
        if self._expects == "key":
            return (yield from self._read_key())
        return (yield from self._value(character))

    def _read_key(self) -> Reading[bool]:
        """Read a key and its colon; return whether a value may follow. A missing colon gives the key the value null."""
        key = yield from read_key(self._source)
        if key is None:
            return False
        spaces = yield from self._source.run(SPACES)
        self._gap += [key, spaces, ":"]
        self._expects = "value"
        if (yield from self._source.take(":")):
            return True
        if not self._source.is_over:
            self._put(" null")
        return not self._source.is_over

    def _value(self, character: str) -> Reading[bool]:
        """Read a value that is none of object and list, or the bracket that opens one."""
        if character in CLOSERS:
            if len(self._closers) == MAX_NESTING:
                return False
            self._source.skip()
            self._put(character)
            self._closers.append(CLOSERS[character])
            self._num[CLOSERS[character]] += 1
            self._expects = "key" if character == "{" else "value"
            return True
        if character in QUOTES:
            self._source.skip()
            self._put('"')
            is_closed = yield from read_string(self._source, character, self._write)
            self._write('"')
            return is_closed
        word = yield from self._source.run(WORD)
        if not word or self._source.is_over:  # the end may have cut a number
            return False
        self._put(_scalar(word))
        return True

    def _put(self, text: str) -> None:
        """Write what was held back, and `text`."""
        self._write("".join(self._gap) + text)
        self._gap, self._expects = [], "more"

    def _close(self, closer: str) -> None:
        """Read a closing bracket, and close all open ones up to it. A bracket that closes nothing is skipped."""
        self._source.skip()
        if not self._num[closer]:
            return
        if self._expects == "value" and self._closers[-1] == "}":
            self._put("null")
        self._gap = [part for part in self._gap if part != "," and part != ", "]
        while self._closers:
            last = self._closers.pop()
            self._num[last] -= 1
            self._put(last)
            if last == closer:
                break
