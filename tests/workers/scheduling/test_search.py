"""Ten minutes of new examples for the random tests of scheduling: `python -m pytest -m slow FILE`, with this file.

`make test` tries a few each time, and so now and then finds what a search would have found before.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test

SECONDS = 600.0
ROOT = Path(__file__).parents[3]


def random_tests() -> Iterator[Callable[[], None]]:
    """Return the tests of this folder whose arguments hypothesis chooses."""
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        if "\n@given(" in path.read_text():
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            yield from (test for test in vars(module).values() if is_hypothesis_test(test))


TESTS = list(random_tests())


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__)
def test_new_examples(test: Callable[[], None]) -> None:
    end = time.monotonic() + SECONDS / len(TESTS)
    while time.monotonic() < end:
        test()
