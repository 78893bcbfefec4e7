"""Masks that are being filled, and the steps that wait for them. Used by
`aerie.workers.structured_output.mask_process.mask_host`."""

import contextlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from aerie.workers.scheduling.plan import Failure
from aerie.workers.structured_output.mask_messages import Order
from aerie.workers.structured_output.mask_process.request_grammar import RequestGrammar

LATE_NICENESS = 19  # niceness of threads that fill late masks
MASK_LIMIT_S = 1.0  # CPU time for one mask
SLOW_S = 0.01  # CPU time of a request's last mask above which steps do not wait for it
MASK_WALL_LIMIT_S = 10.0  # wall time for one mask, on a busy machine


@dataclass(frozen=True)
class Thread:
    """A thread that fills masks. ident: Python's number, for its CPU clock. native: the kernel's number."""

    ident: int = field(default_factory=threading.get_ident)
    native: int = field(default_factory=threading.get_native_id)

    def processor_s(self) -> float:
        """Return the CPU seconds used. A system call, which is slow in some sandboxes, so not for each mask."""
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))


@dataclass(eq=False)
class MaskJob:
    """One request's mask, being filled by a thread.

    number: the request's number.
    thread: None until a thread has started it.
    since_s: CPU time of the thread at the start, or before earlier quick masks: it is not read again after those.
    index: index of its fill in the step's order.
    is_current: whether the step waits for it.
    is_needed: whether the request has not ended.
    began_s: monotonic time of its start.
    """

    request: RequestGrammar
    number: int
    thread: Thread | None
    since_s: float = 0.0
    index: int = -1
    is_current: bool = True
    is_needed: bool = True
    began_s: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Assign the job to the current thread, at low priority."""
        self.thread = Thread()
        self.since_s, self.began_s = self.thread.processor_s(), time.monotonic()
        self.lower_priority()

    def share_of_limit(self) -> float:
        """Return the used share of the time limit, including waits for the compiler; above 1 if exceeded."""
        return max(self.processor_s() / MASK_LIMIT_S, (time.monotonic() - self.began_s) / MASK_WALL_LIMIT_S)

    def lower_priority(self) -> None:
        """Lower the thread's priority, because ranks compute on the same cores."""
        if self.thread is not None:
            with contextlib.suppress(OSError):  # the thread has just ended
                os.setpriority(os.PRIO_PROCESS, self.thread.native, LATE_NICENESS)

    def processor_s(self) -> float:
        """Return the CPU seconds of the thread since the start of the job."""
        return 0.0 if self.thread is None else self.thread.processor_s() - self.since_s

    def may_be_slow(self) -> bool:
        """Return whether `is_slow` may be true, without a system call."""
        return time.monotonic() - self.began_s > SLOW_S

    def is_slow(self) -> bool:
        """Return whether the job has used more than `SLOW_S` of CPU time."""
        return self.may_be_slow() and self.processor_s() > SLOW_S


@dataclass(eq=False)
class Step:
    """Progress of one order's fills."""

    order: Order
    todo: deque[int]
    rows: list[int]
    began_s: float
    failures: dict[int, Failure] = field(default_factory=dict)
    num_rows: int = 0
    num_forced: int = 0
    current: MaskJob | None = None
