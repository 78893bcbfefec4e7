"""Output of `aerie serve`: on a terminal the steps of a start with a live line below them, in a file plain lines.
Output of Ray, Serve and other programs goes to a log file.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from aerie.cluster.linux import home_folder
from aerie.cluster.start_log import MARK, READY, Step, read_line
from aerie.cluster.start_log import Progress as StepProgress

_SHOWN = ("aerie serve", "check", "engine", "rank 0")  # the processes whose steps are shown; all are in the log
_DETAILS = ("actor began", "took the rank started ahead", "replica began")
_PLAIN_PERIOD_S = 10.0  # between two lines of a long step, if output is a file


class Console:
    """The output of one `aerie serve`. Its methods may be called from any thread.

    began_s: Unix time at which the command began; times in lines count from there.
    log: file for output that is not shown; None shows everything (`--verbose`).
    ready: set once an engine accepts requests.
    """

    def __init__(self, began_s: float, log: Path | None) -> None:
        self.ready = threading.Event()
        self._began_s = began_s
        self._log = None if log is None else log.open("a", buffering=1, errors="replace")
        self._shown: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        self._rich = _Output(file=self._shown, highlight=False, soft_wrap=True)
        self._view = _LiveView(self._rich, began_s) if self._rich.is_terminal and log is not None else None
        self._plain_s = 0.0
        self._is_ending = False
        self._lock = threading.RLock()
        self._former: tuple[int, int] | None = None

    def __enter__(self) -> "Console":
        """Redirect stdout and stderr of this process and its children to the log."""
        if self._log is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            self._former = os.dup(1), os.dup(2)
            os.dup2(self._log.fileno(), 1)
            os.dup2(self._log.fileno(), 2)
        if self._view is not None:
            self._view.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the live line and restore stdout and stderr. Later output of other threads is dropped."""
        with self._lock:
            self.end_start()
            if self._former is not None:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError):
                        stream.flush()
                for number, former in zip((1, 2), self._former, strict=True):
                    os.dup2(former, number)
                    os.close(former)
                self._former = None
            for file in (self._shown, self._log):
                if file is not None:
                    with contextlib.suppress(OSError):
                        file.close()

    def step(self, what: str, seconds: float, process: str = "aerie serve") -> None:
        """Show a finished step of this process, which took `seconds`."""
        self._take(Step(time.time(), process, what, seconds))

    def say(self, text: str) -> None:
        """Show `text`, and write it to the log too."""
        with self._lock:
            if self._shown.closed:
                return
            self._print(text)
            self._write(text)

    def receive(self, line: str, source: str = "") -> None:
        """Process a line of another process: show it if it is marked as Aerie's or JSON, else log it.

        source: name of the process, for the log."""
        line = line.rstrip()
        if self._is_ending:
            self._other(f"{source}{line}")
            return
        marked = line.startswith(MARK)
        if marked and (read := read_line(line.removeprefix(MARK))) is not None:
            self._take(read)
        elif marked or line.startswith('{"time": '):
            self.say(line.removeprefix(MARK))
        elif line:
            self._other(f"{source}{line}")

    def receive_ray(self, batch: Mapping[str, Any]) -> None:
        """Process lines of Ray's processes, as Ray's driver passes them."""
        name = batch.get("actor_name") or batch.get("task_name") or ""
        for line in batch.get("lines", ()):
            self.receive(line, f"({name} pid={batch.get('pid')}) ")

    def end_server(self) -> None:
        """Only log other processes' output from now on, because ending processes report each other as lost."""
        self._is_ending = True

    def end_start(self) -> None:
        """End the live line after the start."""
        with self._lock:
            if self._view is not None:
                self._view.stop()
                self._view = None

    def _take(self, read: Step | StepProgress) -> None:
        """Show or log one step of the start."""
        with self._lock:
            if self._shown.closed:
                return
            text = f"{read.at_s - self._began_s:6.1f} s  {read.process:<12}  {read.what:<32}"
            if isinstance(read, StepProgress):
                self._take_progress(read, f"{text}  {read.done:g} of {read.total:g} {read.unit}")
                return
            text = f"{text}  {read.took_s:6.1f} s"
            is_shown = read.process in _SHOWN
            if self._view is not None and is_shown:
                self._view.step(read)
            if self._log is None or (is_shown and read.what not in _DETAILS):
                self.say(text)
            else:
                self._write(text)
        if read.what == READY and read.process == "engine":
            self.ready.set()

    def _take_progress(self, read: StepProgress, text: str) -> None:
        """Show progress: in the live view, or as a line every few seconds."""
        now_s = time.monotonic()
        if self._view is not None:
            self._view.progress(read)
        elif now_s - self._plain_s >= _PLAIN_PERIOD_S:
            self._plain_s = now_s
            self.say(text)

    def _other(self, line: str) -> None:
        """Print or log a line that is none of Aerie's own."""
        with self._lock:
            if self._shown.closed:
                return
            if self._log is None:
                self._print(line)
            else:
                self._write(line)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal or pipe must not stop the server
            self._rich.print(text, markup=False)

    def _write(self, text: str) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # nor does a full disk
                os.write(self._log.fileno(), f"{text}\n".encode(errors="replace"))


class _Output(rich.console.Console):
    """Rich's console, except that closed output does not end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class _LiveView:
    """A spinner with the step that the start waits for, and a bar if the step's size is known."""

    def __init__(self, console: rich.console.Console, began_s: float) -> None:
        self._began_s = began_s
        self._spinner = Spinner("dots")
        self._waiting = _FOLLOWING["configuration read"]
        self._first: StepProgress | None = None  # progress of the step shown with a bar
        self._last: StepProgress | None = None
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=5,
            transient=True,
            redirect_stdout=False,  # they go to the log
            redirect_stderr=False,
        )

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def step(self, step: Step) -> None:
        """Show the step that follows `step`."""
        if (following := _FOLLOWING.get(step.what)) is not None:
            self._waiting, self._first, self._last = following, None, None

    def progress(self, read: StepProgress) -> None:
        """Show a step's progress and speed."""
        if self._first is None or self._first.what != read.what:
            self._first = read
        self._waiting, self._last = read.what, read

    def _render(self) -> rich.console.RenderableType:
        self._spinner.update(text=f"{time.time() - self._began_s:4.0f} s  {self._waiting}")
        first, last = self._first, self._last
        if first is None or last is None:
            return self._spinner
        row = Table.grid(padding=(0, 2))
        bar = ProgressBar(last.total, last.done, width=24)
        row.add_row(self._spinner, bar, f"{last.done:g} of {last.total:g} {last.unit}{_speed(first, last)}")
        return row


def _speed(first: StepProgress, last: StepProgress) -> str:
    seconds = last.at_s - first.at_s
    return f", {(last.done - first.done) / seconds:.1f} GB/s" if seconds > 0 and last.unit == "GB" else ""


# A step -> the step that the start waits for next.
_FOLLOWING = {
    "configuration read": "reading checkpoints, starting Ray",
    "Ray started": "starting Serve",
    "Serve's commands imported": "starting Serve",
    "checkpoints checked": "starting Serve",
    "replica began": "starting the ranks",
    "process group joined": "loading the target",
    "target loaded": "loading the draft",
    "draft loaded": "preparing the KV cache",
    "KV cache allocated": "capturing and warming up",
    "warmed up": "measuring what steps cost",
    "costs measured": "opening the engine",
}


def log_folders() -> list[Path]:
    """Return the folders in which logs may be: the user's state folder, and the one for where it is not writable."""
    import tempfile

    state = os.environ.get("XDG_STATE_HOME") or home_folder(os.environ) / ".local" / "state"
    return [Path(state) / "aerie", Path(tempfile.gettempdir()) / f"aerie-logs-{os.getuid()}"]


def log_path(name: str) -> Path:
    """Create an empty log file of this name and return its path; rename a former one to .1. The folder is the
    first of `log_folders` that is writable. Raises OSError."""
    folders = log_folders()
    for number, folder in enumerate(folders):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"{name}.log"
            if path.exists():
                path.replace(path.with_suffix(".log.1"))
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
            return path
        except OSError:
            if number == len(folders) - 1:
                raise
    raise AssertionError("there are folders")


def show_ray_lines(console: Console) -> None:
    """Send what Ray's processes write to `console` instead of this process's stdout (Ray 2.60)."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher

    def receive(batch: Mapping[str, Any]) -> None:
        if batch.get("pid") != "autoscaler":  # which reports its status every five seconds
            console.receive_ray(batch)

    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    global_worker_stdstream_dispatcher.add_handler("aerie", receive)
