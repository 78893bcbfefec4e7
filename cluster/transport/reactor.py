"""Waits in one thread for sockets, and for calls from other threads. Used by the coordinator."""

import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import zmq

T = TypeVar("T")
Handler = Callable[[], None]
Socket = zmq.Socket[bytes]

_SLEEP_S = 1e-4  # maximum time of one sleep


class Reactor:
    """`run_once` runs in one thread, `call` in any. Handlers are called while their socket is readable."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[object, Handler] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._handlers[self._wake] = self._run_calls

    def watch(self, socket: Socket, handler: Handler) -> None:
        """Call `handler` when `socket` is readable."""
        self._poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = handler

    def forget(self, socket: Socket) -> None:
        """Stop watching a socket, before it is closed."""
        self._poller.unregister(socket)
        del self._handlers[socket]

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` in the thread between two iterations. The future gets its result or exception."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._calls.put(run)
        os.eventfd_write(self._wake, 1)
        return future

    def run_once(self, timeout_s: float) -> None:
        """Wait for at most `timeout_s`, then run the handlers of readable sockets.

        A poller has a resolution of milliseconds; the rest is waited for in short sleeps."""
        deadline_s = time.monotonic() + timeout_s
        readable = self._poller.poll(int(timeout_s * 1000))
        while not readable and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _SLEEP_S))
            readable = self._poller.poll(0)
        for ready, _ in readable:
            handler = self._handlers.get(ready)
            if handler is not None:  # an earlier handler may have closed it
                handler()

    def run_calls(self) -> None:
        """Run the queued calls. Also called after the last `run_once`, so that no caller waits forever."""
        while True:
            try:
                run = self._calls.get_nowait()
            except queue.Empty:
                return
            run()

    def _run_calls(self) -> None:
        os.eventfd_read(self._wake)
        self.run_calls()

    def close(self) -> None:
        """Close, after the last `run_once`."""
        os.close(self._wake)
