"""Finds tool calls between marks. `aerie.cluster.http.parsers.families` says which family has which.

A call that is none after all is content, with its marks. White space beside marks is no content.
"""

import re
from collections.abc import Callable, Mapping

from aerie.cluster.http.parsers.json_calls import CallPart, Found, read_arguments, read_calls
from aerie.cluster.http.parsers.source import SPACES, Marks, Reading, Running, Source

PYTHON_TAG = "<|python_tag|>"
MISTRAL_MARK = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?")
KIMI_HEAD = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*")
DEEPSEEK_HEAD = re.compile(r"\s*(?:function<｜tool▁sep｜>)?([^\s<`{]+?)(?:<｜tool▁sep｜>|\n```json)\s*")
_MAX_HEAD = 512  # characters; a name has up to 64
_HEAD_PART = re.compile(r"[^{\"'<\[]*")
_FENCE = "```"

# Reads the calls after an opening mark. The result is None, or the position of text that is no call, which is last.
CallBody = Callable[[Source, Found], Reading[int | None]]


class StreamedCalls:
    """Finds the calls of one answer. read: reads a whole answer."""

    def __init__(self, read: Callable[[Source, Found], Reading[None]]) -> None:
        source, self._found = Source(), Found()
        self._running = Running(source, read(source, self._found))

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended within the arguments of the last call."""
        return self._found.is_cut

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._found.num_calls

    def take(self, text: str, end: bool) -> tuple[str, list[CallPart]]:
        """Return content and parts of calls in further text. Text may be held back except at the end."""
        self._running.push(text, end)
        if self._running.is_done:
            self._found.text(self._running.source.rest())
        return self._found.taken()


class MarkedCalls:
    """Calls after marks. bodies: the reader of the text after each mark; None: the mark is dropped."""

    def __init__(self, bodies: Mapping[str, CallBody | None]) -> None:
        self.bodies = bodies
        self._marks = Marks(bodies)

    def read(self, source: Source, found: Found) -> Reading[None]:
        """Read an answer."""
        spaces: list[str] = []
        has_failed = False  # the mark after a call that is none is content, too
        while True:
            text, mark = yield from self._marks.find(source)
            if mark is None:
                break
            shown = text.rstrip()
            if shown:
                found.text("".join(spaces) + shown)
                spaces = []
            spaces.append(text[len(shown) :])
            if not mark:
                continue
            body = self.bodies[mark]
            num_before = found.num_calls
            no_call = (mark if has_failed else "") if body is None else (yield from _no_call(body, mark, source, found))
            if no_call:
                found.text("".join(spaces) + no_call)
            has_failed, spaces = body is not None and bool(no_call) and found.num_calls == num_before, []
        if not found.num_calls:
            found.text("".join(spaces))

    def read_only_calls(self, source: Source, found: Found) -> Reading[None]:
        """Read calls up to other text, in which a mark begins no call."""
        while True:
            yield from source.run(SPACES)
            mark = yield from self._marks.take(source)
            body = self.bodies[mark] if mark else None
            if not mark or (body is not None and (yield from body(source, found)) is not None):
                return


def _no_call(body: CallBody, mark: str, source: Source, found: Found) -> Reading[str]:
    """Read the calls after `mark`. Return the text that is none, with the mark if there was no call."""
    num_before = found.num_calls
    source.keep()
    position = yield from body(source, found)
    text = source.kept(position or 0)
    return "" if position is None else (text if found.num_calls > num_before else mark + text)


def named_call(head: re.Pattern[str], tail: str, mark: str) -> CallBody:
    """Return a reader of a name, and then its arguments.

    head: matches up to the arguments; group 1 is the name.
    tail: the mark that ends the call; "": none.
    mark: the opening mark, which no head has.
    """

    def read(source: Source, found: Found) -> Reading[int | None]:
        start = source.position
        text = ""
        while len(text) <= _MAX_HEAD:
            part = yield from source.run(_HEAD_PART)
            text += part[: _MAX_HEAD + 1]
            character = yield from source.peek()
            has_ended = bool(tail) and (yield from source.take(tail))
            if has_ended or character not in ("<", "["):
                break
            if (yield from source.take(mark)):
                source.back(mark)
                return start
            source.skip()
            text += character
        name = head.fullmatch(text)
        if name is None:
            return start
        if has_ended:
            found.call(name[1])
            found.arguments("{}")
        elif not (yield from read_arguments(source, found, name[1])):
            return start
        elif tail:
            yield from source.run(SPACES)
            yield from source.take(_FENCE)
            yield from source.run(SPACES)
            yield from source.take(tail)
        return None

    return read


_mistral_call = named_call(_MISTRAL_HEAD, "", MISTRAL_MARK)


def read_mistral_calls(source: Source, found: Found) -> Reading[int | None]:
    """Read a list of calls, or (tokenizers from version 11 on) one call's name and arguments."""
    start = source.position
    yield from source.run(SPACES)
    is_list = (yield from source.peek()) in ("[", "{")
    position = yield from (read_calls if is_list else _mistral_call)(source, found)
    return position if position is None or found.num_calls else start


def read_llama3_calls(source: Source, found: Found) -> Reading[None]:
    """Read an answer of Llama 3.x, which is either calls from its start, or content."""
    source.keep()
    yield from source.run(SPACES)
    is_tagged = yield from source.take(PYTHON_TAG)
    yield from source.run(SPACES)
    first = yield from source.peek()
    position: int | None = 0
    if first == "{" or (first == "[" and is_tagged):
        position = yield from read_calls(source, found)
    text = source.kept(position if position and found.num_calls else 0)
    if position is not None:
        found.text(text)
