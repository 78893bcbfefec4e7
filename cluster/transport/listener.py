"""A ZeroMQ socket in an asyncio loop. Used by the ingress and by the engine replica.

Messages are read where the loop finds the socket readable. `zmq.asyncio` makes a future for each, looks at the socket's
events several times and wakes a task: tokens reached their stream 100 to 260 us later that way, and took a quarter of a
millisecond of the ingress's time a step more (pyzmq 27, uvloop, ipc, a message every 6 ms on a busy AMD EPYC).
"""

import asyncio
import logging
from collections.abc import Callable

import zmq

logger = logging.getLogger(__name__)

_MAX_MESSAGES_PER_TURN = 64  # then whatever else the event loop has


class Listener:
    """Hands every message of `socket` to `handle`, in the running event loop, from now until `close`. What `handle`
    raises is logged, and the message dropped."""

    def __init__(self, socket: "zmq.Socket[bytes]", handle: Callable[[bytes], None]) -> None:
        self._socket = socket
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._read)
        self._loop.call_soon(self._read)

    def send(self, raw: bytes) -> bool:
        """Never waits. False if the peer has its high-water mark of unread messages, or the socket is closed."""
        if self._socket.closed:
            return False
        try:
            self._socket.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # The descriptor shows changes only, and sending may have taken note of one that meant a message.
        self._loop.call_soon(self._read)
        return True

    def close(self) -> None:
        """Stop listening and close the socket."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(0)

    def read_rest(self) -> None:
        """Handle what has come, once the peer is gone."""
        while self._read_one():
            pass

    def _read(self) -> None:
        """Take what there is: the descriptor tells of it only once."""
        for _ in range(_MAX_MESSAGES_PER_TURN):
            if not self._read_one():
                return
        self._loop.call_soon(self._read)

    def _read_one(self) -> bool:
        """Whether there was a message."""
        if self._socket.closed:
            return False
        try:
            raw = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            self._handle(raw)
        except Exception:
            logger.exception("a message was dropped")
        return True
