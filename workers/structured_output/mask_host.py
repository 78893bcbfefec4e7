"""The process that follows the grammars of one rank's requests, and fills their masks into memory that it shares with
the rank.

A thread, the leader, carries out the rank's orders one after the other. Where one request's mask takes too long, the
rank says so; the request is late, and another thread leads on, while the former one brings that request's mask to its
end beside the steps. So a request's grammar costs other requests what the rank will wait, and no more. A mask that
takes `MASK_LIMIT_S` of a processor ends its request; the process, which cannot stop the work, ends itself once nobody
needs its result, and the rank makes another one.
"""

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from workers.scheduling.plan import Failure, unpack_i32
from workers.structured_output.draft_guide import MaskRows, StepClosedError
from workers.structured_output.faults import InvalidGrammarError
from workers.structured_output.framing import receive, send
from workers.structured_output.grammar_cache import GrammarCache
from workers.structured_output.guest import GrammarLostError, Guest, scratch_of
from workers.structured_output.guide_table import GuideBlock
from workers.structured_output.mask_messages import LATE, Begin, Fill, Filled, Hurry, Notice, Order
from workers.structured_output.mask_table import MAX_RUNNING, NUM_SPARE, TableShape

if TYPE_CHECKING:
    from workers.structured_output.compiler import Vocabulary

logger = logging.getLogger(__name__)

MASK_LIMIT_S = 1.0  # of a processor, for one mask
MASK_WALL_LIMIT_S = 10.0  # where processors are short
SLOW_S = 0.01  # a request whose last mask took longer is not waited for
UNWANTED_SHARE = 0.1  # of these, that a thread may go on for a request that has ended
MAX_BESIDE = 4  # masks that are begun beside the steps at a time
_WATCH_S = 0.1
_NICE = 10  # of threads whose requests are late: ranks compute on the same cores


@dataclass(eq=False)
class _Job:
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

    def processor_s(self) -> float:
        """Of the thread, since it began this."""
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread)) - self.since_s


@dataclass(eq=False)
class _Step:
    """An order's fills, as far as they are done."""

    order: Order
    todo: deque[int]
    rows: list[int]
    began_s: float
    failures: dict[int, Failure] = field(default_factory=dict)
    num_rows: int = 0
    num_forced: int = 0
    current: _Job | None = None


class MaskHost:
    """orders: where the rank's orders come from, and their answers go. control: hurries in, notices out. table: of the
    step, in shared memory. leave: ends the process."""

    def __init__(
        self,
        orders: socket.socket,
        control: socket.socket,
        table: "SharedTable",
        vocabulary: "Vocabulary",
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._leave = leave
        self._orders = orders
        self._control = control
        self._table = table
        self._cache = GrammarCache(vocabulary)
        self._guests: dict[int, Guest] = {}
        self._lock = threading.Lock()  # of all that follows
        self._leader = object()
        self._step: _Step | None = None
        self._jobs: dict[int, _Job] = {}  # by request
        self._is_doomed = False
        self._beside = threading.BoundedSemaphore(MAX_BESIDE)

    def run(self) -> None:
        """Until the rank is gone, or a thread is stuck for good."""
        threading.Thread(target=self._lead, args=(self._leader,), daemon=True).start()
        self._control.settimeout(_WATCH_S)
        while not self._is_doomed:
            try:
                raw = self._control.recv(1 << 16)
            except TimeoutError:
                self._watch()
                continue
            if not raw:
                return
            self._hurry(msgspec.msgpack.decode(raw, type=Hurry))

    # ---- the leader

    def _lead(self, me: object) -> None:
        desk = _Desk(self._table)
        try:
            while True:
                with self._lock:
                    step = self._step
                if step is None:
                    order = receive(self._orders, Order)
                    if order is None:
                        self._leave(0)
                        return
                    step = self._begin(order)
                if step is not None and not self._work(step, me, desk):
                    return
        except OSError:
            self._leave(0)  # the rank is gone
        except Exception:
            logger.exception("the process that fills masks failed")
            self._leave(1)

    def _begin(self, order: Order) -> _Step | None:
        """Take an order in; its step, if it has one."""
        began_s = time.perf_counter()
        for number, grammar in order.prepared.items():
            kept = self._cache.of(grammar)
            kept.compiled.add_done_callback(lambda _, number=number: self._notify(Notice(prepared=[number])))  # type: ignore[misc]
        with self._lock:
            for number in order.dropped:
                self._guests.pop(number, None)
                if number in self._jobs:
                    self._jobs[number].is_wanted = False
        for entered in order.entered:
            output = unpack_i32(entered.output).tolist()
            guest = self._guests.get(entered.guest)
            if guest is None or guest.num_known > len(output):
                self._guests[entered.guest] = Guest(self._cache.of(entered.grammar), entered.forgives, output)
            else:
                guest.advanced(output[guest.num_known :], [], [])
        num_forced = 0
        for advanced in order.advanced:
            guest = self._guests.get(advanced.guest)
            if guest is None:
                continue
            guest.advanced(advanced.tokens, advanced.drafted, advanced.parents)
            if advanced.tokens and guest.kept.compiled.done() and guest.failure is None:
                num_forced += self._learn(guest, advanced.tokens)
        if not order.fills:
            return None
        step = _Step(order, deque(range(len(order.fills))), [LATE] * len(order.fills), began_s, num_forced=num_forced)
        with self._lock:
            self._step = step
        return step

    def _learn(self, guest: Guest, tokens: list[int]) -> int:
        try:
            return guest.learn(tokens, self._cache.texts)
        except Exception:
            logger.exception("nothing was learnt of a grammar")
            return 0

    def _work(self, step: _Step, me: object, desk: "_Desk") -> bool:
        """Fill what is left of a step, and answer; False if another thread leads meanwhile."""
        while True:
            with self._lock:
                if self._leader is not me:
                    return False
                if self._step is not step:
                    return True  # closed
                job = self._next(step)
                if job is None:
                    self._answer(step)
                    return True
            failure = self._fill(step, job, desk)
            with self._lock:
                if self._leader is me:
                    self._end(job)
                    step.current = None
                    if failure is not None:
                        step.failures[job.place] = job.guest.failure = failure
                        step.rows[job.place] = LATE
                    continue
            self._settle(job)
            return False

    def _next(self, step: _Step) -> _Job | None:
        """The next fill that is worth waiting for; the others are done beside the step."""
        while step.todo:
            place = step.todo.popleft()
            fill = step.order.fills[place]
            guest = self._guests.get(fill.guest)
            if guest is None or fill.guest in self._jobs:
                continue
            if guest.failure is not None:
                step.failures[place] = guest.failure
                continue
            if guest.is_slow and (guest.root is None or fill.count > 1):
                self._settle_beside(guest, fill.guest)
                continue
            job = self._jobs[fill.guest] = step.current = _Job(guest, fill.guest, place)
            self._table.began(fill.guest)
            return job
        return None

    def _fill(self, step: _Step, job: _Job, desk: "_Desk") -> Failure | None:
        """One request's masks and guide. Returns why it cannot go on, or None."""
        fill: Fill = step.order.fills[job.place]
        guest, table = job.guest, self._table
        guide = desk.guide if fill.guide >= 0 else None
        first, was_known = step.num_rows, guest.root is not None
        end = first + fill.count

        def write(row: int, mask: npt.NDArray[np.int32] | int) -> None:
            with self._lock:
                if not job.is_current:
                    raise StepClosedError
                table.masks[row] = mask

        rows = MaskRows(table.masks, write, first, end, end + (NUM_SPARE if guide else 0), desk.scratch)
        try:
            guest.kept.compiled.result()
            is_guided = guest.fill(rows, fill.count, guide, fill.num_guided, self._cache.texts)
        except StepClosedError:
            return None
        except Exception as error:  # whatever it is, it is this request's alone
            return _failure(error)
        with self._lock:
            if job.is_current:
                step.rows[job.place], step.num_rows = first, rows.end
                if is_guided and guide is not None:
                    table.set_guide(fill.guide, guide)
                guest.is_slow = job.processor_s() > SLOW_S or (was_known and guest.is_slow)
        return None

    def _answer(self, step: _Step) -> None:
        self._step = None
        took_s = time.perf_counter() - step.began_s
        send(
            self._orders,
            Filled(step.order.sequence, step.rows, step.failures, step.num_rows, step.num_forced, took_s),
        )

    # ---- beside the steps

    def _settle_beside(self, guest: Guest, number: int) -> None:
        """Find a late request's mask in a thread of its own."""
        job = self._jobs[number] = _Job(guest, number, is_current=False)

        def settle() -> None:
            with self._beside:
                job.thread, job.native = threading.get_ident(), threading.get_native_id()
                job.since_s, job.began_s = time.thread_time(), time.monotonic()
                _be_nice(job)
                self._table.began(number)
                self._settle(job)

        job.thread = 0
        threading.Thread(target=settle, daemon=True).start()

    def _settle(self, job: _Job) -> None:
        """Bring a late request's mask to its end, in this thread."""
        guest, failure = job.guest, None
        try:
            guest.settle(scratch_of(self._table.num_words))
        except Exception as error:
            failure = _failure(error)
        with self._lock:
            guest.is_slow = job.processor_s() > SLOW_S
            if guest.failure is None:
                guest.failure = failure
            self._end(job)
            is_known = guest.failure is None or failure is not None
        if is_known:
            self._notify(Notice([job.number]) if failure is None else Notice(failures={job.number: failure}))

    def _end(self, job: _Job) -> None:
        del self._jobs[job.number]
        self._table.ended(job.number)

    def _notify(self, notice: Notice) -> None:
        try:
            self._control.send(msgspec.msgpack.encode(notice))
        except OSError:
            self._leave(0)

    # ---- the watching thread

    def _hurry(self, hurry: Hurry) -> None:
        with self._lock:
            step = self._step
            if step is None or step.order.sequence != hurry.sequence:
                return
            if (job := step.current) is not None:
                job.is_current, step.current = False, None
                step.rows[job.place] = LATE
                _be_nice(job)
                self._leader = object()
                threading.Thread(target=self._lead, args=(self._leader,), daemon=True).start()
            if hurry.closes:
                for place in step.todo:
                    number = step.order.fills[place].guest
                    if number in self._guests and number not in self._jobs:
                        self._settle_beside(self._guests[number], number)
                step.todo.clear()
                self._answer(step)

    def _watch(self) -> None:
        """End requests whose masks take too long, and this process if that does not end their threads."""
        with self._lock:
            used = {job: job.share_of_limit() for job in self._jobs.values() if job.thread}
            over = [job for job, share in used.items() if share > 1 and job.guest.failure is None]
            failure = Failure(f"the grammar takes more than {MASK_LIMIT_S:g} s for one token", True)
            for job in over:
                job.guest.failure = failure
            limits = {True: 3.0, False: UNWANTED_SHARE}
            self._is_doomed |= any(share > limits[job.is_wanted] for job, share in used.items())
        for job in over:
            self._notify(Notice(failures={job.number: failure}))


class SharedTable:
    """A `MaskTable`'s shared memory, in this process. masks: [rows, w] int32."""

    def __init__(self, memory: mmap.mmap, shape: TableShape) -> None:
        _, guides, words = shape.parts(torch.from_numpy(np.frombuffer(memory, np.int32, shape.size)))
        self.masks: npt.NDArray[np.int32] = words.numpy()
        self.num_words = self.masks.shape[1]
        self._blocks = None if guides is None else guides.blocks.numpy()
        self._running = np.frombuffer(memory, np.int64, MAX_RUNNING, shape.running_offset)

    def new_guide(self) -> GuideBlock | None:
        """A guide in memory of its own; None in an engine without drafts."""
        return None if self._blocks is None else GuideBlock(np.empty(self._blocks.shape[1], np.int32))

    def set_guide(self, number: int, guide: GuideBlock) -> None:
        """Put a guide in its place in the step."""
        assert self._blocks is not None
        self._blocks[number] = guide.block

    def began(self, number: int) -> None:
        """A request's mask is being filled."""
        free = np.flatnonzero(self._running < 0)
        if len(free) and number not in self._running:
            self._running[free[0]] = number

    def ended(self, number: int) -> None:
        """It is not any more."""
        self._running[self._running == number] = -1


class _Desk:
    """What one leader writes on before it is the step's: a mask and a guide."""

    def __init__(self, table: SharedTable) -> None:
        self.scratch = scratch_of(table.num_words)
        self.guide = table.new_guide()


def _failure(error: Exception) -> Failure:
    if isinstance(error, GrammarLostError):
        return error.failure
    if isinstance(error, InvalidGrammarError):
        return Failure(f"the grammar cannot be compiled: {error}", True)
    if isinstance(error, MemoryError):
        return Failure("the grammar takes too much memory", True)
    logger.error("a request's masks failed", exc_info=error)
    return Failure(f"its grammar failed: {type(error).__name__}: {error}")


def _be_nice(job: _Job) -> None:
    with contextlib.suppress(OSError):  # the thread has just ended
        os.setpriority(os.PRIO_PROCESS, job.native, _NICE)


def run_host(files: list[int], vocabulary: "Vocabulary") -> None:
    """files: sockets of orders and control, and the shared memory."""
    orders, control = (socket.socket(fileno=file) for file in files[:2])
    begin = receive(orders, Begin)
    if begin is None:
        return
    shape = TableShape(begin.num_slots, begin.width, begin.vocab_size)
    memory = mmap.mmap(files[2], shape.num_bytes)
    MaskHost(orders, control, SharedTable(memory, shape), vocabulary).run()
