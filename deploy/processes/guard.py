"""The guard: the process that a terminal or supervisor signals. It runs the server in a session of its own, forwards
signals, and cleans up after a crash. Called by `aerie.deploy.cli` before other imports; needs only the standard
library, and Linux.

Without it, a signal to the whole process group would end Ray's processes before the server has drained, and a killed
server would leave HAProxy on its port. Orphaned descendants become children of this process or of the server
(PR_SET_CHILD_SUBREAPER, Linux 3.4), so whichever of the two survives finds all of them.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from aerie.cluster.linux import adopt_orphans, end_with_parent, process_state, set_name
from aerie.cluster.transport.sockets import OWNER, give_to, is_alive
from aerie.deploy.processes.server_record import Record, begin, clear, clear_abandoned, note, read

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_REPEAT_S = 1.0  # signals within this time after the first repeat it: a process group and its members send it
_STOP_S = 10.0  # limit of an immediate end after a second signal
_SWEEP_S = 5.0  # maximum time to kill all descendants
_SHOW_CURSOR = b"\x1b[?25h\r\x1b[2K"  # removes a killed live line from the terminal
_KEEPER_PERIOD_S = 0.2
FAULT = 1  # exit code after a fault: Ray's logs stay until the next start or `aerie stop`


def run_guarded(run: Callable[[Callable[[], None]], int]) -> int:
    """Run `run` in a child process. In this process, return its exit code once all processes that it started have ended
    and its files are removed; in the child, return `run`'s own result. On other systems than Linux, call `run`
    directly.

    `run` is called with a function, which it calls once it handles signals itself. Until then a signal ends it and its
    descendants at once."""
    if sys.platform != "linux":
        return run(lambda: None)
    try:
        folder = begin(Record("server", guard=os.getpid()))
    except OSError as error:
        where = error.filename or "TMPDIR, /tmp, /var/tmp and /usr/tmp"
        print(f"{where}: cannot be written ({error.strerror}); free some space, or set TMPDIR", file=sys.stderr)
        return 2
    _start_cleaner(folder)
    ignored = {number for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN}
    passed_on = {*_PASSED_ON} - (ignored & {signal.SIGHUP})  # ignored under nohup, which the server respects
    if signal.SIGINT in ignored:  # ignored by a shell for background processes
        signal.signal(signal.SIGINT, signal.default_int_handler)
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*passed_on, signal.SIGCHLD})
    started, starting = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(started)
        os.setsid()
        end_with_parent(signal.SIGTERM)
        give_to(folder, os.getpid())
        adopt_orphans()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*passed_on, signal.SIGCHLD})
        if os.getppid() != parent:
            return 1  # killed before it could be watched
        try:
            return run(lambda: os.close(starting))
        finally:
            end_descendants()
    os.close(starting)
    code = 1
    try:
        code = _watch(child, passed_on, started, folder)
    finally:
        end_descendants()
        remove_server_files(folder, keep_session=code == FAULT)
    return code


def remove_server_files(folder: Path, keep_session: bool = False) -> None:
    """Remove the server's files in `folder`, and the folders of its killed processes."""
    if keep_session:
        note(keeps_logs=True)
    clear(folder, keep_session)
    clear_abandoned(with_logs=False)


def _start_cleaner(folder: Path) -> None:
    """Start a process that cleans up if both this one and the server are killed. It is outside of this process's tree,
    so that it survives the end of the tree."""
    guard = os.getpid()
    first = os.fork()
    if first != 0:
        os.waitpid(first, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            _remove_files_at_end(folder, guard)
    finally:
        os._exit(0)


def _remove_files_at_end(folder: Path, guard: int) -> None:
    """Remove the server's files after it has ended, if the guard could not because it was killed. Runs in a process of
    its own."""
    set_name("aerie-keeper")
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # readers of the server's output wait for it to be closed
        os.dup2(nowhere, stream)
    _wait_for(guard)
    try:
        server = json.loads((folder / OWNER).read_text())
    except (OSError, ValueError):
        return  # the guard has cleaned up
    while is_alive(server):
        time.sleep(_KEEPER_PERIOD_S)
    record = read(folder)
    if record is not None and not record.keeps_logs:
        remove_server_files(folder)


def _wait_for(pid: int) -> None:
    """Wait until another process has ended."""
    with contextlib.suppress(ProcessLookupError):
        end = os.pidfd_open(pid)
        select.select([end], [], [])


def end_descendants() -> None:
    """Kill all descendants of this process, including new ones, for at most `_SWEEP_S`."""
    if sys.platform != "linux":
        return
    deadline_s = time.monotonic() + _SWEEP_S
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Return the descendants of `pid` that have not ended, and its ended children that were not waited for."""
    return [child for child, (state, parent) in process_tree(pid).items() if state != "Z" or parent == pid]


def process_tree(pid: int) -> dict[int, tuple[str, int]]:
    """Return the state and parent of each descendant of `pid`, from /proc."""
    every: dict[int, tuple[str, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                state, parent, _ = process_state(name)
                every[int(name)] = state, parent
    tree = {pid: ("", 0)}
    rest = dict(every)
    while below := {child: rest[child] for child in rest if rest[child][1] in tree and child not in tree}:
        tree |= below
        for child in below:
            del rest[child]
    del tree[pid]
    return tree


def _is_closed(pipe: int) -> bool:
    """Whether the other end of a pipe is closed. The pipe carries no data."""
    return bool(select.select([pipe], [], [], 0)[0])


def _end_start(child: int, signum: int, folder: Path) -> int:
    """Kill a server that does not accept requests yet, with its descendants, and print so. Return 128 plus the signal's
    number."""
    os.kill(child, signal.SIGKILL)
    remove_server_files(folder)  # before `end_descendants`: files are found through Ray's processes
    for number in (1, 2):
        if os.isatty(number):
            os.write(number, _SHOW_CURSOR)
            break
    print(f"aerie serve: stopped by {signal.Signals(signum).name} before it was ready", file=sys.stderr, flush=True)
    return 128 + signum


def _watch(child: int, passed_on: set[signal.Signals], started: int, folder: Path) -> int:
    """Forward signals until the child has ended. Return its exit code, or 128 plus the signal's number.

    started: a pipe whose other end the child closes once it handles signals itself.

    The first signal is a request to drain; a later one ends the server at once."""
    first_s: float | None = None
    kill_s: float | None = None
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
        now = time.monotonic()
        if kill_s is not None and now >= kill_s:
            os.kill(child, signal.SIGKILL)
        came = signal.sigtimedwait({*passed_on, signal.SIGCHLD}, 1.0)
        if came is None or came.si_signo == signal.SIGCHLD:
            continue
        if first_s is None and not _is_closed(started):
            return _end_start(child, came.si_signo, folder)
        now = time.monotonic()
        if first_s is None:
            first_s = now
            os.kill(child, signal.SIGINT if came.si_signo == signal.SIGINT else signal.SIGTERM)
        elif now - first_s > _REPEAT_S and kill_s is None:
            kill_s = now + _STOP_S
            os.kill(child, signal.SIGINT)
