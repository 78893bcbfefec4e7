"""Splits an answer's text into content, reasoning and tool calls. Every choice has a parser, in whole replies and
streams: for chats `ingress.output_parser` names it (`aerie.cluster.http.parsers.table`), completions use `text`.
See docs/add-a-parser.md. Readers of calls and reasoning cut text at marks by `aerie.cluster.http.parsers.source.Marks`;
the cutter here is for parsers outside the project."""

import secrets
import string
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
from msgspec import UNSET

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.parsers.json_calls import CallPart
from aerie.cluster.http.schema.completions import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from aerie.cluster.http.schema.response import FinishReason
from aerie.cluster.http.text.detokenizer import start_of_partial


class ReplyDelta(msgspec.Struct, frozen=True, gc=False):
    """The part of a reply that one piece of an answer adds.

    tool_calls: at most one delta for each call; the first of a call has its id and name; arguments are concatenated.
    finish: set with the last piece: the answer's own finish reason or "tool_calls".
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish: FinishReason | None = None

    def split_calls(self) -> tuple[tuple[ToolCallDelta, ...], tuple[ToolCallDelta, ...]]:
        """Return the rest of the call that was open before, which precedes the delta's text, and the calls that
        begin."""
        num = int(bool(self.tool_calls) and self.tool_calls[0].id is UNSET)
        return self.tool_calls[:num], self.tool_calls[num:]


class OutputParser(Protocol):
    """State of one choice while it is parsed."""

    def push(self, piece: Piece) -> ReplyDelta:
        """Return what the next piece adds. Text may be held back until its kind is clear. The last piece, whose
        `finish` is set, releases all of it, and the delta's `finish` is set, too."""


class TextParser:
    """Treats all text as content."""

    def push(self, piece: Piece) -> ReplyDelta:
        """See `OutputParser`."""
        return ReplyDelta(piece.text, finish=piece.finish)


class HeldReasoning:
    """Joins the reasoning of one choice's deltas until it is over: SGLang's `stream_reasoning: false`."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def push(self, delta: ReplyDelta) -> ReplyDelta:
        """Return the part of `delta` to send now, with what was held before."""
        self._held.append(delta.reasoning)
        reasoning = ""
        if delta.content or delta.tool_calls or delta.finish is not None:
            reasoning, self._held = "".join(self._held), []
        return ReplyDelta(delta.content, reasoning, delta.tool_calls, delta.finish)


def joined_deltas(deltas: Sequence[ReplyDelta]) -> tuple[ReplyDelta, list[ToolCall]]:
    """Return all deltas of a reply as one, and its whole tool calls."""
    calls: dict[int, ToolCall] = {}
    arguments: dict[int, list[str]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls):
        if part.index not in calls:
            assert part.id is not UNSET and part.function.name is not UNSET, "a tool call begins with id and name"
            calls[part.index] = ToolCall(id=part.id, function=FunctionCall(name=part.function.name, arguments=""))
        if part.function.arguments is not UNSET:
            arguments.setdefault(part.index, []).append(part.function.arguments)
    for index, parts in arguments.items():
        calls[index].function.arguments = "".join(parts)
    joined = ReplyDelta(
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        finish=deltas[-1].finish,
    )
    return joined, [calls[index] for index in sorted(calls)]


CallIds = Callable[[str, int], str]  # arguments: a function's name and the call's number in the answer
_ID_CHARACTERS = string.ascii_letters + string.digits


def random_id(name: str, number: int) -> str:
    """Return nine letters and digits, the only form that Mistral's templates accept; 53 random bits."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


class CallDeltas:
    """Converts parts of calls to the reply's deltas: one for each call, however many tokens a round accepted. Clients
    may take a second entry of the same index in one chunk for another call.

    parallel: whether to show more than the first call.
    ids: makes ids of calls.
    """

    def __init__(self, parallel: bool, ids: CallIds = random_id) -> None:
        self._parallel = parallel
        self._ids = ids
        self._num = 0

    def of(self, parts: list[CallPart]) -> tuple[ToolCallDelta, ...]:
        """Return the deltas of further parts."""
        calls: dict[int, tuple[str | None, list[str]]] = {}  # number of a call -> its name, if it begins, and arguments
        for name, arguments in parts:
            self._num += name is not None
            if self._num == 1 or self._parallel:
                calls.setdefault(self._num - 1, (name, []))[1].append(arguments)
        deltas = [self._delta(index, name, "".join(arguments)) for index, (name, arguments) in calls.items()]
        return tuple(delta for delta in deltas if delta is not None)

    def _delta(self, index: int, name: str | None, arguments: str) -> ToolCallDelta | None:
        if name is not None:
            function = FunctionDelta(name=name, arguments=arguments)
            return ToolCallDelta(index=index, id=self._ids(name, index), type="function", function=function)
        return ToolCallDelta(index=index, function=FunctionDelta(arguments=arguments)) if arguments else None

    @property
    def any(self) -> bool:
        """Return whether there was a call."""
        return self._num > 0


class Cut(NamedTuple):
    """Text cut at the first mark. after: the text after the mark; without a mark, the end that may start one."""

    before: str
    mark: str | None
    after: str


def cut(text: str, marks: tuple[str, ...]) -> Cut:
    """Cut `text` at the earliest of `marks`, none of which is a prefix of another."""
    hits = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if hits:
        at, mark = min(hits)
        return Cut(text[:at], mark, text[at + len(mark) :])
    start = start_of_partial(text, marks)
    return Cut(text[:start], None, text[start:])
