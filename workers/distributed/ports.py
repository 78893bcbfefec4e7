"""Ports of this machine that nobody listens on."""

import random
import socket

# Linux gives outgoing connections ports from 32768 on, Ray its workers those up to 19999: either could take a port
# between its choice and its use.
PORTS = range(20000, 32768)


def free_port(address: str = "127.0.0.1") -> int:
    """A port that was free on `address` a moment ago; another process may take it before the caller does. Raises
    OSError if none of a hundred is free."""
    ports = random.SystemRandom().sample(PORTS, 100)
    while True:
        port = ports.pop()
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                if not ports:
                    raise
            else:
                return port
