"""Cases that `make test` leaves to `make test-slow`, because others of the same test take the same branches."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Each case marked slow; a tuple has one value for each parameter."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def covering(*axes: Sequence[Any], strength: int = 1) -> list[Any]:
    """Return the product of `axes` as parameters: those outside a `cover` are marked slow.

    strength: 1, and the others have every value of each axis; 2, and they have every pair of values of two axes.
    """
    rows = list(itertools.product(*axes))
    chosen = cover(rows, strength)
    return [pytest.param(*row, marks=() if i in chosen else pytest.mark.slow) for i, row in enumerate(rows)]


def one_of_each(kinds: Mapping[str, str]) -> list[Any]:
    """Return the names as parameters, given the kind of each: the first of a kind as it is, the others marked slow."""
    chosen = cover([(kind,) for kind in kinds.values()], 1)
    return [pytest.param(name, marks=() if i in chosen else pytest.mark.slow) for i, name in enumerate(kinds)]


def cover(rows: Sequence[Sequence[Hashable]], strength: int) -> set[int]:
    """Return the indices of few rows with every combination of `strength` settings, by place, that some row has."""
    left = [set(itertools.combinations(enumerate(row), min(strength, len(row)))) for row in rows]
    missing = set[tuple[tuple[int, Hashable], ...]]().union(*left)
    chosen = set[int]()
    while missing:
        best = max(range(len(left)), key=lambda i: len(left[i] & missing))
        chosen.add(best)
        missing -= left[best]
    return chosen
