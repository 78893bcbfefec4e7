"""The process that tracks the grammars of one rank's requests, and fills their masks and guides in memory shared with
the rank.

One thread, the leader, executes the rank's orders. If a mask takes too long, the rank sends a deadline. Then the
request is late, another thread becomes the leader, and the previous leader completes the mask in the background. So a
grammar delays other requests by at most the rank's limit. A mask that takes `MASK_LIMIT_S` of CPU time ends its
request. The compiler's calls cannot be interrupted, so the process exits once no request needs their result, and the
rank starts another process.
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
import numpy as np
import numpy.typing as npt
import torch

from aerie.workers.scheduling.plan import Failure
from aerie.workers.structured_output.mask_messages import (
    LATE,
    Begin,
    Deadline,
    Fill,
    Filled,
    Notice,
    Order,
    receive,
    send,
)
from aerie.workers.structured_output.mask_process.draft_guide import MaskRows, StepClosedError
from aerie.workers.structured_output.mask_process.grammar_cache import GrammarCache
from aerie.workers.structured_output.mask_process.mask_jobs import MASK_LIMIT_S, MaskJob, Step, Thread
from aerie.workers.structured_output.mask_process.request_grammar import (
    RequestGrammar,
    RequestGrammars,
    failure_of,
    scratch_of,
)
from aerie.workers.structured_output.mask_table import MAX_RUNNING, NUM_SPARE, GuideBlock, TableShape

if TYPE_CHECKING:
    from aerie.workers.structured_output.compiler import Vocabulary


class SharedTable:
    """The shared memory of a `MaskTable`. masks: [rows, w] int32."""

    def __init__(self, memory: mmap.mmap, shape: TableShape) -> None:
        _, guides, words = shape.parts(torch.from_numpy(np.frombuffer(memory, np.int32, shape.size)))
        self.masks: npt.NDArray[np.int32] = words.numpy()
        self.num_words = self.masks.shape[1]
        self.num_rows = self.masks.shape[0] // shape.num_slots  # rows of one request
        self._blocks = None if guides is None else guides.blocks.numpy()
        self._running = np.frombuffer(memory, np.int64, MAX_RUNNING, shape.running_offset)
        self._free = list(range(MAX_RUNNING))
        self._places: dict[int, int] = {}  # index in `_running`, by request

    def new_guide(self) -> GuideBlock | None:
        """Allocate a guide; None in an engine without drafts."""
        return None if self._blocks is None else GuideBlock(np.empty(self._blocks.shape[1], np.int32))

    def set_guide(self, number: int, guide: GuideBlock) -> None:
        """Copy a request's guide to its index in the step."""
        assert self._blocks is not None
        self._blocks[number] = guide.block

    def began(self, number: int) -> None:
        """Record that a request's mask is being filled."""
        if self._free and number not in self._places:
            self._places[number] = self._free.pop()
            self._running[self._places[number]] = number

    def ended(self, number: int) -> None:
        """Remove the record of `began`."""
        index = self._places.pop(number, None)
        if index is not None:
            self._running[index] = -1
            self._free.append(index)


class FillBuffers:
    """Buffers of the leader for one request, copied to the shared table once complete.

    words: [rows, w] int32, masks of the request's tree nodes and of the positions after the tree.
    masks: the same memory, for numpy.
    scratch: [1, w] int32.
    guide: None in an engine without drafts.
    """

    def __init__(self, table: SharedTable) -> None:
        self.thread = Thread()
        self.words = torch.zeros((table.num_rows, table.num_words), dtype=torch.int32)
        self.masks: npt.NDArray[np.int32] = self.words.numpy()
        self.scratch = scratch_of(table.num_words)
        self.guide = table.new_guide()


logger = logging.getLogger(__name__)

ABANDONED_SHARE = 0.1  # share of the time limits for masks of requests that have ended
MAX_BACKGROUND = 4  # late masks computed at the same time
_WATCH_S = 0.1  # seconds between two checks of the watching thread


class MaskHost:
    """Fills masks for one rank.

    orders: socket for the rank's orders and their answers.
    control: socket for deadlines (received) and notices (sent).
    table: masks and guides of the step.
    leave: function that ends the process.
    """

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
        self._requests = RequestGrammars(self._cache)
        self._lock = threading.Lock()  # guards the fields below
        self._leader = object()
        self._step: Step | None = None
        self._jobs: dict[int, MaskJob] = {}  # by request
        self._must_exit = False
        self._background = threading.BoundedSemaphore(MAX_BACKGROUND)

    def run(self) -> None:
        """Run until the rank has ended, or a thread cannot be stopped."""
        threading.Thread(target=self._lead, args=(self._leader,), daemon=True).start()
        self._control.settimeout(_WATCH_S)
        while not self._must_exit:
            try:
                raw = self._control.recv(1 << 16)
            except TimeoutError:
                self._watch()
                continue
            if not raw:
                return
            self._on_deadline(msgspec.msgpack.decode(raw, type=Deadline))

    # ---- the leader

    def _lead(self, me: object) -> None:
        """Carry out orders until another thread becomes the leader or the rank ends. me: this thread's mark in
        `_leader`."""
        buffers = FillBuffers(self._table)
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
                if step is not None and not self._work(step, me, buffers):
                    return
        except OSError:
            self._leave(0)  # the rank has ended
        except Exception:
            logger.exception("the process that fills masks failed")
            self._leave(1)

    def _begin(self, order: Order) -> Step | None:
        """Execute an order up to its fills. Return its step; None without fills."""
        began_s = time.perf_counter()
        for number, grammar in order.prepared.items():
            cached = self._cache.of(grammar)
            cached.compiled.add_done_callback(lambda _, number=number: self._notify(Notice(prepared=[number])))  # type: ignore[misc]
        with self._lock:
            for number in order.dropped:
                self._requests.drop(number)
                if number in self._jobs:
                    self._jobs[number].is_needed = False
        num_forced = self._requests.follow(order.entered, order.advanced)
        if not order.fills:
            return None
        step = Step(order, deque(range(len(order.fills))), [LATE] * len(order.fills), began_s, num_forced=num_forced)
        with self._lock:
            self._step = step
        return step

    def _work(self, step: Step, me: object, buffers: FillBuffers) -> bool:
        """Fill the rest of a step and answer. Return False if another thread has become the leader."""
        since_s = buffers.thread.processor_s()
        while True:
            with self._lock:
                if self._leader is not me:
                    return False
                if self._step is not step:
                    return True  # closed
                job = self._next(step, buffers, since_s)
                if job is None:
                    self._answer(step)
                    return True
            failure = self._fill(step, job, buffers)
            with self._lock:
                if self._leader is me:
                    since_s += job.processor_s() if job.may_be_slow() else 0.0
                    self._end(job)
                    step.current = None
                    if failure is not None:
                        step.failures[job.index] = job.request.failure = failure
                        step.rows[job.index] = LATE
                    continue
            self._finish_late(job)
            return False

    def _next(self, step: Step, buffers: FillBuffers, since_s: float) -> MaskJob | None:
        """Return the next fill that the step waits for. Masks of slow requests are filled in the background instead."""
        while step.todo:
            index = step.todo.popleft()
            fill = step.order.fills[index]
            request = self._requests.find(fill.request)
            if request is None or fill.request in self._jobs:
                continue
            if request.failure is not None:
                step.failures[index] = request.failure
                continue
            if request.is_slow and (request.root is None or fill.count > 1):
                self._fill_in_background(request, fill.request)
                continue
            job = self._jobs[fill.request] = step.current = MaskJob(
                request, fill.request, buffers.thread, since_s, index
            )
            self._table.began(fill.request)
            return job
        return None

    def _fill(self, step: Step, job: MaskJob, buffers: FillBuffers) -> Failure | None:
        """Fill one request's masks and guide. Return the failure that ends the request, or None."""
        fill: Fill = step.order.fills[job.index]
        request, table = job.request, self._table
        guide = buffers.guide if fill.guide >= 0 else None
        first, was_known = step.num_rows, request.root is not None

        def check() -> None:
            if not job.is_current:
                raise StepClosedError

        limit = fill.count + (NUM_SPARE if guide else 0)
        rows = MaskRows(
            buffers.words, buffers.masks, first=first, end=fill.count, limit=limit, scratch=buffers.scratch, check=check
        )
        try:
            request.cached.compiled.result()
            is_guided = request.fill(rows, fill.count, guide, fill.num_guided, self._cache.texts)
        except StepClosedError:
            return None
        except Exception as error:  # it ends only this request
            return failure_of(error)
        with self._lock:
            if job.is_current:
                step.rows[job.index], step.num_rows = first, first + rows.end
                table.masks[first : step.num_rows] = buffers.masks[: rows.end]
                if is_guided and guide is not None:
                    table.set_guide(fill.guide, guide)
                request.is_slow = job.is_slow() or (was_known and request.is_slow)
        return None

    def _answer(self, step: Step) -> None:
        """Send the masks' rows of a finished step, and the requests whose masks failed."""
        self._step = None
        took_s = time.perf_counter() - step.began_s
        send(
            self._orders,
            Filled(step.order.sequence, step.rows, step.failures, step.num_rows, step.num_forced, took_s),
        )

    # ---- late masks, in the background

    def _fill_in_background(self, request: RequestGrammar, number: int) -> None:
        """Fill a late request's mask in a new thread."""
        job = self._jobs[number] = MaskJob(request, number, None, is_current=False)

        def run() -> None:
            with self._background:
                job.start()
                self._table.began(number)
                self._finish_late(job)

        threading.Thread(target=run, daemon=True).start()

    def _finish_late(self, job: MaskJob) -> None:
        """Complete a late request's mask in this thread, and report that it is ready or has failed."""
        request, failure = job.request, None
        try:
            request.fill_root(scratch_of(self._table.num_words))
        except Exception as error:
            failure = failure_of(error)
        with self._lock:
            request.is_slow = job.is_slow()
            if request.failure is None:
                request.failure = failure
            self._end(job)
            has_news = request.failure is None or failure is not None  # else `_watch` has reported its failure
        if has_news:
            self._notify(Notice([job.number]) if failure is None else Notice(failures={job.number: failure}))

    def _end(self, job: MaskJob) -> None:
        del self._jobs[job.number]
        self._table.ended(job.number)

    def _notify(self, notice: Notice) -> None:
        try:
            self._control.send(msgspec.msgpack.encode(notice))
        except OSError:
            self._leave(0)

    # ---- the watching thread

    def _on_deadline(self, deadline: Deadline) -> None:
        """Give up the fill that is late: another thread becomes the leader, and that fill finishes at a lower priority.
        If the deadline closes the step, what is left of it is filled in the background."""
        with self._lock:
            step = self._step
            if step is None or step.order.sequence != deadline.sequence:
                return
            if (job := step.current) is not None:
                job.is_current, step.current = False, None
                step.rows[job.index] = LATE
                job.lower_priority()
                self._leader = object()
                threading.Thread(target=self._lead, args=(self._leader,), daemon=True).start()
            if deadline.closes:
                for index in step.todo:
                    number = step.order.fills[index].request
                    if (request := self._requests.find(number)) is not None and number not in self._jobs:
                        self._fill_in_background(request, number)
                step.todo.clear()
                self._answer(step)

    def _watch(self) -> None:
        """End requests whose masks take too long, and the process if their threads continue."""
        with self._lock:
            used = {job: job.share_of_limit() for job in self._jobs.values() if job.thread is not None}
            over = [job for job, share in used.items() if share > 1 and job.request.failure is None]
            failure = Failure(f"the grammar takes more than {MASK_LIMIT_S:g} s for one token", True)
            for job in over:
                job.request.failure = failure
            limits = {True: 3.0, False: ABANDONED_SHARE}
            self._must_exit |= any(share > limits[job.is_needed] for job, share in used.items())
        for job in over:
            self._notify(Notice(failures={job.number: failure}))


def run_host(files: list[int], vocabulary: "Vocabulary") -> None:
    """Run a `MaskHost`. files: descriptors of the order socket, the control socket and the shared memory."""
    orders, control = (socket.socket(fileno=file) for file in files[:2])
    begin = receive(orders, Begin)
    if begin is None:
        return
    shape = TableShape(begin.num_slots, begin.width, begin.vocab_size)
    memory = mmap.mmap(files[2], shape.num_bytes)
    MaskHost(orders, control, SharedTable(memory, shape), vocabulary).run()
