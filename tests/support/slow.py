"""Cases that `make test` leaves to `make test-slow`, because others of the same test take the same branches."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Each case marked slow; a tuple has one value for each parameter."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
