"""Linux settings of a process. Uses only the standard library, so that processes can start with it."""

import contextlib
import ctypes
import fcntl
import os
import platform
import pwd
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

NO_HOME = Path(os.devnull) / "home"  # cannot be made
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h, like the next ones
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFADDR = 0x8915  # netdevice(7)
_NICENESS = 10
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of the system call; libc has no function for it
_SHORTEST_SLICE_NS = 100_000  # minimum that Linux accepts
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_MMAP_THRESHOLD_BYTES = 32 << 20  # maximum that glibc accepts
_TOP_PAD_BYTES = 256 << 20  # minimum growth of the heap; pages use memory only once they are written
_MAX_ROOM = 1 << 16  # entries of the file table from the start; 8 bytes each


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process the signal when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def physical_cores(system: Path = Path("/sys")) -> int:
    """Return the number of physical cores that this process may use: hardware threads of one core count once, because
    they share its arithmetic units, and a control group's quota of time limits the number (cgroup-v2(7), cpu.max)."""
    usable, cpus = os.sched_getaffinity(0), system / "devices" / "system" / "cpu"
    siblings = set()
    for cpu in usable:
        try:
            siblings.add((cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(cpu))
    try:
        quota, period = (system / "fs" / "cgroup" / "cpu.max").read_text().split()
        limit = max(1, int(quota) // int(period))
    except (OSError, ValueError):  # without a limit it is "max"
        limit = len(siblings)
    return min(len(siblings), limit)


def process_state(pid: int | str) -> tuple[str, int, int]:
    """Return state, parent and start time, in ticks since the boot, of a process. pid: a number or "self". Raises
    OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # after the name, which may contain any bytes
    return fields[0].decode(), int(fields[1]), int(fields[19])  # proc_pid_stat(5)


def use_exact_timers() -> None:
    """End this thread's sleeps within a microsecond; Linux's default slack is 50."""
    _prctl(_PR_SET_TIMERSLACK, 1000)


class _SchedAttributes(ctypes.Structure):
    """`struct sched_attr`, sched_setattr(2)."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    ]


def use_short_time_slice() -> None:
    """Let this thread, and those that it starts, run as soon as they wake, by asking for the shortest time slice. Its
    share of the cores stays the same.

    Since 6.12, a thread that wakes preempts a running thread with a longer time slice; otherwise the running thread
    keeps the core until a timer tick (1 to 10 ms). A rank that polls another rank with short sleeps would lose that
    time up to a hundred times in a step. Older versions ignore the time slice.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        size = ctypes.sizeof(_SchedAttributes)
        asked = _SchedAttributes(size, os.SCHED_OTHER, 0, niceness, 0, _SHORTEST_SLICE_NS)
        ctypes.CDLL(None).syscall(number, 0, ctypes.byref(asked), 0)  # refused in some containers: the slice stays


def home_folder(environment: Mapping[str, str]) -> Path:
    """Return the user's home folder; `NO_HOME` where neither HOME nor the system names one, as in a container that runs
    under any user's number."""
    with contextlib.suppress(KeyError):
        return Path(environment.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)
    return NO_HOME


def set_name(name: str) -> None:
    """Set the process name in `top` and `ps -o comm`, at most 15 characters."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def lower_priority() -> None:
    """Lower this process's priority, for work that uses all cores."""
    os.nice(max(0, _NICENESS - os.nice(0)))


def keep_freed_memory() -> None:
    """Let the C allocator keep memory that is freed until `trim_heap`, if the library can (glibc).

    By default it returns the end of the heap, and blocks above some size, to the system as soon as they are free, and
    asks for them again: in steps on a CPU up to 2,000 page faults each. Each time, Linux changes the process's memory
    map, and waits for readers of that map. On a machine whose cores were busy, one reader (DAMON, the kernel thread
    that looks for idle pages) delayed a step by 0.6 and 1.1 s, because it had no core.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        option(_M_TRIM_THRESHOLD, -1)  # never
        option(_M_TOP_PAD, _TOP_PAD_BYTES)


def trim_heap() -> None:
    """Return free memory of the C allocator to the system, if the library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def address_of_interface(name: str) -> str | None:
    """Return the IPv4 address of one of this machine's network interfaces; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard limit, enlarge the file table, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    limit = soft if soft != resource.RLIM_INFINITY else sys.maxsize
    _make_room_for_files(min(limit, _MAX_ROOM))
    return limit


def _make_room_for_files(count: int) -> None:
    """Enlarge this process's table of open files to `count` entries.

    Linux doubles the table when it is full. In a process with threads, the call that opens the next file then waits
    until all processors have left their RCU read sections: 10 ms on an idle machine, 640 ms if a process of the lowest
    priority was in one. Python holds its lock in such calls (`accept` in uvloop, `os.pidfd_open`), which stops all
    streams.
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
