"""Masks being filled, and the steps that wait for them. Used by `workers.structured_output.mask_host`."""

import contextlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from workers.scheduling.plan import Failure
from workers.structured_output.guest import Guest
from workers.structured_output.mask_messages import Order

LATE_NICENESS = 19  # as Linux counts it
MASK_LIMIT_S = 1.0  # of a processor, for one mask
MASK_WALL_LIMIT_S = 10.0  # where processors are short


@dataclass(eq=False)
class Job:
    """One request's mask, being filled by a thread.

    number: of the request.
    place: of its fill in the step's order.
    is_current: the step still waits for it.
    is_wanted: its request has not ended.
    thread, native: the thread's identity, for its clock and for Linux.
    since_s: of the thread's processor time.
    began_s: by the monotonic clock.
    """

    guest: Guest
    number: int
    place: int = -1
    is_current: bool = True
    is_wanted: bool = True
    thread: int = field(default_factory=threading.get_ident)
    native: int = field(default_factory=threading.get_native_id)
    since_s: float = field(default_factory=time.thread_time)
    began_s: float = field(default_factory=time.monotonic)

    def share_of_limit(self) -> float:
        """How much of what a mask may take is used up; 1: all. Waiting for the compiler counts as well."""
        return max(self.processor_s() / MASK_LIMIT_S, (time.monotonic() - self.began_s) / MASK_WALL_LIMIT_S)

    def give_way(self) -> None:
        """Let others have the processor: ranks compute on the same cores."""
        with contextlib.suppress(OSError):  # the thread has just ended
            os.setpriority(os.PRIO_PROCESS, self.native, LATE_NICENESS)

    def processor_s(self) -> float:
        """Of the thread, since it began this."""
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread)) - self.since_s


@dataclass(eq=False)
class Step:
    """An order's fills, as far as they are done."""

    order: Order
    todo: deque[int]
    rows: list[int]
    began_s: float
    failures: dict[int, Failure] = field(default_factory=dict)
    num_rows: int = 0
    num_forced: int = 0
    current: Job | None = None
