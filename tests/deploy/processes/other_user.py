"""What another user of the machine can do to a server's Ray: nothing. Needs to be root."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

NOBODY = 65534


def assert_closed_to_others(folder: Path) -> None:
    """Fail if another user can list, connect to or remove what Ray has below `folder`, which he can enter. Ray opens
    its folders again when its first worker starts, so call it after that. Does nothing unless root calls it."""
    (session,) = (path for path in folder.glob("*/r/session_2*") if not path.is_symlink())
    sockets = [path for path in session.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    assert {"raylet", "plasma_store"} <= {path.name for path in sockets}
    if os.getuid() != 0:
        return
    assert _succeeds_as_nobody(lambda: os.listdir(folder)), "the test would prove nothing"
    for path in (session, session / "logs", session / "sockets", session.parent):
        assert not _succeeds_as_nobody(lambda path=path: os.listdir(path)), path
    for path in sockets:
        assert not _succeeds_as_nobody(lambda path=path: _connect(path)), path
        assert not _succeeds_as_nobody(lambda path=path: os.unlink(path)), path
        assert path.exists()


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def _succeeds_as_nobody(call: Callable[[], object]) -> bool:
    """Call in a child process of another user."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            call()
            os._exit(0)
        except OSError:
            os._exit(1)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 0
