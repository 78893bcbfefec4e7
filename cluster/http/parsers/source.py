"""Streamed text, and readers of it that are written as generators: they yield where they need more text.

A reader decides by the text alone, never by where a piece of it ends, and looks ahead only by the length of a mark: so
any pieces of a text are read alike, in linear time.
"""

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

from aerie.cluster.http.text.detokenizer import start_of_partial

T = TypeVar("T")
Reading = Generator[None, None, T]
SPACES = re.compile(r"\s*")


class Source:
    """The text that has arrived and is not read yet, and on demand a record of what is read (`record`)."""

    def __init__(self) -> None:
        self._text = ""  # what has arrived, without what was read before the last `push`
        self._at = 0  # characters of `_text` that are read
        self._ended = False
        self._before = 0  # characters of the answer before `_text`
        self._record: list[str] | None = None  # pieces read since `record`; None if nothing is recorded
        self._record_end = 0  # characters of `_text` before the text that is read but not yet in `_record`
        self._record_start = 0  # the position at `record`

    def push(self, text: str, end: bool) -> None:
        """Add text, and drop what is read from memory, after it is recorded. end: no more follows."""
        if self._record is not None:
            self._record.append(self._text[self._record_end : self._at])
        self._before += self._at
        self._text = self._text[self._at :] + text
        self._at = self._record_end = 0
        self._ended = end

    @property
    def position(self) -> int:
        """Number of characters read."""
        return self._before + self._at

    @property
    def is_over(self) -> bool:
        """Whether all text is read and no more follows."""
        return self._ended and self._at == len(self._text)

    def record(self) -> None:
        """Keep the text that is read from here on, for `recorded`."""
        self._record, self._record_end, self._record_start = [], self._at, self.position

    def recorded(self, position: int = 0) -> str:
        """Return the text read since `record`, from `position` on, and stop to record it."""
        assert self._record is not None, "`record` was not called"
        text = "".join(self._record) + self._text[self._record_end : self._at]
        start, self._record = max(0, position - self._record_start), None
        return text[start:]

    def rest(self) -> str:
        """Read all text that has arrived."""
        text, self._at = self._text[self._at :], len(self._text)
        return text

    def back(self, text: str) -> None:
        """Put back `text`, which was read last, or belongs before the text that is not read yet."""
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:
            assert self._record is None, "recorded text is read once"
            self._before = self.position - len(text)
            self._text, self._at = text + self._text[self._at :], 0

    def skip(self, num: int = 1) -> None:
        """Read `num` characters that have arrived."""
        self._at += num

    def ahead(self, num: int) -> str:
        """Return up to `num` next characters that have arrived."""
        return self._text[self._at : self._at + num]

    def available(self, pattern: re.Pattern[str]) -> str:
        """Read what `pattern` matches of the text that has arrived."""
        match = pattern.match(self._text, self._at)
        assert match is not None, "the pattern matches nothing, too"
        self._at = match.end()
        return match[0]

    def has(self, num: int) -> Reading[bool]:
        """Wait for `num` characters; return whether there are as many."""
        while len(self._text) - self._at < num:
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """Return the next character, "" at the end."""
        yield from self.has(1)
        return self.ahead(1)

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest run of characters of a set. pattern: the set, repeated by "*"."""
        parts = [self.available(pattern)]
        while self._at == len(self._text) and not self._ended:
            yield
            parts.append(self.available(pattern))
        return "".join(parts)

    def take(self, text: str) -> Reading[bool]:
        """Read `text` if it is next; return whether it is."""
        while not self._text.startswith(text, self._at):
            if self._ended or not text.startswith(self.ahead(len(text))):
                return False
            yield
        self._at += len(text)
        return True


class Marks:
    """Finds the earliest of some strings, none of which is a prefix of another."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = tuple(marks)
        self._pattern = re.compile("|".join(map(re.escape, self._marks)))
        self._longest = max(map(len, self._marks))

    def find(self, source: Source) -> Reading[tuple[str, str | None]]:
        """Read the next text, as soon as it is certain not to be of a mark, and the mark after it.

        The mark is "" if more text may precede it, and None at the end of the source."""
        while True:
            text, at = source._text, source._at
            match = self._pattern.search(text, at)
            if match is not None:
                source._at = match.end()
                return text[at : match.start()], match[0]
            tail = max(at, len(text) - self._longest + 1)
            end = len(text) if source._ended else tail + start_of_partial(text[tail:], self._marks)
            if end > at:
                source._at = end
                return text[at:end], ""
            if source._ended:
                return "", None
            yield

    def may_begin(self, text: str) -> bool:
        """Return whether `text` starts one of the marks."""
        return any(mark.startswith(text) for mark in self._marks)

    def take(self, source: Source) -> Reading[str]:
        """Read the mark that is next; return "" if none is."""
        for mark in self._marks:
            if (yield from source.take(mark)):
                return mark
        return ""


class Running:
    """A generator that reads what is pushed. After its end, all text is left unread."""

    def __init__(self, source: Source, reading: Reading[object]) -> None:
        self.source = source
        self._reading = reading
        self.is_done = False

    def push(self, text: str, end: bool) -> None:
        """Read further text. end: no more follows."""
        self.source.push(text, end)
        if not self.is_done:
            try:
                next(self._reading)
            except StopIteration:
                self.is_done = True
