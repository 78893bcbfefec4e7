"""Sends msgpack messages over a stream socket, each after its length in four bytes."""

import socket
from typing import TypeVar

import msgspec

T = TypeVar("T")


def send(to: socket.socket, message: msgspec.Struct) -> None:
    """Send one message. Raises OSError if the peer has closed or does not read."""
    raw = msgspec.msgpack.encode(message)
    to.sendall(len(raw).to_bytes(4, "little") + raw)


def receive(of: socket.socket, kind: type[T]) -> T | None:
    """Wait for one message; None if the peer has closed. Raises TimeoutError if the socket has a timeout and no message
    has started."""
    head = _read(of, 4)
    raw = _read(of, int.from_bytes(head, "little")) if len(head) == 4 else b""
    return msgspec.msgpack.decode(raw, type=kind) if raw else None


def _read(of: socket.socket, count: int) -> bytes:
    """Read `count` bytes, or fewer if the peer has closed."""
    parts, left = list[bytes](), count
    while left:
        try:
            part = of.recv(left)
        except TimeoutError:
            if parts:
                continue
            raise
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
