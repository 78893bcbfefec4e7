"""Serve's HAProxy as this server runs it: an answer that clients can act on while no ingress is there, and no pause in
routes when it or Serve's actor around it is replaced. Used by `deploy.launch`; `deploy.watches` puts a stand-in on its
port when it dies.

Serve (Ray 2.60) starts HAProxy through RAY_SERVE_HAPROXY_BINARY_PATH. What is named there is a script that runs this
file, which changes the configuration, takes the port over from a HAProxy that is left of before, and becomes HAProxy.
Needs the standard library only: each change of routes starts it.
"""

import os
import re
import shlex
import signal
import sys
from pathlib import Path

RETRY_AFTER_S = 2
_BODY = (
    '{"error":{"message":"No part of the server that could answer is reachable now; try again",'
    '"type":"service_unavailable_error","param":null,"code":"service_unavailable"}}'
)
PID, STAND_IN, LAST, _UNAVAILABLE = "aerie.pid", "aerie-stand-in.pid", "aerie-last.cfg", "aerie-503.http"


def write_script(folder: Path, binary: str, program: str = __file__) -> Path:
    """The script that Serve is to call instead of HAProxy's `binary`: runs `program`, which becomes it."""
    script = folder / f"{Path(program).stem}.sh"
    command = shlex.join([sys.executable, "-I", "-S", str(Path(program).resolve()), binary])
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


def living(pid_file: Path) -> int | None:
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
    unavailable, last = folder / _UNAVAILABLE, folder / LAST
    unavailable.write_text(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nCache-Control: no-cache\r\n"
        f"Retry-After: {RETRY_AFTER_S}\r\nContent-Length: {len(_BODY)}\r\n\r\n{_BODY}"
    )
    config = rewritten(path.read_text(), unavailable, last.read_text() if last.exists() else None)
    path.write_text(config)
    if has_routes(config):
        _replace(last, config)
    found = (living(folder / name) for name in (PID, STAND_IN))
    left = [pid for pid in found if pid is not None]
    _replace(folder / PID, str(os.getpid()))
    # Serve's processes block SIGINT, and what they start inherits that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execv(binary, [binary, *start_arguments(arguments, left)])


if __name__ == "__main__":
    _become_haproxy(sys.argv[1], sys.argv[2:])
