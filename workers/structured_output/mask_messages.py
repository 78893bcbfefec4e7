"""What travels between a rank and the process that fills its masks."""

import msgspec

from workers.scheduling.plan import Failure, Grammar


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """The first message: the sizes of the table in shared memory, see `MaskTable`."""

    num_slots: int
    width: int
    vocab_size: int


class Entered(msgspec.Struct, frozen=True, array_like=True):
    """A request that has a slot from now on; known or not.

    guest: its number.
    output: int32 tokens that it has emitted.
    forgives: it begins its grammar anew where it leaves it.
    """

    guest: int
    grammar: Grammar
    output: bytes
    forgives: bool


class Advanced(msgspec.Struct, frozen=True, array_like=True):
    """What a step emitted for a request, and the tree that it verifies next.

    drafted, parents: tokens of the tree's nodes, and the parent of each; empty without a draft.
    """

    guest: int
    tokens: list[int]
    drafted: list[int] = []
    parents: list[int] = []


class Fill(msgspec.Struct, frozen=True, array_like=True):
    """The masks of a request are wanted for a step.

    count: nodes of its tree.
    guide: index of its guide in the step; -1: there are no guides.
    num_guided: nodes that get a state in it.
    """

    guest: int
    count: int
    guide: int
    num_guided: int


class Order(msgspec.Struct, frozen=True, array_like=True):
    """In this order. Only an order with `fills` is answered, with a `Filled`.

    prepared: grammars of requests that will come, by number.
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
    """rows: the first mask of each fill of the order, or `LATE`.
    failures: of those that will never have one, by their place in the order.
    num_rows: masks in use.
    num_forced: drafts that were accepted within demanded texts, of what advanced.
    took_s: seconds of work.
    """

    sequence: int
    rows: list[int]
    failures: dict[int, Failure]
    num_rows: int
    num_forced: int
    took_s: float


class Hurry(msgspec.Struct, frozen=True, array_like=True):
    """The step of order `sequence` should go on: without the request whose masks are being filled, or (closes) without
    all that are not filled yet."""

    sequence: int
    closes: bool


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """ready: late requests whose next mask is known now. failures: of those that will never have one, by request.
    prepared: grammars that are done with, of those that were to be."""

    ready: list[int] = []
    failures: dict[int, Failure] = {}
    prepared: list[int] = []
