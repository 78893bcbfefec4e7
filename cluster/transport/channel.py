"""The connections between ingresses, coordinator and ranks, over ZeroMQ. Each is used by one thread, or one asyncio
loop (in the ingress and the engine replica).

An ingress has one connection to each coordinator. It carries requests one way, and their tokens and ends the other way,
in order. Messages to an ingress are numbered, so that a lost one is noticed. The coordinator's ends never block: a peer
that does not read is treated as lost at its high-water mark.

An asyncio loop reads messages in its callback for readable sockets. `zmq.asyncio` creates a future for each message,
polls the socket's events several times and wakes a task: tokens reached their stream 100 to 260 us later, and each step
took 0.25 ms more of the ingress's time (pyzmq 27, uvloop, ipc, a message every 6 ms on a busy AMD EPYC).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq

from aerie.cluster.transport.encoding import BadMessageError, Message, decode, encode, encode_numbered
from aerie.cluster.transport.messages import EngineState, Heartbeat, RankFailure, Refused, Stop, TokenBatch, TokenDelta
from aerie.cluster.transport.sockets import PeerMonitor, Transport, open_socket
from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.plan import StepPlan, StepResult

Context = zmq.Context[zmq.Socket[bytes]]

# Collectives keep the ranks within two plans of each other. The rest is room for a rank that lacks CPU time: 64 was too
# small where ranks of a test shared two cores with other jobs. Heartbeats detect hangs.
_RANK_HIGH_WATER = 1024
_INBOX_HIGH_WATER = 10_000
_INGRESS_HIGH_WATER = 1000  # messages, which are seconds of tokens; an ingress that lags more is treated as lost


class IngressLink:
    """One ingress's connection, at the coordinator.

    name: ZeroMQ's name, unique among all connections.
    num_messages: number of messages to the ingress, including those that could not be sent. At a gap in the numbers the
        ingress ends the connection.
    deltas: deltas of the next `TokenBatch`.
    is_gone: the connection has closed.
    """

    __slots__ = ("name", "num_messages", "deltas", "is_gone")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.num_messages = 0
        self.deltas: list[TokenDelta] = []
        self.is_gone = False


class Inbox:
    """The coordinator's end towards all ingresses.

    links: connections with received messages, by name, until a message to them finds them closed.
    """

    def __init__(self, context: Context, transport: Transport, name: str) -> None:
        self.links: dict[bytes, IngressLink] = {}
        self.socket = open_socket(context, zmq.ROUTER, _INGRESS_HIGH_WATER, _INBOX_HIGH_WATER)
        self.socket.router_mandatory = True  # else unsendable messages are dropped silently
        try:
            self.endpoint = transport.bind(self.socket, name)
        except ValueError:
            self.socket.close()
            raise

    def receive(self) -> tuple[IngressLink, bytes] | None:
        """Return the next message, for `decode`, and its link; None without a message."""
        try:
            name, raw = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        link = self.links.get(name)
        if link is None:
            link = self.links[name] = IngressLink(name)
        return link, raw

    def send(self, link: IngressLink, message: TokenBatch | Refused | EngineState) -> str:
        """Send without waiting. Return "", or why the message is lost; with it, all requests of this ingress are
        lost."""
        raw = encode_numbered(link.num_messages, message)
        link.num_messages += 1
        try:
            self.socket.send_multipart((link.name, raw), zmq.NOBLOCK)
        except zmq.Again:
            return "it does not read its messages"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            link.is_gone = True
            self.links.pop(link.name, None)
            return "its connection closed"
        return ""

    def close(self, linger_ms: int = 0) -> None:
        self.socket.close(linger_ms)


def connect_engine(context: Context, transport: Transport, inbox: str) -> tuple["zmq.Socket[bytes]", PeerMonitor]:
    """Return an ingress's socket, connected to a coordinator's inbox, and the monitor of the coordinator. Send
    `encode`d Subscribe, GenerateRequest, Probe and Abort; receive TokenBatch, Refused and EngineState for
    `decode_numbered`.

    Raises ValueError for an endpoint that cannot be connected to."""
    return _connected(context, transport, inbox, _INBOX_HIGH_WATER, _INGRESS_HIGH_WATER)


def _connected(
    context: Context, transport: Transport, endpoint: str, high_water: int, max_unread: int | None = None
) -> tuple["zmq.Socket[bytes]", PeerMonitor]:
    """Return a connected socket and its monitor. Raises ValueError, and leaves nothing open, if that is impossible."""
    socket = open_socket(context, zmq.DEALER, high_water, max_unread)
    monitor = PeerMonitor(socket)
    try:
        transport.connect(socket, endpoint)
    except ValueError:
        monitor.close()
        socket.close(0)
        raise
    return socket, monitor


class RankLink:
    """The coordinator's end towards one rank of one worker group."""

    def __init__(self, context: Context, transport: Transport, endpoint: str, rank: int) -> None:
        self.rank = rank
        self.socket, self.monitor = _connected(context, transport, endpoint, _RANK_HIGH_WATER)

    def send(self, raw: bytes) -> bool:
        """Send without waiting. Return False if the rank does not read its messages."""
        try:
            self.socket.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def is_readable(self) -> bool:
        """Whether `receive` would return a message."""
        return bool(self.socket.poll(0))

    def receive(self) -> Message | None:
        """Return the rank's next message, or None."""
        try:
            return decode(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self, linger_ms: int = 0) -> None:
        self.monitor.close()
        self.socket.close(linger_ms)


class RankChannel:
    """A rank's end: bound before its worker group is attached, then driven by `aerie.cluster.replica.worker_loop`.

    Plans and commands of another epoch are dropped. One out of order is an error: this rank alone would miss a step,
    and the next collective would hang."""

    def __init__(self, context: Context, transport: Transport, rank: int, epoch: int, name: str) -> None:
        self.rank = rank
        self.epoch = epoch
        self._socket = open_socket(context, zmq.DEALER, _RANK_HIGH_WATER)
        self._monitor = PeerMonitor(self._socket)
        self._next_step = 0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor.socket, zmq.POLLIN)
        try:
            self.endpoint = transport.bind(self._socket, name)
        except ValueError:
            self.close()
            raise

    def wait(self, timeout_ms: int) -> bool:
        """Wait for a message or a change of the connection, at most `timeout_ms`; return whether there was one."""
        return any(socket is self._monitor.socket for socket, _ in self._poller.poll(timeout_ms))

    def receive(self) -> StepPlan | Command | Stop | None:
        """Return the next plan, command or stop, or None, without waiting."""
        while True:
            try:
                message = decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            if isinstance(message, Stop):
                return message
            if not isinstance(message, StepPlan | Command):
                raise BadMessageError(f"rank {self.rank} got a {type(message).__name__}")
            if message.epoch != self.epoch:
                continue
            if message.step != self._next_step:
                raise BadMessageError(f"rank {self.rank} got step {message.step}, expected {self._next_step}")
            self._next_step += 1
            return message

    def lost(self) -> str | None:
        """Return the reason that the coordinator is lost, or None."""
        return self._monitor.check()

    def send(self, message: StepResult | CommandAnswer | Heartbeat) -> bool:
        """Send without waiting. Return False without a reader: the coordinator has not connected yet, or is lost."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def fail(self, message: str) -> None:
        """Tell the coordinator why this rank ends. Closing the channel waits up to a second for the message."""
        self._socket.setsockopt(zmq.LINGER, 1000)
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(RankFailure(self.rank, self.epoch, message)), zmq.NOBLOCK)

    def close(self) -> None:
        self._monitor.close()
        self._socket.close()


logger = logging.getLogger(__name__)

_MAX_MESSAGES_PER_PASS = 64  # then the event loop continues with other work


class Listener:
    """Calls `handle` with each message of `socket` in the running event loop, until `close`. If `handle` raises, the
    error is logged and the message dropped."""

    def __init__(self, socket: "zmq.Socket[bytes]", handle: Callable[[bytes], None]) -> None:
        self._socket = socket
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._read)
        self._loop.call_soon(self._read)

    def send(self, raw: bytes) -> bool:
        """Send without waiting. Return False if the peer's queue is full or the socket is closed."""
        if self._socket.closed:
            return False
        try:
            self._socket.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # The descriptor signals changes only, and `send` may have consumed the signal of a new message.
        self._loop.call_soon(self._read)
        return True

    def close(self) -> None:
        """Stop listening and close the socket."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(0)

    def read_rest(self) -> None:
        """Handle received messages after the peer has gone."""
        while self._read_one():
            pass

    def _read(self) -> None:
        """Read all messages, because the descriptor signals new ones only."""
        for _ in range(_MAX_MESSAGES_PER_PASS):
            if not self._read_one():
                return
        self._loop.call_soon(self._read)

    def _read_one(self) -> bool:
        """Read a message; return whether there was one."""
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
