"""ZeroMQ sockets for `aerie.cluster.transport.channel`: addresses, encryption, and detection of a peer's death (ipc on
one node, tcp with CURVE between nodes); and private folders of processes, for sockets and files. Processes remove their
own folders; a server's start removes those of killed processes."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from aerie.cluster.linux import process_state

MAX_IPC_PATH = 107  # sun_path of sockaddr_un on Linux, without its closing zero byte
# A cut cable or a stopped process is noticed after these times; a dead process closes its socket within milliseconds.
# ZeroMQ's own thread answers without Python, so a rank that computes, loads or compiles is never late.
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000
# A lost connection is never re-established, so that messages received before can still be read: libzmq 4.3.5 aborts the
# process if a socket is read after it reconnected while its queue was full (libzmq issue 3937). A full queue delays
# heartbeats, too, so a reader that pauses for HEARTBEAT_TIMEOUT_MS loses its connection.
_RECONNECT_MS = 24 * 3600 * 1000


@dataclass(frozen=True)
class CurveKeys:
    """The one key pair (Z85) of an application, distributed through Ray.

    The public key suffices to connect, so it must be as secret as the private one. Without it a process can neither
    connect nor read (CurveZMQ, rfc.zeromq.org/spec/26).
    """

    public: bytes
    secret: bytes


def new_keys() -> CurveKeys:
    """Return a new key pair."""
    return CurveKeys(*zmq.curve_keypair())


@dataclass(frozen=True)
class Transport:
    """Addresses for this process's sockets: ipc files in `folder` if given, else tcp on `node_ip` with `keys`.

    Connections to tcp endpoints also need `keys`.
    """

    folder: str = ""
    node_ip: str = ""
    keys: CurveKeys | None = None

    def bind(self, socket: "zmq.Socket[bytes]", name: str) -> str:
        """Bind, and return the endpoint to connect to. `name` must be unique in the folder.

        Raises ValueError if it cannot bind; the caller closes the socket."""
        try:
            return self._bind(socket, name)
        except (ValueError, zmq.ZMQError) as error:
            raise ValueError(f"cannot bind {name}: {error}") from error

    def connect(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        """Connect to the endpoint of another's `bind`.

        Raises ValueError for an endpoint of another form; the caller closes the socket."""
        try:
            self._connect(socket, endpoint)
        except (ValueError, zmq.ZMQError) as error:
            raise ValueError(f"endpoint={endpoint!r}: {error}") from error

    def _bind(self, socket: "zmq.Socket[bytes]", name: str) -> str:
        """Bind a socket to an ipc path in `folder`, or to a free encrypted tcp port of the node. Return the
        endpoint."""
        _beat(socket)
        if self.folder:
            path = str(Path(self.folder) / name)
            if len(path.encode()) > MAX_IPC_PATH:
                raise ValueError(
                    f"{path} has {len(path.encode())} bytes, a Unix socket's path has {MAX_IPC_PATH} at most; "
                    "choose a shorter folder"
                )
            socket.bind(f"ipc://{path}")
            return f"ipc://{path}"
        if not self.node_ip:
            raise ValueError("Transport has neither folder nor node_ip; give one of them")
        keys = self._keys()
        socket.curve_server = True
        socket.curve_secretkey = keys.secret
        socket.bind(f"tcp://{self.node_ip}:*")
        endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return endpoint.decode().rstrip("\0")

    def _connect(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        """Connect a socket to an ipc path, or to an encrypted tcp endpoint."""
        if endpoint.startswith("tcp://"):
            keys = self._keys()
            socket.curve_serverkey = keys.public
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
        elif not endpoint.startswith("ipc://"):
            raise ValueError("must begin with ipc:// or tcp://")
        _beat(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.connect(endpoint)

    def _keys(self) -> CurveKeys:
        if self.keys is None:
            raise ValueError("tcp is never left open; give Transport.keys")
        return self.keys


def open_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, high_water: int, max_unread: int | None = None
) -> "zmq.Socket[bytes]":
    """Return a socket that queues `high_water` messages per peer and direction, or `max_unread` received ones if given.
    It drops them when it is closed."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.RCVHWM, high_water if max_unread is None else max_unread)
    return socket


class PeerMonitor:
    """Detects the loss of a socket's only peer. The loss is final, because a successor has another endpoint. `socket`
    is readable after an event of the connection.
    """

    _FAILURES = {
        zmq.Event.CONNECT_RETRIED: "it cannot be connected to",
        zmq.Event.DISCONNECTED: "its connection closed",
        zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
        zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the handshake failed: other keys or no CURVE",
        zmq.Event.HANDSHAKE_FAILED_AUTH: "the handshake failed: refused",
    }

    def __init__(self, watched: "zmq.Socket[bytes]") -> None:
        self._watched = watched
        events = int(zmq.Event.HANDSHAKE_SUCCEEDED)
        for event in self._FAILURES:
            events |= int(event)
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(events)
        self.was_connected = False
        self.failure: str | None = None

    def check(self) -> str | None:
        """Read the events; return why the peer is lost, or None."""
        while self.failure is None:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            event = zmq.Event(parse_monitor_message(frames)["event"])
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.was_connected = True
            else:
                self.failure = self._FAILURES.get(event)
        return self.failure

    def close(self) -> None:
        """Stop watching, before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(0)  # disable_monitor does not close it, and an open socket blocks the end of the context


def _beat(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)


_PREFIX = "aerie-"
OWNER = "owner.json"


def private_folder(root: str | None = None) -> Path:
    """Create a private folder, which this process must remove. root: replaces the temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    give_to(folder, os.getpid())
    return folder


def give_to(folder: Path, pid: int) -> None:
    """Make process `pid` the folder's owner. The folder counts as abandoned once that process has ended."""
    (folder / OWNER).write_text(json.dumps(identity(pid)))


@contextlib.contextmanager
def temporary_folder(root: str | None = None) -> Iterator[Path]:
    """Create a private folder, and remove it after the context."""
    folder = private_folder(root)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned(spared: Collection[Path] = ()) -> list[Path]:
    """Remove this user's folders whose process has ended, and return them. Folders without an owner stay, as do those
    of other PID namespaces, whose processes are invisible. spared: folders that stay in any case."""
    removed = []
    for folder, owner in own_folders():
        if folder not in spared and not is_alive(owner):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def own_folders() -> Iterator[tuple[Path, dict[str, object]]]:
    """Return this user's folders with owners in this PID namespace."""
    namespace = identity(os.getpid())["namespace"]
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            mine = folder.stat().st_uid == os.getuid() and not folder.is_symlink()
            owner = json.loads((folder / OWNER).read_text())
        except (OSError, ValueError):
            continue
        is_whole = isinstance(owner, dict) and isinstance(owner.get("pid"), int)
        if mine and is_whole and owner.get("namespace") == namespace:
            yield folder, owner


def is_alive(process: Mapping[str, object]) -> bool:
    """Whether the process with this `identity` runs."""
    pid = process["pid"]
    had_ended = process["namespace"] != "" and process["started"] == ""  # when its identity was read
    return isinstance(pid, int) and not had_ended and process == identity(pid)


def identity(pid: int) -> dict[str, object]:
    """Return an identity of a process, which a later process with its pid does not have; "" without /proc."""
    try:
        namespace, boot = os.readlink("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return {"pid": pid, "namespace": "", "started": ""}
    try:
        state, _, ticks = process_state(pid)
        started = "" if state in ("Z", "X") else f"{boot} {ticks}"
    except OSError:
        started = ""
    return {"pid": pid, "namespace": namespace, "started": started}
