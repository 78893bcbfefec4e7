"""Ports of this machine that nobody listens on."""

import socket


def free_port(address: str = "127.0.0.1") -> int:
    """A port that was free on `address` a moment ago; another process may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
