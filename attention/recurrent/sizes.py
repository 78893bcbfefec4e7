"""Sizes of a state pool, besides slots and snapshots. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateSizes:
    """Sizes per slot. rows: maximum rows of a request in a round.
    path: maximum rows of a round that can be accepted.
    """

    rows: int
    path: int
