"""The time for which other programs had the cores that a server or its client waited for. Linux alone.

On a machine of few cores a gap between two tokens may be the machine's: Linux counts how long a thread was ready to run
and did not (`/proc/PID/schedstat`). Of that time as much counts for the server as its own processes beside the ranks
computed meanwhile: what they take from a rank is its own doing.
"""

import bisect
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.replica.rank_process import NAME

_PERIOD_S = 0.02
_LOOK_PERIOD_S = 1.0  # for processes that are new
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """at_s: monotonic. waited_ms: by rank, and of the client, for a core. used_ms: of a core, by other process."""

    at_s: float
    waited_ms: dict[int, float]
    used_ms: dict[int, float]


def lent_ms(samples: Sequence[Sample], start_s: float, end_s: float) -> float:
    """Of the time between. Samples are rarer than gaps: what was waited around the gap counts as in it least of all."""
    first = bisect.bisect_right(samples, start_s, key=_at_s) - 1
    last = bisect.bisect_left(samples, end_s, key=_at_s)
    if first < 0 or last == len(samples):
        return 0.0
    before, after = samples[first], samples[last]
    waited = max((ms - before.waited_ms.get(pid, ms) for pid, ms in after.waited_ms.items()), default=0.0)
    used = sum(ms - before.used_ms.get(pid, 0.0) for pid, ms in after.used_ms.items())
    around = 1000 * (after.at_s - before.at_s - (end_s - start_s))
    return max(0.0, waited - around - used)


def _at_s(sample: Sample) -> float:
    return sample.at_s


class CpuLent:
    """Samples a server's processes, all below `pid`, and the thread that makes this."""

    def __init__(self, pid: int) -> None:
        self._server = psutil.Process(pid)
        self._client = threading.get_native_id()
        self._samples: list[Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "CpuLent":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def __call__(self, start_s: float, end_s: float) -> float:
        """Milliseconds lent between two times."""
        return lent_ms(self._samples, start_s, end_s)

    def _run(self) -> None:
        looked_s, ranks, others = 0.0, list[int](), list[int]()
        while not self._ended.wait(_PERIOD_S):
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_PERIOD_S:
                looked_s, ranks, others = now_s, [], []
                for process in self._server.children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        (ranks if process.name().startswith(NAME) else others).append(process.pid)
            waited = dict(_waited(self._client, *ranks))
            self._samples.append(Sample(now_s, waited, dict(_used(*others))))


def _waited(*threads: int) -> Iterator[tuple[int, float]]:
    for thread in threads:
        with contextlib.suppress(OSError):
            yield thread, int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e6


def _used(*pids: int) -> Iterator[tuple[int, float]]:
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            yield pid, _TICK_MS * (int(words[11]) + int(words[12]))
