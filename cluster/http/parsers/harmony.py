"""gpt-oss's answers: messages, each with a header that names its channel and perhaps a function (openai/harmony,
docs/format.md).

Marks are recognised by their tokens, because an answer may contain their text. Malformed answers lose no text: invalid
headers become content.
"""

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.parsers.json_calls import Parsed, read_arguments
from aerie.cluster.http.parsers.output_parser import CallDeltas, ReplyDelta
from aerie.cluster.http.parsers.source import SPACES, Reading, Running, Source
from aerie.cluster.http.text.detokenizer import start_of_partial
from aerie.cluster.http.text.harmony_prompt import MARKS

START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN = MARKS
_CHANNEL = re.compile(r"<\|channel\|>\s*([\w-]*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# A header has a role (unless the prompt has it), a recipient before or after the channel, and a content type.
_TO = r"\s*(?:to=[^\s<]*)?\s*"
_HEAD = re.compile(rf"{_TO}(?:<\|channel\|>\s*[\w-]*)?{_TO}(?:<\|constrain\|>)?\s*\w*\s*")
_HEAD_WITH_ROLE = re.compile(rf"\s*[\w.-]*{_HEAD.pattern}")
_MAX_HEAD = 256  # characters
_MARK = re.compile("|".join(map(re.escape, MARKS)))
_PARTS = re.compile(r"<\|channel\|>\s*[\w-]*|\bto=[^\s<]+|<\|constrain\|>\s*\w*|<\|\w+\|>")


class HarmonyParser:
    """State of one answer.

    with_calls: whether messages to functions are tool calls; else they are content.
    mark_ids: token ids of the marks; none: marks are recognised by their text.
    tools: names of functions, which may be called without their namespace.
    prompt: text of the prompt. It ends in a message's header, or in a message that the answer continues.
    """

    def __init__(
        self,
        with_calls: bool,
        parallel: bool,
        mark_ids: Mapping[int, str] | None = None,
        tools: Collection[str] = (),
        prompt: str = "",
    ) -> None:
        self._with_calls = with_calls
        self._tools = tools
        self._marks = TokenMarks(mark_ids) if mark_ids else TextMarks()
        self._deltas = CallDeltas(parallel)
        self._parsed = Parsed()  # content and calls
        self._reasoning: list[str] = []
        self._head: str | None = ""  # None: inside a message
        self._has_role = False  # the head has one
        self._channel = ""
        self._call: Running | None = None  # reads the arguments of the function that the message is for
        open_message = prompt[prompt.rfind(START) :].partition(MESSAGE) if START in prompt else ("", "", "")
        if open_message[1]:
            self._open(open_message[0].removeprefix(START).removeprefix("assistant"))

    def push(self, piece: Piece) -> ReplyDelta:
        """Return what the next piece of output adds to the reply (`OutputParser.push`)."""
        for text, mark in self._marks.take(piece):
            if text:
                self._take_text(text)
            if mark is not None:
                self._take_mark(mark)
        if piece.finish is not None:
            if self._head is not None:
                self._show_rest(self._head)
            elif piece.finish == "stop" or (self._call is not None and self._call.source.position):
                self._close()
        content, parts = self._parsed.taken()
        deltas = self._deltas.of(parts)
        reasoning, self._reasoning = "".join(self._reasoning), []
        ended = piece.finish == "stop" and self._deltas.any and not self._parsed.is_cut
        return ReplyDelta(content, reasoning, deltas, "tool_calls" if ended else piece.finish)

    def _take_text(self, text: str) -> None:
        """Add text to the header, or show it. If it cannot be a header, it is the answer's text."""
        if self._head is None:
            self._show(text)
            return
        self._head += text
        stripped = self._head.lstrip()
        is_head = self._has_role or not stripped or stripped.startswith("<|") or "to=".startswith(stripped[:3])
        if is_head and len(self._head) <= _MAX_HEAD:
            return
        text = self._head  # a constraint on the answer may exclude headers
        self._open("")
        self._show(text)

    def _take_mark(self, mark: str) -> None:
        """Apply a mark: it opens a header or a message, or continues a header. `_head`: the header so far; None within
        a message."""
        if self._head is None:
            if mark in (MESSAGE, CONSTRAIN):
                return
            self._close()
            self._head = CHANNEL if mark == CHANNEL else ""
        elif mark == MESSAGE:
            self._show_rest(self._head)
            self._open(self._head)
            return
        elif mark in (CHANNEL, CONSTRAIN):
            if len(self._head) > _MAX_HEAD:
                self._show_rest(self._head)
                self._head = ""
            self._head += mark
            return
        else:
            self._show_rest(self._head)
            self._head = ""
        self._has_role = mark == START

    def _open(self, head: str) -> None:
        """Begin a message with this header. One to a known function is read as a call."""
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._channel = channel[1] if channel else "final"
        name = recipient[1] if recipient else ""
        function = name.removeprefix("functions.")
        self._head = None
        if self._with_calls and function and (function != name or name in self._tools):
            source = Source()
            self._call = Running(source, _read_message(source, self._parsed, function))

    def _show(self, text: str) -> None:
        """Add text of the message."""
        if self._call is not None:
            self._call.push(text, False)
        elif self._channel == "analysis":
            self._reasoning.append(text)
        else:
            self._parsed.text(text)

    def _show_rest(self, head: str) -> None:
        """Add to the content the text that stands in place of a message's header."""
        if (_HEAD_WITH_ROLE if self._has_role else _HEAD).fullmatch(" ".join(head.split())):
            return
        rest = _PARTS.sub("", head)
        if rest.strip():
            self._parsed.text(rest)

    def _close(self) -> None:
        """End the current message."""
        if self._call is not None:
            self._call.push("", True)
        self._call = None


def _read_message(source: Source, parsed: Parsed, function: str) -> Reading[None]:
    """Read a message to a function: a call, whose arguments are the message's JSON object.

    An empty message is a call without arguments. If the message is no object, all its text is content; so is text after
    the object.
    """
    source.record()
    if not (yield from source.has(1)):
        parsed.call(function)
        parsed.arguments("{}")
        return
    is_call = yield from read_arguments(source, parsed, function)
    text = source.recorded()  # what `read_arguments` has read
    if is_call:
        yield from source.run(SPACES)
    else:
        parsed.text(text)
    while not source.is_over:
        parsed.text(source.rest())
        yield


class TextMarks:
    """Finds marks by their text."""

    def __init__(self) -> None:
        self._held = ""

    def take(self, piece: Piece) -> Iterator[tuple[str, str | None]]:
        """Return the next text, and the mark after it; None while unknown."""
        text, at = self._held + piece.text, 0
        for match in _MARK.finditer(text):
            yield text[at : match.start()], match[0]
            at = match.end()
        end = len(text) if piece.finish is not None else at + start_of_partial(text[at:], MARKS)
        self._held = text[end:]
        yield text[at:end], None


class TokenMarks:
    """Finds marks by their tokens: the same characters from other tokens are text."""

    def __init__(self, mark_ids: Mapping[int, str]) -> None:
        self._mark_ids = mark_ids
        self._expected: deque[tuple[int, str]] = deque()  # the earliest position of each mark's text in the answer
        self._at = 0  # of what is held
        self._held = ""

    def take(self, piece: Piece) -> Iterator[tuple[str, str | None]]:
        """See `TextMarks.take`. Text may arrive after its tokens, if it might start a stop string."""
        for token, offset in zip(piece.tokens, piece.offsets, strict=False):
            if token in self._mark_ids:
                self._expected.append((offset, self._mark_ids[token]))
        text, at = self._held + piece.text, 0
        while self._expected:
            offset, mark = self._expected[0]
            index = text.find(mark, max(at, offset - self._at))
            if index < 0:
                break
            self._expected.popleft()
            yield text[at:index], mark
            at = index + len(mark)
        end = len(text)
        if self._expected and piece.finish is None:
            end = min(end, max(at, self._expected[0][0] - self._at))
        self._held = text[end:]
        self._at += end
        yield text[at:end], None
