"""Reads streamed tool calls in JSON, as models write it. The arguments that a client receives are a JSON object, and
arrive while the model writes them.

Values are repaired by `aerie.cluster.http.parsers.json_copy`. Arguments may be JSON text, or `null`. Keys that no call
has are skipped with their values. A character that JSON has only in strings ends a call, whose braces are missing then.
"""

import json
import re
from typing import NamedTuple

from aerie.cluster.http.parsers.json_copy import (
    CLOSERS,
    CONSTANTS,
    QUOTES,
    WORD,
    JsonCopy,
    Write,
    read_key,
    read_string,
)
from aerie.cluster.http.parsers.source import SPACES, Reading, Running, Source

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OWN_KEYS = ARGUMENT_KEYS | {"name", "type", "id", "index", "function"}
NAME = re.compile(r"[^\s<>{}\"']+")  # a function's
_BETWEEN_KEYS = re.compile(r"[\s,]*")
_BETWEEN_CALLS = re.compile(r"[\s,;]*")
_AFTER_CALLS = re.compile(r"[\s,;}\]]*")


class CallPart(NamedTuple):
    """The next part of the calls.

    name: starts a call.
    arguments: further JSON text.
    """

    name: str | None
    arguments: str


class Parsed:
    """What readers found: content, and parts of calls.

    num_calls: calls that have begun.
    is_cut: the answer ended within the arguments of the last call.
    """

    def __init__(self) -> None:
        self._content: list[str] = []
        self._parts: list[CallPart] = []
        self.num_calls = 0
        self.is_cut = False

    def text(self, text: str) -> None:
        """Add content."""
        self._content.append(text)

    def call(self, name: str) -> None:
        """Begin a call."""
        self.num_calls += 1
        self.is_cut = False
        self._parts.append(CallPart(name, ""))

    def arguments(self, text: str) -> None:
        """Add JSON text to the arguments of the last call."""
        if text:
            self._parts.append(CallPart(None, text))

    def taken(self) -> tuple[str, list[CallPart]]:
        """Return what was found since the last time."""
        content, parts = "".join(self._content), self._parts
        self._content, self._parts = [], []
        return content, parts


class Arguments:
    """Reads the arguments of one call: an object, the same as JSON text in a string, or nothing (`null`, an empty
    string).

    has_any: whether anything was written.
    is_read: whether there are arguments.
    is_complete: whether the model ended the arguments.
    end: the position after what was understood.
    rest: what follows that in the string.
    """

    def __init__(self, source: Source, write: Write) -> None:
        self._source = source
        self._write_on = write
        self.has_any = False
        self.is_read = False
        self.is_complete = False
        self.end = 0
        self.rest = ""

    def read(self) -> Reading[bool]:
        """Read the arguments. Return whether the source was read to their end, or for a string to its closing quote,
        whatever it contains. If `is_read` is not set afterwards, these were no arguments; a list is left unread."""
        yield from self._source.run(SPACES)
        first = yield from self._source.peek()
        if first == "{":
            self.is_read = True
            copy = JsonCopy(self._source, self._write)
            self.is_complete = yield from copy.read()
            self.end = copy.end
        elif first in QUOTES:
            self._source.skip()
            return (yield from self._text(first))
        elif first not in ("", "["):
            word = yield from self._source.run(WORD)
            self.is_read = self.is_complete = CONSTANTS.get(word) == "null"
        return self.is_complete

    def _text(self, quote: str) -> Reading[bool]:
        """Read arguments that are a JSON string with the object's text in it."""
        inner = Source()
        inner.record()
        arguments = Arguments(inner, self._write)
        running = Running(inner, arguments._object())
        is_closed = yield from read_string(
            self._source, quote, lambda text: running.push(json.loads(f'"{text}"'), False)
        )
        running.push("", True)
        unread = inner.rest()
        self.rest = (inner.recorded(arguments.end) if arguments.end else unread).strip()
        self.is_read = arguments.is_read
        self.is_complete = arguments.is_complete and (is_closed or self.has_any)
        return is_closed

    def _object(self) -> Reading[None]:
        """Read the object, or `null`, that a string of arguments contains. An empty string has no arguments."""
        yield from self._source.run(SPACES)
        first = yield from self._source.peek()
        if first in ("{", "n"):
            yield from self.read()
        self.is_read = self.is_read or not first
        self.is_complete = self.is_complete or not first

    def _write(self, text: str) -> None:
        self.has_any = True
        self._write_on(text)


class CallObject:
    """Reads one object {"name": ..., "arguments" or "parameters": {...}}, with keys in any order. The keys may be in an
    object that is the value of a key "function".

    The call is sent with its first arguments, when its name is known. From then on it is a call, even if the object
    breaks off.
    """

    def __init__(self, source: Source, parsed: Parsed) -> None:
        self._source = source
        self._parsed = parsed
        self._name: str | None = None
        self._early: list[str] = []  # arguments before the name
        self._arguments = Arguments(source, self._write)
        self._is_sent = False
        self._has_others = False  # keys that no call has
        self.end = 0  # the position after what was understood

    def read(self) -> Reading[bool]:
        """Return whether it is a call. The source is at its opening brace."""
        depth = 1  # open braces: 2 within the value of "function"
        is_valid = True  # all that was read so far may be a call
        self._source.skip()
        while depth and is_valid:
            yield from self._source.run(_BETWEEN_KEYS)
            self.end = self._source.position
            character = yield from self._source.peek()
            if character == "}":
                self._source.skip()
                depth -= 1
                continue
            key = yield from read_key(self._source)
            if key is None:  # braces are missing
                # other characters end the call; these cannot follow one
                is_valid = bool(character) and character not in (*QUOTES, "{", "[", ":")
                break
            yield from self._source.run(SPACES)
            is_valid = yield from self._source.take(":")
            yield from self._source.run(SPACES)
            if is_valid and json.loads(key) == "function" and (yield from self._source.take("{")):
                depth += 1
            elif is_valid:
                is_valid = yield from self._member(json.loads(key))
        if not depth:
            self.end = self._source.position
        self._parsed.is_cut = self._is_sent and not self._arguments.is_complete and self._source.is_over
        is_call = self._is_sent or (is_valid and self._end())
        if is_call and self._arguments.rest:
            self._parsed.text(self._arguments.rest)
        return is_call

    def _member(self, key: str) -> Reading[bool]:
        """Read the value of `key`; return whether it is complete and the object may be a call."""
        first = yield from self._source.peek()
        if key in ARGUMENT_KEYS and not self._arguments.is_read:
            is_complete = yield from self._arguments.read()
            self.end = self._source.position
            return is_complete and self._arguments.is_read
        if key in ("name", "function") and self._name is None:
            name = (yield from read_key(self._source)) if first in QUOTES else None
            self._name = json.loads(name) if name is not None else None
            if self._name is None or not NAME.fullmatch(self._name):
                self._name = None
                return False
            if self._early:
                self._write("")
            return True
        self._has_others = self._has_others or key not in _OWN_KEYS
        if first in CLOSERS:
            return (yield from JsonCopy(self._source, _discard).read())
        if first in QUOTES:
            return (yield from read_key(self._source)) is not None
        return bool((yield from self._source.run(WORD))) and not self._source.is_over

    def _write(self, text: str) -> None:
        """Add text to the arguments, which begin the call once its name is known."""
        self._early.append(text)
        if self._name is not None:
            if not self._is_sent:
                self._parsed.call(self._name)
            self._is_sent = True
            self._parsed.arguments("".join(self._early))
            self._early = []

    def _end(self) -> bool:
        if self._name is None or (self._has_others and not self._arguments.is_read):
            return False
        self._write("{}")
        return True


def _discard(text: str) -> None:
    """Write nothing."""


def read_calls(source: Source, parsed: Parsed) -> Reading[int | None]:
    """Read consecutive call objects, in a list, or separated by white space, "," or ";". Return None if only other text
    follows at least one call. Else return the position from which the text is content: of an object that is no call, of
    what follows a call with missing braces, or the start if there is no call."""
    start, has_calls, in_list = source.position, False, False
    while True:
        yield from source.run(_AFTER_CALLS if has_calls else _BETWEEN_CALLS)
        first = yield from source.peek()
        if first == "[" and not in_list:
            source.skip()
            in_list = True
            continue
        if first != "{":
            return None if has_calls else start
        start = source.position if has_calls else start
        call = CallObject(source, parsed)
        if not (yield from call.read()):
            return start
        if call.end != source.position:  # its braces are missing
            return call.end
        has_calls = True


def read_arguments(source: Source, parsed: Parsed, name: str) -> Reading[bool]:
    """Read the arguments of a call of `name`; return False if these are no arguments. They may be omitted."""
    is_open = False

    def write(text: str) -> None:
        nonlocal is_open
        if not is_open:
            parsed.call(name)
        is_open = True
        parsed.arguments(text)

    arguments = Arguments(source, write)
    yield from arguments.read()
    parsed.is_cut = is_open and not arguments.is_complete and source.is_over
    if arguments.is_read and not is_open:
        write("{}")
    if is_open and arguments.rest:
        parsed.text(arguments.rest)
    return is_open
