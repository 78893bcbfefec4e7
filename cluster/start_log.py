"""What a start is waiting for: lines that every process prints when it is done with something, all by the clock of
`aerie serve`. `tests.bench.startup` reads them.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.config import start_time_s


def print_line(line: str) -> None:
    """To the console, also where Serve has redirected sys.stdout to its log file."""
    assert sys.__stdout__ is not None
    sys.__stdout__.write(line + "\n")
    sys.__stdout__.flush()


class StartLog:
    """One process's lines.

    process: what it is, for the reader.
    began_s: Unix time since which its first step counts; None: since it began, so that imports are part of it.
    """

    def __init__(self, process: str, began_s: float | None = None, report: Callable[[str], None] = print_line) -> None:
        self._process = process
        self._last_s = process_began_s() if began_s is None else began_s
        self._start_s = start_time_s() or self._last_s
        self._report = report

    def done(self, what: str) -> None:
        """Print that `what` is done now, and how long after what was done before."""
        now_s = time.time()
        self.took(what, now_s - self._last_s)
        self._last_s = now_s

    def took(self, what: str, seconds: float) -> None:
        """Print that `what` is done now, and took `seconds`."""
        self._report(f"{time.time() - self._start_s:6.1f} s  {self._process:<12} {what:<32} {seconds:6.1f} s")


def process_began_s() -> float:
    """Unix time at which this process began; a forked one is as old as its fork. Where there is no /proc, now."""
    try:
        # After the name, which may hold anything: field 22 is the start in ticks since the boot (proc_pid_stat(5)).
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")
