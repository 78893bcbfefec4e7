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
SLOW_S = 0.01  # a request whose last mask took longer is not waited for
MASK_WALL_LIMIT_S = 10.0  # where processors are short


@dataclass(frozen=True)
class Thread:
    """A thread that fills masks. ident: for its clock. native: for Linux."""

    ident: int = field(default_factory=threading.get_ident)
    native: int = field(default_factory=threading.get_native_id)

    def processor_s(self) -> float:
        """Seconds of a processor that it has used. A system call, which some sandboxes make dear: not for each mask."""
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))


@dataclass(eq=False)
class Job:
    """One request's mask, being filled by a thread.

    number: of the request.
    thread: None until it has one.
    since_s: of the thread's processor time, when this began or a few quick masks before.
    place: of its fill in the step's order.
    is_current: the step still waits for it.
    is_wanted: its request has not ended.
    began_s: by the monotonic clock.
    """

    guest: Guest
    number: int
    thread: Thread | None
    since_s: float = 0.0
    place: int = -1
    is_current: bool = True
    is_wanted: bool = True
    began_s: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """The thread that runs this takes it over, beside the steps."""
        self.thread = Thread()
        self.since_s, self.began_s = self.thread.processor_s(), time.monotonic()
        self.give_way()

    def share_of_limit(self) -> float:
        """How much of what a mask may take is used up; 1: all. Waiting for the compiler counts as well."""
        return max(self.processor_s() / MASK_LIMIT_S, (time.monotonic() - self.began_s) / MASK_WALL_LIMIT_S)

    def give_way(self) -> None:
        """Let others have the processor: ranks compute on the same cores."""
        if self.thread is not None:
            with contextlib.suppress(OSError):  # the thread has just ended
                os.setpriority(os.PRIO_PROCESS, self.thread.native, LATE_NICENESS)

    def processor_s(self) -> float:
        """Of the thread, since it began this."""
        return 0.0 if self.thread is None else self.thread.processor_s() - self.since_s

    def may_be_slow(self) -> bool:
        """Whether so much time has passed that `is_slow` may be true."""
        return time.monotonic() - self.began_s > SLOW_S

    def is_slow(self) -> bool:
        """Whether it has used more than `SLOW_S` of a processor, whose clock is read only where that may be."""
        return self.may_be_slow() and self.processor_s() > SLOW_S


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
