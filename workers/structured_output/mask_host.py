"""The process that follows the grammars of one rank's requests, and fills their masks into memory that it shares with
the rank.

One thread at a time, the leader, carries out the rank's orders. If a request's mask takes too long, the rank says so.
The request is then late: another thread becomes the leader, and the former one completes that mask beside the steps.
So a grammar delays other requests by no more than the rank's limit. A mask that takes `MASK_LIMIT_S` of processor time
ends its request. The process cannot interrupt that work: it exits once no request needs the result, and the rank starts
another process.
"""

import logging
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from workers.scheduling.plan import Failure
from workers.structured_output.draft_guide import MaskRows, StepClosedError
from workers.structured_output.framing import receive, send
from workers.structured_output.grammar_cache import GrammarCache
from workers.structured_output.guest import Guest, Guests, failure_of, scratch_of
from workers.structured_output.mask_jobs import MASK_LIMIT_S, Job, Step
from workers.structured_output.mask_messages import LATE, Begin, Fill, Filled, Hurry, Notice, Order
from workers.structured_output.mask_table import NUM_SPARE, TableShape
from workers.structured_output.shared_table import Desk, SharedTable

if TYPE_CHECKING:
    from workers.structured_output.compiler import Vocabulary

logger = logging.getLogger(__name__)

UNWANTED_SHARE = 0.1  # of these, that a thread may go on for a request that has ended
MAX_BESIDE = 4  # masks computed beside the steps at a time
_WATCH_S = 0.1


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
        self._guests = Guests(self._cache)
        self._lock = threading.Lock()  # of all that follows
        self._leader = object()
        self._step: Step | None = None
        self._jobs: dict[int, Job] = {}  # by request
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
        desk = Desk(self._table)
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

    def _begin(self, order: Order) -> Step | None:
        """Take an order in; its step, if it has one."""
        began_s = time.perf_counter()
        for number, grammar in order.prepared.items():
            kept = self._cache.of(grammar)
            kept.compiled.add_done_callback(lambda _, number=number: self._notify(Notice(prepared=[number])))  # type: ignore[misc]
        with self._lock:
            for number in order.dropped:
                self._guests.drop(number)
                if number in self._jobs:
                    self._jobs[number].is_wanted = False
        num_forced = self._guests.follow(order.entered, order.advanced)
        if not order.fills:
            return None
        step = Step(order, deque(range(len(order.fills))), [LATE] * len(order.fills), began_s, num_forced=num_forced)
        with self._lock:
            self._step = step
        return step

    def _work(self, step: Step, me: object, desk: Desk) -> bool:
        """Fill what is left of a step, and answer; False if another thread leads meanwhile."""
        since_s = desk.thread.processor_s()
        while True:
            with self._lock:
                if self._leader is not me:
                    return False
                if self._step is not step:
                    return True  # closed
                job = self._next(step, desk, since_s)
                if job is None:
                    self._answer(step)
                    return True
            failure = self._fill(step, job, desk)
            with self._lock:
                if self._leader is me:
                    since_s += job.processor_s() if job.may_be_slow() else 0.0
                    self._end(job)
                    step.current = None
                    if failure is not None:
                        step.failures[job.place] = job.guest.failure = failure
                        step.rows[job.place] = LATE
                    continue
            self._settle(job)
            return False

    def _next(self, step: Step, desk: Desk, since_s: float) -> Job | None:
        """The next fill that is worth waiting for; the others are done beside the step."""
        while step.todo:
            place = step.todo.popleft()
            fill = step.order.fills[place]
            guest = self._guests.find(fill.guest)
            if guest is None or fill.guest in self._jobs:
                continue
            if guest.failure is not None:
                step.failures[place] = guest.failure
                continue
            if guest.is_slow and (guest.root is None or fill.count > 1):
                self._settle_beside(guest, fill.guest)
                continue
            job = self._jobs[fill.guest] = step.current = Job(guest, fill.guest, desk.thread, since_s, place)
            self._table.began(fill.guest)
            return job
        return None

    def _fill(self, step: Step, job: Job, desk: Desk) -> Failure | None:
        """One request's masks and guide. Returns why it cannot go on, or None."""
        fill: Fill = step.order.fills[job.place]
        guest, table = job.guest, self._table
        guide = desk.guide if fill.guide >= 0 else None
        first, was_known = step.num_rows, guest.root is not None

        def check() -> None:
            if not job.is_current:
                raise StepClosedError

        limit = fill.count + (NUM_SPARE if guide else 0)
        rows = MaskRows(desk.words, desk.masks, first, fill.count, limit, desk.scratch, check)
        try:
            guest.kept.compiled.result()
            is_guided = guest.fill(rows, fill.count, guide, fill.num_guided, self._cache.texts)
        except StepClosedError:
            return None
        except Exception as error:  # whatever it is, it is this request's alone
            return failure_of(error)
        with self._lock:
            if job.is_current:
                step.rows[job.place], step.num_rows = first, first + rows.end
                table.masks[first : step.num_rows] = desk.masks[: rows.end]
                if is_guided and guide is not None:
                    table.set_guide(fill.guide, guide)
                guest.is_slow = job.is_slow() or (was_known and guest.is_slow)
        return None

    def _answer(self, step: Step) -> None:
        self._step = None
        took_s = time.perf_counter() - step.began_s
        send(
            self._orders,
            Filled(step.order.sequence, step.rows, step.failures, step.num_rows, step.num_forced, took_s),
        )

    # ---- beside the steps

    def _settle_beside(self, guest: Guest, number: int) -> None:
        """Find a late request's mask in a thread of its own."""
        job = self._jobs[number] = Job(guest, number, None, is_current=False)

        def settle() -> None:
            with self._beside:
                job.start()
                self._table.began(number)
                self._settle(job)

        threading.Thread(target=settle, daemon=True).start()

    def _settle(self, job: Job) -> None:
        """Bring a late request's mask to its end, in this thread."""
        guest, failure = job.guest, None
        try:
            guest.settle(scratch_of(self._table.num_words))
        except Exception as error:
            failure = failure_of(error)
        with self._lock:
            guest.is_slow = job.is_slow()
            if guest.failure is None:
                guest.failure = failure
            self._end(job)
            is_known = guest.failure is None or failure is not None
        if is_known:
            self._notify(Notice([job.number]) if failure is None else Notice(failures={job.number: failure}))

    def _end(self, job: Job) -> None:
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
                job.give_way()
                self._leader = object()
                threading.Thread(target=self._lead, args=(self._leader,), daemon=True).start()
            if hurry.closes:
                for place in step.todo:
                    number = step.order.fills[place].guest
                    if (guest := self._guests.find(number)) is not None and number not in self._jobs:
                        self._settle_beside(guest, number)
                step.todo.clear()
                self._answer(step)

    def _watch(self) -> None:
        """End requests whose masks take too long, and this process if that does not end their threads."""
        with self._lock:
            used = {job: job.share_of_limit() for job in self._jobs.values() if job.thread is not None}
            over = [job for job, share in used.items() if share > 1 and job.guest.failure is None]
            failure = Failure(f"the grammar takes more than {MASK_LIMIT_S:g} s for one token", True)
            for job in over:
                job.guest.failure = failure
            limits = {True: 3.0, False: UNWANTED_SHARE}
            self._is_doomed |= any(share > limits[job.is_wanted] for job, share in used.items())
        for job in over:
            self._notify(Notice(failures={job.number: failure}))


def run_host(files: list[int], vocabulary: "Vocabulary") -> None:
    """files: sockets of orders and control, and the shared memory."""
    orders, control = (socket.socket(fileno=file) for file in files[:2])
    begin = receive(orders, Begin)
    if begin is None:
        return
    shape = TableShape(begin.num_slots, begin.width, begin.vocab_size)
    memory = mmap.mmap(files[2], shape.num_bytes)
    MaskHost(orders, control, SharedTable(memory, shape), vocabulary).run()
