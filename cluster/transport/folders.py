"""Private folders of processes, for sockets and files of a server, and what killed ones have left. Made by
`cluster.transport.keys`, `cluster.replica.engine`, `deploy.launch` and `deploy.cli`, which remove their own; the next
server's start removes those that nobody could."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "aerie-"
_OWNER = "owner.json"


def private_folder() -> Path:
    """A new folder of this process, which removes it."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    (folder / _OWNER).write_text(json.dumps(_identity(os.getpid())))
    return folder


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """One that is gone afterwards."""
    folder = private_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned() -> list[Path]:
    """Removes this user's folders whose process has ended; returns which. One that does not say whose it is stays, and
    one of another PID namespace, whose processes cannot be seen."""
    removed = []
    own = _identity(os.getpid())
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            mine = folder.stat().st_uid == os.getuid() and not folder.is_symlink()
            owner = json.loads((folder / _OWNER).read_text())
        except (OSError, ValueError):
            continue
        if not mine or not isinstance(owner, dict) or owner.get("namespace") != own["namespace"]:
            continue
        pid = owner.get("pid")
        if isinstance(pid, int) and owner != _identity(pid):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _identity(pid: int) -> dict[str, object]:
    """What tells a process from all others, also from later ones of its number; "" where there is no /proc."""
    try:
        namespace, boot = os.readlink("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return {"pid": pid, "namespace": "", "started": ""}
    try:
        # After the name, which may hold anything: field 22 is the start in ticks since the boot (proc_pid_stat(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = "" if fields[0] in ("Z", "X") else f"{boot} {fields[19]}"
    except OSError:
        started = ""
    return {"pid": pid, "namespace": namespace, "started": started}
