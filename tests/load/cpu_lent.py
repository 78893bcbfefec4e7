"""The time for which other programs had the cores that a server or its client waited for. Linux alone.

On a machine of few cores a gap between two tokens may be the machine's: Linux counts how long a thread was ready to run
and did not (`/proc/PID/schedstat`).

What the client waited is not the server's: clients have machines of their own. It reads its own count with each token
(`OwnWait`), since Linux was seen to keep it from a core for 1.3 and 2.3 s, and a sampler beside it as long.

Where a rank waited, the core was with another program, with the server's own processes beside its ranks, whose doing it
is, or with a rank. The wait is divided between the first two as the processor time that they used meanwhile. Whatever
cannot be told to be another program's, such as a process of less than a second, is the server's.
"""

import bisect
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from aerie.cluster.replica.rank_process import NAME

_PERIOD_S = 0.02
_LOOK_PERIOD_S = 1.0  # for processes that are new
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # columns of /proc/stat: idle, waiting for a disk
_STOLEN = 7  # by other machines of the same host


@dataclass(frozen=True)
class Sample:
    """Milliseconds so far. at_s: of the monotonic clock.

    waited_ms: by rank, for a core.
    needed_ms: of a core, by rank and client.
    foreign_ms: of a core, by other program; -1: what the host took from this machine.
    busy_ms: of all cores, by anything.
    """

    at_s: float
    waited_ms: dict[int, float]
    needed_ms: dict[int, float]
    foreign_ms: dict[int, float]
    busy_ms: float


def lent_ms(samples: Sequence[Sample], start_s: float, end_s: float) -> float:
    """What ranks waited for other programs between two times. Samples are rarer than gaps: what was waited around the
    gap counts as in it least of all."""
    first = bisect.bisect_right(samples, start_s, key=_at_s) - 1
    last = bisect.bisect_left(samples, end_s, key=_at_s)
    if first < 0 or last == len(samples):
        return 0.0
    before, after = samples[first], samples[last]
    waited = max((ms - before.waited_ms.get(pid, ms) for pid, ms in after.waited_ms.items()), default=0.0)
    around = 1000 * (after.at_s - before.at_s - (end_s - start_s))
    foreign = _grown(before.foreign_ms, after.foreign_ms)
    ours = after.busy_ms - before.busy_ms - foreign - _grown(before.needed_ms, after.needed_ms)
    share = foreign / (foreign + max(0.0, ours)) if foreign > 0 else 0.0
    return max(0.0, share * (waited - around))


def _at_s(sample: Sample) -> float:
    return sample.at_s


def _grown(before: dict[int, float], after: dict[int, float]) -> float:
    """Return the CPU milliseconds that processes used between two samples. A process that only the later sample has is
    left out: it may have used its time before the earlier one."""
    return sum(ms - before[pid] for pid, ms in after.items() if pid in before)


class OwnWait:
    """The time for which the thread that makes it was ready to run and did not; 0 where Linux does not say."""

    def __init__(self) -> None:
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def ms(self) -> float:
        """Since the thread began, in milliseconds."""
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e6 if self._file >= 0 else 0.0


class CpuLent:
    """Samples a server's processes, all below `server`, and the processor time of its client."""

    def __init__(self, server: int, client: int) -> None:
        self._server = psutil.Process(server)
        self._client = client
        self._samples: list[Sample] = []
        self._seen: dict[int, float] = {}  # processor time of processes that are not the server's
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

    def without_lent(
        self, stamps: Sequence[Sequence[float]], client_waited_ms: Sequence[Sequence[float]]
    ) -> list[list[float]]:
        """The gaps between each answer's stamps in milliseconds, without what was lent in them.

        client_waited_ms: at each stamp, `OwnWait.ms` of the client.
        """
        return [
            [
                1000 * (end_s - start_s) - max(self(start_s, end_s), after_ms - before_ms)
                for (start_s, end_s), (before_ms, after_ms) in zip(
                    itertools.pairwise(times), itertools.pairwise(waits), strict=True
                )
            ]
            for times, waits in zip(stamps, client_waited_ms, strict=True)
        ]

    def _run(self) -> None:
        looked_s, ranks, foreign = 0.0, list[int](), list[int]()
        while not self._ended.wait(_PERIOD_S):
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_PERIOD_S:
                looked_s = now_s
                ranks, foreign = self._look()
            waited_ms, needed_ms = dict(_waited(*ranks)), dict(_used(self._client, *ranks))
            busy_ms, stolen_ms = _machine()
            foreign_ms = dict(_used(*foreign)) | {-1: stolen_ms}
            self._samples.append(Sample(now_s, waited_ms, needed_ms, foreign_ms, busy_ms))

    def _look(self) -> tuple[list[int], list[int]]:
        """The ranks, and the processes that are not the server's and have run since the last look."""
        server = self._server.children(recursive=True)
        ranks = []
        for process in server:
            with contextlib.suppress(psutil.Error):
                if process.name().startswith(NAME):
                    ranks.append(process.pid)
        own = {self._server.pid, self._client, *(process.pid for process in server)}
        before, self._seen = self._seen, dict(_used(*(pid for pid in psutil.pids() if pid not in own)))
        return ranks, [pid for pid, ms in self._seen.items() if ms > before.get(pid, 0.0) and _has_memory(pid)]


def _has_memory(pid: int) -> bool:
    """Whether it is a program, and no thread of the kernel, which may work for the server."""
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def _waited(*threads: int) -> Iterator[tuple[int, float]]:
    for thread in threads:
        with contextlib.suppress(OSError):
            yield thread, int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e6


def _used(*pids: int) -> Iterator[tuple[int, float]]:
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            yield pid, _TICK_MS * (int(words[11]) + int(words[12]))


def _machine() -> tuple[float, float]:
    """Milliseconds of all cores that were busy, and that were stolen."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return _TICK_MS * (sum(ticks) - sum(ticks[i] for i in _IDLE)), _TICK_MS * ticks[_STOLEN]
