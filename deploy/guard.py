"""The process that a terminal or a supervisor signals: runs the server in a session of its own, hands signals on to it,
and leaves nothing behind. Called by `deploy.cli` before anything is imported; needs the standard library and Linux.

A signal to a whole process group would otherwise end Ray's processes before the server has drained, and a server that
is killed would leave HAProxy on its port. Both this process and the server adopt what is orphaned below them
(PR_SET_CHILD_SUBREAPER, Linux 3.4), so that whichever is left finds all of it.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.linux import adopt_orphans, end_with_parent

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_REPEAT_S = 1.0  # what comes sooner after the first signal is the same one, sent to a group and by its members
_STOP_S = 10.0  # for the server to end at once, after a second signal
_SWEEP_S = 5.0


def run_guarded(run: Callable[[], int]) -> int:
    """Run `run` in a child process; returns its exit code in this process, after all that it started has ended, and
    `run`'s own result in the child. Where there is no Linux, just run it."""
    if sys.platform != "linux":
        return run()
    ignored = {number for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN}
    passed_on = {*_PASSED_ON} - (ignored & {signal.SIGHUP})  # nohup's, which a server heeds
    if signal.SIGINT in ignored:  # a shell's, for what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*passed_on, signal.SIGCHLD})
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.setsid()
        end_with_parent(signal.SIGTERM)
        adopt_orphans()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*passed_on, signal.SIGCHLD})
        if os.getppid() != parent:
            return 1  # it was killed before it could be watched
        try:
            return run()
        finally:
            end_descendants()
    try:
        return _watch(child, passed_on)
    finally:
        end_descendants()


def end_descendants() -> None:
    """Kill every process below this one, and those that appear meanwhile; at most for `_SWEEP_S`."""
    if sys.platform != "linux":
        return
    deadline_s = time.monotonic() + _SWEEP_S
    while (found := descendants(os.getpid())) and time.monotonic() < deadline_s:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Processes below `pid` that have not ended, as /proc shows them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # After the name, which may hold anything: the state and the parent (proc_pid_stat(5)).
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z" or int(parent) == pid:  # an ended child of ours is to be waited for
                    parents[int(entry.name)] = int(parent)
    found = [child for child, parent in parents.items() if parent == pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _watch(child: int, passed_on: set[signal.Signals]) -> int:
    """Pass signals on until the child has ended; returns its exit code, or 128 and the signal's number.

    The first signal is a request to drain; one that comes later ends the server at once."""
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
        now = time.monotonic()
        if first_s is None:
            first_s = now
            os.kill(child, signal.SIGINT if came.si_signo == signal.SIGINT else signal.SIGTERM)
        elif now - first_s > _REPEAT_S and kill_s is None:
            kill_s = now + _STOP_S
            os.kill(child, signal.SIGINT)
