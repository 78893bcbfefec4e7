"""Values of a hypothesis strategy, from a seed."""

from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")


def drawn(strategy: SearchStrategy[T], number: int, count: int) -> list[T]:
    """Return about `count` values for seed `number`."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(value=strategy)
    def collect(value: T) -> None:
        found.append(value)

    collect()
    return found
