"""Records the processes and files of `aerie serve` and `aerie start` on this machine, so that they can be removed even
after a crash. Used by `aerie.deploy.processes.guard`, `aerie.deploy.serve`, `aerie.deploy.start` and
`aerie.deploy.stop`; needs the standard library only.

A record is a private folder (`aerie.cluster.transport.sockets`). All processes of the server have its path in their
environment (`VARIABLE`). The server also records their pids and start times, because some processes overwrite their
environment with a title.
"""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aerie.cluster.transport import sockets

VARIABLE = "AERIE_SERVER"
_RECORD, _PROCESSES = "server.json", "processes.json"
_END_LIMIT_S = 5.0
_SESSION_OPTIONS = ("--session-dir=", "--session_dir=")  # on the command lines of Ray's own processes
PRIVATE = ".aerie"  # marks a private folder around the folder of Ray's sessions
_ADDRESS_OPTIONS = ("--gcs-address=",)


@dataclass(frozen=True)
class Record:
    """A running server or cluster node, in a file of its folder.

    kind: "server" of `aerie serve`, or "node" of `aerie start`.

    port: HTTP port, or port of the cluster's head; 0 while unknown.
    guard: pid of the process that receives signals (`aerie.deploy.processes.guard`); 0 for none.
    stop_limit_s: maximum time from SIGTERM to its end.
    session: session folder of the Ray that it started; "" if unknown.
    private_folder: its private folder outside of the temporary folder; "" for none.
    keeps_logs: it ended by a fault, so Ray's logs are kept.
    ray: variables by which other commands reach its Ray (`aerie.deploy.access`); empty until Ray runs.
    """

    kind: str
    port: int = 0
    guard: int = 0
    stop_limit_s: float = 60.0
    session: str = ""
    private_folder: str = ""
    keeps_logs: bool = False
    ray: dict[str, str] = field(default_factory=dict)


def begin(record: Record) -> Path:
    """Create a folder for the record and put its path into this process's environment."""
    folder = sockets.private_folder()
    _write(folder / _RECORD, asdict(record))
    os.environ[VARIABLE] = str(folder)
    return folder


def note(**values: object) -> None:
    """Change fields of this server's record, if it has one."""
    folder = os.environ.get(VARIABLE)
    record = read(Path(folder)) if folder else None
    if folder and record is not None:
        _write(Path(folder) / _RECORD, asdict(record) | values)


def note_processes(pids: Iterable[int]) -> None:
    """Record the server's processes."""
    folder = os.environ.get(VARIABLE)
    if folder and Path(folder).is_dir():
        _write(Path(folder) / _PROCESSES, [sockets.identity(pid) for pid in pids])


def read(folder: Path) -> Record | None:
    """Return the record in a folder, None without one."""
    try:
        return Record(**json.loads((folder / _RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def records() -> Iterator[tuple[Path, Record, dict[str, object]]]:
    """Return folder, record and owner of every server and node of this user on this machine, running or not."""
    for folder, owner in sockets.own_folders():
        if (record := read(folder)) is not None:
            yield folder, record, owner


def processes(folder: Path) -> list[int]:
    """Return the running processes of a server or node, except its owner and this process."""
    marker = f"{VARIABLE}={folder}".encode()
    pids = {pid for pid, words in _words_of_processes("environ") if marker in words}
    with contextlib.suppress(OSError, ValueError):
        pids |= {record["pid"] for record in json.loads((folder / _PROCESSES).read_text()) if sockets.is_alive(record)}
    return sorted(pids - {os.getpid()})


def clear(folder: Path, keep_session: bool = False) -> None:
    """End remaining processes of an ended server, and remove its files. keep_session: keep Ray's logs and the record
    that names them."""
    record = read(folder)
    sessions = {record.session} if record is not None else set()
    deadline_s = time.monotonic() + _END_LIMIT_S
    while (pids := processes(folder)) and time.monotonic() < deadline_s:
        sessions |= sessions_of(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    if keep_session:
        return
    for session in sessions - {""}:
        remove_session(Path(session))
    if record is not None and record.private_folder:
        shutil.rmtree(record.private_folder, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned(with_logs: bool) -> None:
    """Clean up after this user's killed servers and nodes. with_logs: also after those that a fault ended."""
    spared = set()
    for folder, record, owner in list(records()):
        if is_alive(folder, record, owner) or (record.keeps_logs and not with_logs):
            spared.add(folder)
        else:
            clear(folder)
    sockets.clear_abandoned(spared)


def is_alive(folder: Path, record: Record, owner: Mapping[str, object]) -> bool:
    """Whether the server or node runs. `ray start` ends once the node does."""
    return sockets.is_alive(owner) or (record.kind == "node" and bool(processes(folder)))


def sessions_of(pids: Iterable[int]) -> set[str]:
    """Return Ray's session folders named on the command lines of these processes."""
    return _values(pids, _SESSION_OPTIONS)


def addresses_of(pids: Iterable[int]) -> set[str]:
    """Return the addresses of Ray's GCS, HOST:PORT, named on the command lines of these processes."""
    return _values(pids, _ADDRESS_OPTIONS)


def _values(pids: Iterable[int], options: Iterable[str]) -> set[str]:
    """Return the values of these options on the processes' command lines. options: with their `=`."""
    values = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0"):
                values |= {word.removeprefix(option) for option in options if word.startswith(option)}
    return values


def remove_session(session: Path) -> None:
    """Remove one of Ray's session folders, with Aerie's private folder around it, unless a process of another node uses
    it."""
    if not session.name.startswith("session_"):
        return
    private = session.parent.parent
    removed = private if (private / PRIVATE).is_file() else session
    name = str(removed).encode()
    if any(name in word for _, words in _words_of_processes("cmdline") for word in words):
        return
    shutil.rmtree(removed, ignore_errors=True)
    latest = session.with_name("session_latest")
    with contextlib.suppress(OSError):
        if latest.is_symlink() and not latest.exists():
            latest.unlink()


def _words_of_processes(name: str) -> Iterator[tuple[int, list[bytes]]]:
    """For each process that this user can read, yield its pid and the words of /proc/PID/`name`."""
    for pid in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if pid.isdigit():
            with contextlib.suppress(OSError):
                yield int(pid), Path("/proc", pid, name).read_bytes().split(b"\0")


def _write(path: Path, content: object) -> None:
    other = path.with_name(f"{path.name}.new")
    other.write_text(json.dumps(content))
    other.replace(path)
