"""Serve's HAProxy as this server runs it: an answer that clients can act on while no ingress is there, no pause in
routes when it or Serve's actor around it is replaced, and a stand-in on its port when it dies. Used by `deploy.launch`.

Serve (Ray 2.60) starts HAProxy through RAY_SERVE_HAPROXY_BINARY_PATH. What is named there is a script that runs this
file, which changes the configuration, takes the port over from a HAProxy that is left of before, and becomes HAProxy.
Needs the standard library only: each change of routes starts it.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

RETRY_AFTER_S = 2
WATCH_PERIOD_S = 0.25
_STARTED_S = 1.0  # what lives for so long has got the port
_BODY = (
    '{"error":{"message":"No part of the server that could answer is reachable now; try again",'
    '"type":"service_unavailable_error","param":null,"code":"service_unavailable"}}'
)
_PID, _STAND_IN, _LAST, _UNAVAILABLE = "aerie.pid", "aerie-stand-in.pid", "aerie-last.cfg", "aerie-503.http"


def write_script(folder: Path, binary: str) -> Path:
    """The script that Serve is to call instead of HAProxy's `binary`."""
    script = folder / "haproxy"
    command = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).resolve()), binary])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    return script


def rewritten(config: str, unavailable: Path, last: str | None) -> str:
    """Serve's `config` with the answer in file `unavailable` for what no server answers, and without the Python proxy
    that Serve names as a last resort: it answers 404 and 500. last: the configuration before, used in place of one
    without routes: such a one comes at the start of Serve's actor and at its end."""
    if not has_routes(config):
        if last is not None:
            return last
        # All paths are this application's soon.
        config = re.sub(
            r"http-request return status 404 .*",
            f"http-request return status 503 content-type application/json string '{_BODY}' "
            f'hdr Retry-After "{RETRY_AFTER_S}"',
            config,
        )
    config = re.sub(r"(?m)^(\s*errorfile 50[234]) .*$", rf"\1 {unavailable}", config)
    return re.sub(r"(?m)^\s*server .* backup$\n?", "", config)


def has_routes(config: str) -> bool:
    """Whether it sends any path anywhere."""
    return re.search(r"(?m)^\s*use_backend ", config) is not None


def start_arguments(arguments: list[str], left: list[int]) -> list[str]:
    """HAProxy's arguments, so that it takes the port over from processes `left` and has them finish."""
    left = [pid for pid in left if str(pid) not in arguments]
    if not left:
        return arguments
    pids = [str(pid) for pid in left]
    if "-sf" in arguments:
        at = arguments.index("-sf") + 1
        return [*arguments[:at], *pids, *arguments[at:]]
    return [*arguments, "-sf", *pids]


class Watch:
    """Puts a HAProxy with the last routes on the port when Serve's has died, until Serve has started another, which
    takes seconds. folder: what `write_script` was given; Serve has a folder below it for each node."""

    def __init__(self, folder: Path, binary: str, report: Callable[[str], None]) -> None:
        self._folder = folder
        self._binary = binary
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None  # the stand-in, ended or not
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="haproxy watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Before HAProxy is stopped on purpose."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(WATCH_PERIOD_S):
            for last in self._folder.glob(f"*/{_LAST}"):
                pid = _living(last.with_name(_PID))
                if pid is None and _living(last.with_name(_STAND_IN)) is None:
                    self._stand_in(last)

    def _stand_in(self, last: Path) -> None:
        """With an admin socket of its own: Serve asks the one it knows whether its HAProxy lives."""
        config = last.with_name("aerie-stand-in.cfg")
        config.write_text(re.sub(r"(stats socket \S+)", r"\1.stand-in", last.read_text()))
        command = [self._binary, "-db", "-dR", "-f", str(config)]
        if self._process is not None:
            self._process.wait()
        process = self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        last.with_name(_STAND_IN).write_text(str(process.pid))
        try:
            process.wait(_STARTED_S)
        except subprocess.TimeoutExpired:
            self._report(f"HAProxy died; another one serves its port (pid {process.pid}) until Serve has its own again")
        else:
            self._stopped.wait(_STARTED_S)  # an older one still holds the port


def _living(pid_file: Path) -> int | None:
    """The HAProxy whose number is in the file, if it runs."""
    try:
        pid = int(pid_file.read_text())
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except (OSError, ValueError):
        return None
    running = stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return pid if running and str(pid_file.parent) in command else None


def _replace(path: Path, text: str) -> None:
    other = path.with_name(f"{path.name}.new")
    other.write_text(text)
    other.replace(path)


def _become_haproxy(binary: str, arguments: list[str]) -> None:
    path = Path(arguments[arguments.index("-f") + 1])
    folder = path.parent
    unavailable, last = folder / _UNAVAILABLE, folder / _LAST
    unavailable.write_text(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nCache-Control: no-cache\r\n"
        f"Retry-After: {RETRY_AFTER_S}\r\nContent-Length: {len(_BODY)}\r\n\r\n{_BODY}"
    )
    config = rewritten(path.read_text(), unavailable, last.read_text() if last.exists() else None)
    path.write_text(config)
    if has_routes(config):
        _replace(last, config)
    found = (_living(folder / name) for name in (_PID, _STAND_IN))
    left = [pid for pid in found if pid is not None]
    _replace(folder / _PID, str(os.getpid()))
    # Serve's processes block SIGINT, and what they start inherits that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execv(binary, [binary, *start_arguments(arguments, left)])


if __name__ == "__main__":
    _become_haproxy(sys.argv[1], sys.argv[2:])
