"""Watches what a server needs: Serve's HAProxy, Ray's raylet and GCS, its own descendants, and its start."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from aerie.deploy.haproxy import LAST_CONFIG, REPLACEMENT_PID, SERVES_PID, living
from aerie.deploy.processes.guard import FAULT, end_descendants, process_tree
from aerie.deploy.processes.server_record import note, note_processes, sessions_of
from aerie.deploy.serve.applications import Application, read_applications
from aerie.deploy.serve.console import Console
from aerie.deploy.serve.ray_start import cause

_STARTED_S = 1.0  # a HAProxy that has run this long has the port


class Watch(ABC):
    """Calls `look` in a thread every `period_s` seconds."""

    period_s: float

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    @abstractmethod
    def look(self) -> None:
        """Check once; called in the thread."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. Call it before the watched process is stopped on purpose."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self.period_s):
            self.look()


class HaproxyWatch(Watch):
    """Replaces a dead HAProxy of Serve's by one with the last routes, until Serve has started another, which takes
    seconds.

    folder: as in `aerie.deploy.haproxy.write_script`; Serve has a folder below it for each node."""

    period_s = 0.25

    def __init__(self, folder: Path, binary: str, report: Callable[[str], None]) -> None:
        super().__init__()
        self._folder = folder
        self._binary = binary
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None  # the replacement, running or ended

    def look(self) -> None:
        for last in self._folder.glob(f"*/{LAST_CONFIG}"):
            if living(last.with_name(SERVES_PID)) is None and living(last.with_name(REPLACEMENT_PID)) is None:
                self._replace(last)

    def _replace(self, last: Path) -> None:
        """Start a HAProxy with its own admin socket, because Serve checks its HAProxy through the usual one. The new
        path is no longer than the usual one: a socket's path has at most 97 characters."""
        config = last.with_name("aerie-stand-in.cfg")
        config.write_text(re.sub(r"(stats socket \S*/)\S+", r"\1s", last.read_text()))
        command = [self._binary, "-db", "-dR", "-f", str(config)]
        if self._process is not None:
            self._process.wait()
        process = self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        last.with_name(REPLACEMENT_PID).write_text(str(process.pid))
        try:
            process.wait(_STARTED_S)
        except subprocess.TimeoutExpired:
            self._report(f"HAProxy died; another one serves its port (pid {process.pid}) until Serve has its own again")
        else:
            self._stopped.wait(_STARTED_S)  # an older one still holds the port


class RayWatch(Watch):
    """Ends this process and its descendants if Ray's raylet or GCS has died, for which Serve (2.60) would wait forever.

    node: Ray's record of the processes that it started here."""

    period_s = 0.5

    def __init__(self, node: Any, console: Console) -> None:
        super().__init__()
        self._node = node
        self._console = console

    def look(self) -> None:
        for name, process in self._node.dead_processes():
            if name in ("raylet", "gcs_server"):
                ended = f"Ray's {name} (pid {process.pid}) ended with {process.returncode}"
                why = cause(Path(self._node.get_logs_dir_path()), name, process.returncode)
                end_at_once(self._console, f"aerie serve: {ended}: nothing works without it ({why})")


def end_at_once(console: Console, reason: str, status: int = FAULT) -> None:
    """Print `reason`, and end this process and its descendants with `status`. Ray's logs stay after a fault only."""
    if status == FAULT:
        note(keeps_logs=True)
    else:
        for session in sessions_of(process_tree(os.getpid())):  # a starting Ray has not reported it
            note(session=session)
    end_descendants()
    console.__exit__()
    print(reason, file=sys.stderr, flush=True)
    os._exit(status)


STOPPED_LIMIT_S = 5.0  # time for which a process may be stopped (SIGSTOP)
_LOOK_S = 2.0  # reading /proc of 250 processes each second was half of this command's CPU time: 0.48 % of a core
_ZOMBIE_LIMIT_S = 10.0  # longer than a parent needs to read an exit code


class ProcessWatch(Watch):
    """Kills processes that stay stopped (SIGSTOP), so that they are replaced at once. A stopped process keeps its
    sockets open without answering: connections hang up to their own limits, and Ray 2.60 does not notice some of these
    processes (Serve's actor around HAProxy). report: called with a line for each killed process."""

    period_s = _LOOK_S

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report
        self._noted: set[int] = set()
        self._since_s: dict[tuple[int, str], float] = {}  # processes that were stopped or zombies at the last check

    def look(self) -> None:
        """Note the server's processes, end those that have been stopped for too long, and reap zombies."""
        if sys.platform != "linux":
            return
        tree, now_s = process_tree(os.getpid()), time.monotonic()
        if self._noted != tree.keys():
            self._noted = set(tree)
            note_processes(self._noted)
        own = {
            pid: state for pid, (state, parent) in tree.items() if state == "T" or (state, parent) == ("Z", os.getpid())
        }
        self._since_s = {process: self._since_s.get(process, now_s) for process in own.items()}
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


class StartWatch(Watch):
    """Ends this process with SIGTERM if an engine's start is refused or Serve gives up the application, until the
    application runs. Otherwise Serve (2.60) would try again, and `serve run` would never end.

    names: the applications to watch; None: all.
    replaced: names of those among them that a former version still runs as.
    reason: why the start cannot succeed; "" if it may."""

    period_s = 0.25

    def __init__(self, names: Sequence[str] | None = None, replaced: Collection[str] = ()) -> None:
        super().__init__()
        self._names = names
        self._replaced = replaced
        self._since = time.time()
        self.reason = ""

    def stop(self) -> None:
        """Stop watching. Does not wait for Serve, which may hang."""
        self._stopped.set()

    def look(self) -> None:
        """Look at the applications once: end the server if the start has failed, and the watch once they run."""
        current = read_applications()
        applications = {
            name: application for name, application in current.items() if self._names is None or name in self._names
        }
        self.reason = failure(applications, self._since)
        if self.reason:
            os.kill(os.getpid(), signal.SIGTERM)
        runs = applications and all(app.status == "RUNNING" for app in applications.values())
        if self.reason or (runs and not self._replaced):
            self._stopped.set()


def failure(applications: Mapping[str, Application], since: float = 0.0) -> str:
    """Return the reason that one of these applications cannot start; "" if all can. since: Unix time of the start."""
    from aerie.cluster.replica.engine import start_refusal

    for name, application in applications.items():
        if reason := start_refusal(name, since=since):
            return f"the engine could not start: {reason}"
        if application.status == "DEPLOY_FAILED":
            last = application.message.strip().splitlines()
            return f"Serve gave up application {name}: {last[-1] if last else 'it does not say why'}"
    return ""
