"""Cuts streamed text at marks, for parsers of their own; readers of calls and reasoning use
`aerie.cluster.http.parsers.source.Marks`."""

from typing import NamedTuple

from aerie.cluster.http.text.stop_strings import start_of_partial


class Cut(NamedTuple):
    """Text cut at the first mark. after: the text after the mark; without a mark, the end that may start one."""

    before: str
    mark: str | None
    after: str


def cut(text: str, marks: tuple[str, ...]) -> Cut:
    """Cut `text` at the earliest of `marks`, none of which is a prefix of another."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        return Cut(text[:at], mark, text[at + len(mark) :])
    start = start_of_partial(text, marks)
    return Cut(text[:start], None, text[start:])
