"""The outcomes of a peer's tests, the limit of each, and what stands in for its classes.

A pytest plugin in a process of `tests.clients.peer_suites`. Reads PEER_RESULTS (a file for the outcomes) and
PEER_LIMIT_S from the environment.
"""

import fnmatch
import json
import os
import signal
import unittest.mock
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = int(os.environ.get("PEER_LIMIT_S", "60"))  # of one test
in_test: list[str] = []  # the test that runs
_outcomes: dict[str, tuple[str, str]] = {}


class _OwnClass(type):
    """A test that asks one of the peer's classes for something is not about a server."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _skip


class NotByURL(metaclass=_OwnClass):
    """In place of a class or function of the peer. Modules may call it, tests may not."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return _skip()


def _skip(*args: Any, **options: Any) -> Any:
    if in_test:
        pytest.skip("uses the peer's own classes")
    return unittest.mock.MagicMock()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests for the stand-in, or those for the server."""
    patterns, wanted = json.loads(os.environ["PEER_STAND_IN"]), os.environ["PEER_PART"] == "stand-in"

    def fits(item: pytest.Item) -> bool:
        return any(fnmatch.fnmatchcase(item.nodeid.removeprefix("tests/"), pattern) for pattern in patterns)

    dropped = [item for item in items if fits(item) != wanted]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if fits(item) == wanted]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """A test that hangs fails."""

    def late(*args: Any) -> None:
        raise TimeoutError(f"not over after {LIMIT_S} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    in_test.append(item.nodeid)
    try:
        return (yield)
    finally:
        in_test.clear()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of a test's phases, and what it says."""
    former = _outcomes.get(report.nodeid, ("passed", ""))
    if report.outcome != "passed" or report.nodeid not in _outcomes:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith(("E ", "Skipped"))]
        _outcomes[report.nodeid] = (report.outcome, lines[0][:300] if lines else text[-300:])
    elif former[0] != "passed":
        _outcomes[report.nodeid] = former
    if report.when == "teardown":
        _save()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported."""
    if report.failed:
        _outcomes[report.nodeid] = ("failed", report.longreprtext.strip()[-300:])
        _save()


def _save() -> None:
    """For the process that waits, which may lose patience."""
    Path(os.environ["PEER_RESULTS"]).write_text(json.dumps(_outcomes))
