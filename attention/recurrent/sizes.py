"""Sizes of a state pool, besides slots and snapshots. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateSizes:
    """rows: of a request in a round, at most.
    path: rows of a round that can be accepted, at most.
    """

    rows: int
    path: int
