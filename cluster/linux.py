"""Linux settings of a process. Uses only the standard library, so that processes can start with it."""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; so are the next
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36
_NICENESS = 10
_MAX_ROOM = 1 << 16  # open files that a process has room for from its start; 8 bytes each


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """This process gets the signal when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def use_exact_timers() -> None:
    """Linux ends this thread's sleeps within a microsecond; usually it lets 50 pass, to wake up less often."""
    _prctl(_PR_SET_TIMERSLACK, 1000)


def set_name(name: str) -> None:
    """This process is called so by `top` and `ps -o comm`: 15 characters at most."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def lower_priority() -> None:
    """Lower this process's priority: for work that uses all cores."""
    os.nice(max(0, _NICENESS - os.nice(0)))


def trim_heap() -> None:
    """Return free memory of the C allocator to the system, where the library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard limit, make room for as many, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    limit = soft if soft != resource.RLIM_INFINITY else sys.maxsize
    _make_room_for_files(min(limit, _MAX_ROOM))
    return limit


def _make_room_for_files(count: int) -> None:
    """Give this process's table of open files `count` places.

    Linux doubles the table when it is full, and of a process with threads the call that opens the next file waits until
    all processors have left their RCU read sections: 10 ms on an idle machine, and 640 ms where a process of the lowest
    priority was in one. Python holds its lock in such calls (`accept` in uvloop, `os.pidfd_open`), so that no stream
    goes on meanwhile.
    """
    with contextlib.suppress(OSError):  # another limit, or no memory: the table grows as before
        first = os.open(os.devnull, os.O_RDONLY)
        try:
            os.close(fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, count - 1))
        finally:
            os.close(first)


def _prctl(option: int, value: object) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
