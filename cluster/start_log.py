"""Console output of Aerie's processes, set up once in each: marked lines of text, which `aerie serve` distinguishes
from Ray's and Serve's, or JSON objects with the request's id. Also the progress lines of a start, whose time of day
`aerie serve` converts to its own clock."""

import contextvars
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO

from aerie.cluster.linux import process_state

OURS = "aerie"  # the logger above all of ours
REQUEST_LOG = "aerie.requests"  # logger of one line a generation request, also in text
_FIELDS = "fields"
MARK = "aerie| "  # prefix of each line for the operator

REQUEST_ID = re.compile(r"[!-~]{1,128}")  # valid request ids of clients
# The client's id of the request in the current task; "" outside of requests.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class MarkedFormatter(logging.Formatter):
    """Formats log lines as `LEVEL PROCESS: message`, with the record's own fields (see `fields`) that are not empty.
    process: this process's name, such as "ingress"."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(levelname)s {process}: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        own_fields: dict[str, object] = getattr(record, _FIELDS, {})
        more = " ".join(f"{name}={value}" for name, value in own_fields.items() if value != "")
        return marked(super().format(record) + (more and f": {more}"))


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time (UTC, RFC 3339), level, logger, process, message, and if present
    request_id, the record's own fields (see `fields`) and the traceback. process: see `MarkedFormatter`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        whole, part = divmod(record.created, 1)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int(part * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if request := request_id.get():
            line["request_id"] = request
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def fields(**values: object) -> dict[str, object]:
    """Return the argument `extra` of a log call, to add these fields to its JSON."""
    return {_FIELDS: values}


def marked(text: str) -> str:
    """Return `text` with a mark before each line."""
    return "\n".join(MARK + line for line in text.split("\n"))


def print_line(text: str) -> None:
    """Print marked lines to the console, even if Serve has redirected sys.stdout to its log file."""
    assert sys.__stdout__ is not None
    sys.__stdout__.write(marked(text) + "\n")
    sys.__stdout__.flush()


def use_logs(log_format: Literal["text", "json"], process: str, stream: TextIO | None = None) -> None:
    """Log JSON of level INFO and above, or marked lines of level WARNING and above, and those of `REQUEST_LOG`.

    stream: default: stderr, even if Serve has redirected it."""
    is_json = log_format == "json"
    handler = logging.StreamHandler(stream or sys.__stderr__)
    handler.setFormatter(JsonFormatter(process) if is_json else MarkedFormatter(process))
    logger = logging.getLogger(OURS)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if is_json else logging.WARNING)
    logger.propagate = False
    logging.getLogger(REQUEST_LOG).setLevel(logging.INFO)


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


class RankLog(StartLog):
    """A rank's lines. Only rank 0 prints the phases within its steps. began_s: see `StartLog`."""

    def __init__(self, rank: int, began_s: float | None = None) -> None:
        super().__init__(f"rank {rank}", began_s)
        self._is_first = rank == 0

    def phase(self, what: str, seconds: float) -> None:
        """Print that a phase is done and took `seconds`."""
        if self._is_first:
            self.took(what, seconds)

    def advance(self, what: str, done: float, total: float, unit: str) -> None:
        """Print the progress of a phase."""
        if self._is_first:
            self.progress(what, done, total, unit)


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
