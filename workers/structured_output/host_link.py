"""A rank's connection to the process that fills its masks (`aerie.workers.structured_output.mask_process.mask_host`).

The process starts with the first grammar, and again after it has ended. Used by
`aerie.workers.structured_output.slot_grammars`.
"""

import contextlib
import logging
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from aerie.workers.structured_output.mask_messages import Begin, Deadline, Filled, Notice, Order, receive, send
from aerie.workers.structured_output.mask_process.template_process import ForkedProcess, TemplateError, Work, template
from aerie.workers.structured_output.mask_table import MaskTable

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # delay before the next start after a failed one
_SILENT_S = 5.0  # time without an answer after a deadline, after which the process is killed
_SEND_TIMEOUT_S = 0.5  # time after which a process that does not read is replaced
_BUFFER_BYTES = 1 << 20  # size of the sockets' send buffers


class HostLink:
    """Sends orders to the process and reads its answers, within given time limits.

    generation: number of processes started; a new one has received no earlier orders.
    fault: why there is no process, if starting one failed permanently.
    """

    def __init__(self, folder: str, vocab_size: int, table: MaskTable) -> None:
        self.generation = 0
        self.fault = ""
        self._work = Work(folder, vocab_size)
        self._table = table
        self._lock = threading.Lock()
        self._is_up = threading.Event()
        self._is_starting = False
        self._retry_s = 0.0
        self._orders: socket.socket | None = None
        self._control: socket.socket | None = None
        self._processes: list[_Process] = []  # one at most
        weakref.finalize(self, _end, self._processes)
        self._sequence = 0
        self._answer_due_s: float | None = None  # limit for an answer that is already late

    def begin(self, end_token_ids: tuple[int, ...] = ()) -> None:
        """Start the process unless it runs. Does not wait."""
        with self._lock:
            if self._is_starting or self._is_up.is_set() or self.fault or time.monotonic() < self._retry_s:
                return
            self._is_starting = True
        threading.Thread(target=self._start, args=(end_token_ids,), name="mask host", daemon=True).start()

    def is_up(self, wait_s: float = 0.0) -> bool:
        """Return whether the process runs, after waiting for it at most `wait_s`."""
        self.begin()
        return self._is_up.wait(wait_s)

    def send(self, order: Order) -> None:
        """Send an order without fills to the running process. If that fails, the process is replaced."""
        assert self._orders is not None
        try:
            send(self._orders, order)
        except OSError as error:
            self.kill(f"it does not read: {error}")

    def ask(self, order: Order, wait_s: float) -> Filled | None:
        """Send an order with fills and wait for its answer; None if it does not arrive within 1.5 times `wait_s`.

        After half of `wait_s`, the step drops the request whose mask is being filled. After `wait_s`, it drops all
        requests without a mask, and waits for the answer without them.
        """
        if self._answer_due_s is not None and not self._take_overdue():
            return None
        self._sequence += 1
        order = msgspec.structs.replace(order, sequence=self._sequence)
        self.send(order)
        # after each half: drop one request, drop all, give up
        for drops_all in (False, True, None):
            if self._orders is None:
                return None
            if self._readable(wait_s / 2):
                return self._receive()
            if drops_all is not None:
                self._on_deadline(Deadline(self._sequence, closes=drops_all))
        self._answer_due_s = time.monotonic() + _SILENT_S
        return None

    def notices(self) -> Iterator[Notice]:
        """Yield the process's reports that are not answers."""
        while self._control is not None:
            try:
                raw = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                raw = b""
            if not raw:
                self.kill("it has ended")
                return
            yield msgspec.msgpack.decode(raw, type=Notice)

    def kill(self, reason: str) -> None:
        """Kill the process. The next call that needs one starts another."""
        if not self._is_up.is_set():
            return
        logger.warning("the process that fills masks is replaced: %s", reason)
        self._is_up.clear()
        _end(self._processes)
        self._orders = self._control = self._answer_due_s = None

    def close(self) -> None:
        """End the process."""
        self.fault = self.fault or "closed"
        self.kill("its rank ends")

    def _start(self, end_token_ids: tuple[int, ...]) -> None:
        """Fork the process and connect two sockets to it, one for orders and one for its notices. If that fails, try
        again after `RETRY_S`; if the vocabulary is unsuitable, never."""
        try:
            with contextlib.ExitStack() as unused:
                orders, their_orders = map(unused.enter_context, socket.socketpair())
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                control, their_control = map(unused.enter_context, pair)
                for end in (orders, their_orders):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                files = [their_orders.fileno(), their_control.fileno(), self._table.file]
                work = msgspec.structs.replace(self._work, end_token_ids=end_token_ids)
                process = template("masks").fork(work, files)
                orders.settimeout(_SEND_TIMEOUT_S)
                shape = self._table.shape
                send(orders, Begin(shape.num_slots, shape.width, shape.vocab_size))
                control.setblocking(False)
                unused.pop_all()
            for theirs in (their_orders, their_control):
                theirs.close()
            self._orders, self._control = orders, control
            self._processes.append(_Process(process, orders, control))
            self.generation += 1
            self._is_up.set()
        except (TemplateError, OSError) as error:
            logger.error("no process for grammars could be made: %s", error)
            self._retry_s = time.monotonic() + RETRY_S
        except ValueError as error:
            self.fault = str(error)
            logger.error("answers of this model can follow no grammar: %s", error)
        finally:
            self._is_starting = False

    def _readable(self, wait_s: float) -> bool:
        assert self._orders is not None
        poll = select.poll()
        poll.register(self._orders, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def _receive(self) -> Filled | None:
        """Receive an answer. If the process has ended, replace it and return None."""
        assert self._orders is not None
        try:
            filled = receive(self._orders, Filled)
        except OSError:
            filled = None
        if filled is None:
            self.kill("it has ended")
        return filled

    def _take_overdue(self) -> bool:
        """Return whether the answer that was too late for its step has arrived."""
        assert self._answer_due_s is not None
        if self._orders is not None and self._readable(0):
            self._answer_due_s = None
            return self._receive() is not None
        if time.monotonic() > self._answer_due_s:
            self.kill("it does not answer")
        return False

    def _on_deadline(self, deadline: Deadline) -> None:
        assert self._control is not None
        try:
            self._control.send(msgspec.msgpack.encode(deadline))
        except OSError as error:
            self.kill(f"it does not read: {error}")


@dataclass(frozen=True)
class _Process:
    """The process and this side's ends of its sockets."""

    process: ForkedProcess
    orders: socket.socket
    control: socket.socket

    def end(self) -> None:
        self.process.kill()
        self.orders.close()
        self.control.close()


def _end(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()
