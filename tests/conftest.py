"""Skips GPU tests where there are too few GPUs, and says so; workers of pytest-xdist leave them out. Builds the wheel
once for all that need it. Gives every worker of pytest-xdist one core. Starts what tries grammars at the tests' own
priority."""

import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from aerie.kernels import contracts
from tests.support.repository.wheel import kept_wheel

# Read when torch is imported, here and in the processes that tests start: threads of two workers on two cores cost
# more than they bring.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

contracts.check_every_call()

# In the background of a shell Ctrl-C is ignored, here and in the processes that tests start, some of which send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Until the tests are collected: imports leave little garbage, and looking for it takes a quarter of their time.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave the imported modules and the collected tests out of later garbage collections, with their little garbage:
    90,000 of 1.4 million objects, which take a second to find."""
    gc.enable()
    gc.freeze()


# A fresh checkout has nothing compiled, and both workers import the same modules. One of them collects folders from the
# last to the first, so that each compiles half of the modules and finds the other half.
_BACKWARDS = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"


def _collects_backwards(config: pytest.Config) -> bool:
    """Files and several folders have an order that their caller chose."""
    return _BACKWARDS and len(config.args) == 1 and Path(config.args[0]).is_dir()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if isinstance(collector, pytest.Directory) and _collects_backwards(collector.config):
        report.result = report.result[::-1]
    return report


@pytest.fixture(scope="session", autouse=True)
def _grammar_processes() -> None:
    from tests.support.structured_output import quick_templates

    quick_templates.install()


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel of this checkout."""
    (path,) = kept_wheel().glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed() -> Path:
    """The folder that it is installed into, without what it depends on."""
    return kept_wheel() / "installed"


@pytest.fixture(scope="session", autouse=True)
def _certificates() -> Iterator[None]:
    """Read those of all authorities once, not for every client of httpx, which takes 30 ms of CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if (httpx := sys.modules.get("httpx")) is not None:  # some test has imported it
            made = functools.cache(httpx.create_ssl_context)
            patch.setattr("httpx._transports.default.create_ssl_context", made)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _collects_backwards(config):
        items.sort(key=lambda item: item.path)  # as every other worker has them
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu")) is not None]
    if not marked:
        return
    import torch

    present = torch.cuda.device_count()
    missing = []
    for item, mark in marked:
        wanted = mark.kwargs.get("n", mark.args[0] if mark.args else 1)
        if present < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPU(s), this machine has {present}"))
            missing.append(item)
    if "PYTEST_XDIST_WORKER" in os.environ:  # thousands of reports that a test was skipped would take seconds
        left = set(missing)
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=missing)
