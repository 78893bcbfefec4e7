"""The process that tries grammars: begun before the first one, one at a time, and again after a failure."""

import asyncio
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.http.errors import ApiError
from cluster.http.requests import grammar_checker
from cluster.http.requests.grammar_checker import ProcessChecker
from tests.support.embedded import embedded_spec
from workers.scheduling.plan import Grammar

DIGITS = Grammar("regex", "[0-9]+", (0,))
BROKEN = Grammar("regex", "(", (0,))


@pytest.fixture
def checker() -> Iterator[ProcessChecker]:
    made = ProcessChecker(embedded_spec(None).worker.model.path, timeout_s=10.0)
    yield made
    made.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes, as they are started."""
    found: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr(grammar_checker.subprocess, "Popen", Noted)
    return found


async def test_the_first_grammar_meets_the_process_that_was_begun(
    checker: ProcessChecker, started: list[subprocess.Popen[bytes]]
) -> None:
    begun = asyncio.create_task(checker.begin())
    await asyncio.sleep(0)
    await checker.check(DIGITS)  # waits for the start that is under way, and begins no second one
    await begun
    with pytest.raises(ApiError, match="cannot be used"):
        await checker.check(BROKEN)
    assert len(started) == 1 and started[0].poll() is None
    checker.close()
    assert started[0].poll() is not None


async def test_a_process_that_cannot_be_begun_is_tried_again_by_the_first_grammar(
    checker: ProcessChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(grammar_checker.subprocess, "Popen", fail)
        await checker.begin()
    await checker.check(DIGITS)
