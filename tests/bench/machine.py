"""Where and when figures were measured: processor, cores, commit, and who else uses the processor."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

BUSY_CORES = 0.15  # used by others above this: figures of the parts that use all cores are too low


def machine() -> dict[str, Any]:
    """Processor, cores, commit, load average of the last minute."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else ""),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that are in use right now, by whoever."""
    return psutil.cpu_percent(seconds) / 100 * (os.cpu_count() or 1)


def busy_seconds() -> float:
    """Core seconds that all processes of this machine have used since it started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice  # user holds the guests' time


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """This process, and those that it starts meanwhile, on `count` cores of this machine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def physical_cores() -> list[int]:
    """Return a logical CPU of every physical core that this process may use; all CPUs where the system does not say
    which of them share a core."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    by_core: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        by_core.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(by_core.values())


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def commit() -> str:
    """Return the commit of the measured checkout."""
    return git("rev-parse", "--short", "HEAD") or "unknown"


def git(*arguments: str) -> str:
    """Return what git prints, of the checkout that this runs in; "" where there is none."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
