"""Watches the descendants of `aerie serve`: records their pids, kills stopped ones (SIGSTOP), and reaps ended ones.
Used by `deploy.serve.launch`.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deploy.processes.guard import process_tree
from deploy.processes.server_record import note_processes
from deploy.serve.watches import Watch

STOPPED_LIMIT_S = 5.0
_ZOMBIE_LIMIT_S = 10.0  # longer than a parent needs to read an exit code


class ProcessWatch(Watch):
    """Kills processes that stay stopped (SIGSTOP), so that they are replaced at once. A stopped process keeps its
    sockets open without answering: connections hang up to their own limits, and Ray 2.60 does not notice some of these
    processes (Serve's actor around HAProxy). report: called with a line for each killed process."""

    period_s = 1.0

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report
        self._noted: set[int] = set()
        self._since_s: dict[tuple[int, str], float] = {}  # processes that were stopped or zombies at the last check

    def look(self) -> None:
        if sys.platform != "linux":
            return
        tree, now_s = process_tree(os.getpid()), time.monotonic()
        if self._noted != tree.keys():
            self._noted = set(tree)
            note_processes(self._noted)
        own = {
            pid: state for pid, (state, parent) in tree.items() if state == "T" or (state, parent) == ("Z", os.getpid())
        }
        self._since_s = {each: self._since_s.get(each, now_s) for each in own.items()}
        for (pid, state), since_s in self._since_s.items():
            if state == "T" and now_s - since_s >= STOPPED_LIMIT_S:
                self._report(f"{_name(pid)} (pid {pid}) had been stopped for {STOPPED_LIMIT_S:g} s and was ended")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            elif state == "Z" and now_s - since_s >= _ZOMBIE_LIMIT_S:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "a process"
