"""The links between ingresses, coordinator and ranks. Every link is used by one thread.

The coordinator's ends never block: a peer that does not read is bounded by its link's high-water mark and then treated
as lost.
"""

import contextlib

import zmq

from cluster.transport.encoding import BadMessageError, Message, decode, encode, encode_tokens
from cluster.transport.messages import (
    EngineState,
    GenerateSummary,
    Heartbeat,
    RankFailure,
    Refused,
    Stop,
    TokenBatch,
    TokenDelta,
)
from cluster.transport.sockets import PeerMonitor, Transport, open_socket
from workers.scheduling.plan import StepPlan, StepResult

Context = zmq.Context[zmq.Socket[bytes]]

# Collectives keep the ranks within two plans of each other; this leaves room for a rank that only starves for CPU
# (seen with 64, where scripted ranks share two cores with other jobs). A hang is found by its stamps, not by this.
_RANK_HIGH_WATER = 1024
_INBOX_HIGH_WATER = 10_000
_INGRESS_HIGH_WATER = 1000  # token messages, seconds of them: an ingress that lags more is taken for lost


def bind_ingress(context: Context, transport: Transport, name: str) -> tuple["zmq.Socket[bytes]", str]:
    """The PULL socket on which an ingress reads token batches, and the endpoint for `GenerateRequest.reply_to`."""
    socket = open_socket(context, zmq.PULL, _INGRESS_HIGH_WATER)
    try:
        return socket, transport.bind(socket, name)
    except ValueError:
        socket.close()
        raise


def connect_engine(context: Context, transport: Transport, inbox: str) -> "zmq.Socket[bytes]":
    """The DEALER socket of an ingress to a coordinator's inbox: send `encode`d GenerateRequest, Probe, Abort and
    Subscribe, receive GenerateSummary, Refused and EngineState for `decode`."""
    socket = open_socket(context, zmq.DEALER, _INBOX_HIGH_WATER)
    try:
        transport.connect(socket, inbox)
    except ValueError:
        socket.close()
        raise
    return socket


class Inbox:
    """The coordinator's end towards those who ask: the ingresses."""

    def __init__(self, context: Context, transport: Transport, name: str) -> None:
        self.socket = open_socket(context, zmq.ROUTER, _INBOX_HIGH_WATER)
        try:
            self.endpoint = transport.bind(self.socket, name)
        except ValueError:
            self.socket.close()
            raise

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next sender and its message, or None."""
        try:
            sender, raw = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return sender, raw

    def send(self, receiver: bytes, message: GenerateSummary | Refused | EngineState) -> None:
        """Goes nowhere if the receiver has left."""
        self.socket.send_multipart((receiver, encode(message)), zmq.NOBLOCK)

    def close(self, linger_ms: int = 0) -> None:
        self.socket.close(linger_ms)


def _connected(
    context: Context, transport: Transport, kind: int, high_water: int, endpoint: str
) -> tuple["zmq.Socket[bytes]", PeerMonitor]:
    """A socket towards `endpoint`, watched; raises ValueError, leaving nothing open, if there can be none."""
    socket = open_socket(context, kind, high_water)
    monitor = PeerMonitor(socket)
    try:
        transport.connect(socket, endpoint)
    except ValueError:
        monitor.close()
        socket.close(0)
        raise
    return socket, monitor


def _sent(socket: "zmq.Socket[bytes]", raw: bytes) -> bool:
    """Send without waiting; False if the peer has a high-water mark of unread messages."""
    try:
        socket.send(raw, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


class RankLink:
    """The coordinator's end towards one rank of one worker group."""

    def __init__(self, context: Context, transport: Transport, endpoint: str, rank: int) -> None:
        self.rank = rank
        self.socket, self.monitor = _connected(context, transport, zmq.DEALER, _RANK_HIGH_WATER, endpoint)

    def send(self, raw: bytes) -> bool:
        """False if the rank has not read what was sent before, which a living one does."""
        return _sent(self.socket, raw)

    def is_readable(self) -> bool:
        """Whether `receive` would return a message."""
        return bool(self.socket.poll(0))

    def receive(self) -> Message | None:
        """The rank's next message, or None."""
        try:
            return decode(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self, linger_ms: int = 0) -> None:
        self.monitor.close()
        self.socket.close(linger_ms)


class RankChannel:
    """A rank's end: bound before its worker group is attached, then driven by `cluster.replica.worker_loop`.

    Plans of another epoch are dropped; a plan out of order is an error, because a step would be missing on this rank
    alone and the next collective would hang."""

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
        """Until there is a message or the connection changes, at most `timeout_ms`; whether it did."""
        return any(socket is self._monitor.socket for socket, _ in self._poller.poll(timeout_ms))

    def receive(self) -> StepPlan | Stop | None:
        """The next plan or stop, or None; never waits."""
        while True:
            try:
                message = decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            if isinstance(message, Stop):
                return message
            if not isinstance(message, StepPlan):
                raise BadMessageError(f"rank {self.rank} got a {type(message).__name__}")
            if message.epoch != self.epoch:
                continue
            if message.step != self._next_step:
                raise BadMessageError(f"rank {self.rank} got step {message.step}, expected {self._next_step}")
            self._next_step += 1
            return message

    def lost(self) -> str | None:
        """Why the coordinator is lost, or None."""
        return self._monitor.check()

    def send(self, message: StepResult | Heartbeat) -> bool:
        """Never waits. False if nobody is there to read it: the coordinator has not connected yet, or is lost."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def fail(self, message: str) -> None:
        """Send the coordinator why this rank ends; the message has a second to leave when the channel closes."""
        self._socket.setsockopt(zmq.LINGER, 1000)
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(RankFailure(self.rank, self.epoch, message)), zmq.NOBLOCK)

    def close(self) -> None:
        self._monitor.close()
        self._socket.close()


class IngressLink:
    """The coordinator's end towards one ingress.

    sequence: of the next batch.
    deltas: what it will hold.
    """

    def __init__(self, context: Context, transport: Transport, endpoint: str, sequence: int) -> None:
        self.endpoint = endpoint
        self.sequence = sequence
        self.deltas: list[TokenDelta] = []
        self.socket, self.monitor = _connected(context, transport, zmq.PUSH, _INGRESS_HIGH_WATER, endpoint)

    def send(self, batch: TokenBatch) -> bool:
        """False if the ingress has `_INGRESS_HIGH_WATER` unread messages."""
        sent = _sent(self.socket, encode_tokens(batch))
        self.sequence += sent
        return sent

    def close(self, linger_ms: int = 0) -> None:
        self.monitor.close()
        self.socket.close(linger_ms)
