"""Progress lines of a start: one for each completed step, and some during long ones. Lines have the time of day;
`aerie serve` converts them to its own clock.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from aerie.cluster.linux import process_state
from aerie.cluster.logs import print_line

READY = "ready"  # the last step of an engine, which then accepts requests
PROGRESS_PERIOD_S = 0.5  # between two lines of one long step

_STEP = re.compile(r"^(\S+Z)  (\S.*?) {2,}(\S.*?) {2,}(\d+\.\d) s$")
_PROGRESS = re.compile(r"^(\S+Z)  (\S.*?) {2,}(\S.*?) {2,}(\d+\.?\d*) of (\d+\.?\d*) (\w+)$")


@dataclass(frozen=True)
class Step:
    """A finished step. at_s: Unix time of its end. took_s: its seconds."""

    at_s: float
    process: str
    what: str
    took_s: float


@dataclass(frozen=True)
class Progress:
    """Progress of a step: `done` of `total`, in `unit`. at_s: Unix time."""

    at_s: float
    process: str
    what: str
    done: float
    total: float
    unit: str


class StartLog:
    """One process's lines.

    process: its name in lines.
    began_s: Unix time at which its first step started; None: start of the process, so that imports are included.
    """

    def __init__(self, process: str, began_s: float | None = None, report: Callable[[str], None] = print_line) -> None:
        self._process = process
        self._last_s = process_began_s() if began_s is None else began_s
        self._progress_s = 0.0
        self._report = report

    def done(self, what: str) -> None:
        """Print that `what` is done, with the time since the previous step."""
        now_s = time.time()
        self.took(what, now_s - self._last_s)
        self._last_s = now_s

    def took(self, what: str, seconds: float) -> None:
        """Print that `what` is done and took `seconds`."""
        self._report(f"{_time_of_day(time.time())}  {self._process:<12}  {what:<32}  {seconds:.1f} s")

    def progress(self, what: str, done: float, total: float, unit: str) -> None:
        """Print the progress of `what`, at most every `PROGRESS_PERIOD_S`."""
        now_s = time.time()
        if now_s - self._progress_s >= PROGRESS_PERIOD_S:
            self._progress_s = now_s
            self._report(f"{_time_of_day(now_s)}  {self._process:<12}  {what:<32}  {done:.4g} of {total:.4g} {unit}")


def read_line(line: str) -> Step | Progress | None:
    """Parse a line of `StartLog`; None for any other line."""
    if step := _STEP.match(line):
        at, process, what, took = step.groups()
        return Step(_unix_time(at), process, what, float(took))
    if progress := _PROGRESS.match(line):
        at, process, what, done, total, unit = progress.groups()
        return Progress(_unix_time(at), process, what, float(done), float(total), unit)
    return None


def process_began_s() -> float:
    """Return the Unix time at which this process was started or forked; now, if there is no /proc."""
    try:
        _, _, ticks = process_state("self")
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")


def _time_of_day(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _unix_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
