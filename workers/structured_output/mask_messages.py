"""Messages between a rank and the process that fills its masks, as msgpack over a stream socket, each after its length
in four bytes; and errors of grammars. Imports no compiler."""

import socket
from typing import TypeVar

import msgspec

from aerie.workers.scheduling.plan import Failure, Grammar


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """The first message: sizes of the shared `MaskTable`."""

    num_slots: int
    width: int
    vocab_size: int


class Entered(msgspec.Struct, frozen=True, array_like=True):
    """A request that was admitted to a slot, perhaps again.

    request: the scheduler's number.
    output: emitted tokens, int32.
    tolerates_violations: whether a token that violates the grammar restarts it.
    """

    request: int
    grammar: Grammar
    output: bytes
    tolerates_violations: bool


class Advanced(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that a step emitted for a request, and the tree it verifies next.

    drafted, parents: token and parent of each node of the tree; empty without a draft.
    """

    request: int
    tokens: list[int]
    drafted: list[int] = []
    parents: list[int] = []


class Fill(msgspec.Struct, frozen=True, array_like=True):
    """An order to fill the masks of one request for a step.

    count: nodes of the request's tree.
    guide: index of its guide in the step; -1 without guides.
    num_guided: nodes that get a state in the guide.
    """

    request: int
    count: int
    guide: int
    num_guided: int


class Order(msgspec.Struct, frozen=True, array_like=True):
    """Work for the process, done in the order of the fields. Only `fills` are answered, with `Filled`.

    prepared: grammars of waiting requests, by number, to compile.
    dropped: requests that have ended.
    """

    sequence: int
    prepared: dict[int, Grammar] = {}
    dropped: tuple[int, ...] = ()
    entered: tuple[Entered, ...] = ()
    advanced: tuple[Advanced, ...] = ()
    fills: tuple[Fill, ...] = ()


LATE = -1


class Filled(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an order with fills.

    rows: index of the first mask of each fill, or `LATE`.
    failures: failures of requests whose masks cannot be filled, by index in `Order.fills`.
    num_rows: number of masks filled.
    num_forced: accepted drafts within forced texts in `Order.advanced`.
    took_s: seconds of work.
    """

    sequence: int
    rows: list[int]
    failures: dict[int, Failure]
    num_rows: int
    num_forced: int
    took_s: float


class Deadline(msgspec.Struct, frozen=True, array_like=True):
    """The deadline of order `sequence` has passed: its step runs without the request whose mask is being filled, with
    `closes` without all unfilled requests."""

    sequence: int
    closes: bool


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """A report that is not an answer.

    ready: late requests whose next mask is filled now.
    failures: late requests whose mask cannot be filled.
    prepared: numbers of `Order.prepared` that are compiled, or cannot be compiled.
    """

    ready: list[int] = []
    failures: dict[int, Failure] = {}
    prepared: list[int] = []


T = TypeVar("T")


def send(to: socket.socket, message: msgspec.Struct) -> None:
    """Send one message. Raises OSError if the peer has closed or does not read."""
    raw = msgspec.msgpack.encode(message)
    to.sendall(len(raw).to_bytes(4, "little") + raw)


def receive(of: socket.socket, kind: type[T]) -> T | None:
    """Wait for one message; None if the peer has closed. Raises TimeoutError if the socket has a timeout and no message
    has started."""
    head = _read(of, 4)
    raw = _read(of, int.from_bytes(head, "little")) if len(head) == 4 else b""
    return msgspec.msgpack.decode(raw, type=kind) if raw else None


def _read(of: socket.socket, count: int) -> bytes:
    """Read `count` bytes, or fewer if the peer has closed."""
    parts, left = list[bytes](), count
    while left:
        try:
            part = of.recv(left)
        except TimeoutError:
            if parts:
                continue
            raise
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


class InvalidGrammarError(ValueError):
    """The grammar cannot be compiled, or allows no text. The message is for the client."""


class VocabularyError(ValueError):
    """The model has no tokenizer, so there are no texts to compare with a grammar."""
