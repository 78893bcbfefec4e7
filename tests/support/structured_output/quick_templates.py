"""The processes that fork those for grammars start at the priority of the tests. The lowest priority, at which servers
start them, gets hardly any of two cores that run tests, and some tests waited for a minute.

Replaces the class that `template_process.template` starts; a test of that class imports it by name, as it is.
"""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from aerie.workers.structured_output.mask_process import template_process

START_TIMEOUT_S = 280.0  # a busy machine may take minutes; pytest's own limit is 300 s


def _started(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    *python, program = command
    return subprocess.Popen([*python, f"import os; os.nice = lambda _: 0; {program}"], **options)


class QuickTemplate(template_process.Template):
    """Lowers no priority while it imports."""

    def _start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            quick = SimpleNamespace(Popen=_started, DEVNULL=subprocess.DEVNULL)
            patch.setattr(template_process, "subprocess", quick)
            patch.setattr(template_process, "START_TIMEOUT_S", START_TIMEOUT_S)
            super()._start()


def install() -> None:
    """For this process, and those that it forks."""
    template_process.Template = QuickTemplate  # type: ignore[misc]
