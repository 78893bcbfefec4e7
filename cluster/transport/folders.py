"""Private folders of processes, for sockets and files of a server, and removal of those of killed processes.

`aerie.cluster.transport.discovery`, `aerie.cluster.replica.engine`, `aerie.deploy.serve.launch` and `aerie.deploy.cli`
create folders and remove their own. A server's start removes those of killed processes."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from aerie.cluster.linux import process_state

_PREFIX = "aerie-"
OWNER = "owner.json"


def private_folder(root: str | None = None) -> Path:
    """Create a private folder, which this process must remove. root: replaces the temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    give_to(folder, os.getpid())
    return folder


def give_to(folder: Path, pid: int) -> None:
    """Make process `pid` the folder's owner. The folder counts as abandoned once that process has ended."""
    (folder / OWNER).write_text(json.dumps(identity(pid)))


@contextlib.contextmanager
def temporary_folder(root: str | None = None) -> Iterator[Path]:
    """Create a private folder, and remove it after the context."""
    folder = private_folder(root)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned(spared: Collection[Path] = ()) -> list[Path]:
    """Remove this user's folders whose process has ended, and return them. Folders without an owner stay, as do those
    of other PID namespaces, whose processes are invisible. spared: folders that stay in any case."""
    removed = []
    for folder, owner in own_folders():
        if folder not in spared and not is_alive(owner):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def own_folders() -> Iterator[tuple[Path, dict[str, object]]]:
    """Return this user's folders with owners in this PID namespace."""
    namespace = identity(os.getpid())["namespace"]
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            mine = folder.stat().st_uid == os.getuid() and not folder.is_symlink()
            owner = json.loads((folder / OWNER).read_text())
        except (OSError, ValueError):
            continue
        is_whole = isinstance(owner, dict) and isinstance(owner.get("pid"), int)
        if mine and is_whole and owner.get("namespace") == namespace:
            yield folder, owner


def is_alive(process: Mapping[str, object]) -> bool:
    """Whether the process of this identity runs."""
    pid = process["pid"]
    had_ended = process["started"] == "" != process["namespace"]
    return isinstance(pid, int) and not had_ended and process == identity(pid)


def identity(pid: int) -> dict[str, object]:
    """Return an identity of a process, which a later process with its pid does not have; "" without /proc."""
    try:
        namespace, boot = os.readlink("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return {"pid": pid, "namespace": "", "started": ""}
    try:
        state, _, ticks = process_state(pid)
        started = "" if state in ("Z", "X") else f"{boot} {ticks}"
    except OSError:
        started = ""
    return {"pid": pid, "namespace": namespace, "started": started}
