"""Free ports of this machine."""

import random
import socket

# Linux uses ports from 32768 on for outgoing connections, and Ray ports up to 19999 for workers; either could take a
# port before its use.
PORTS = range(20000, 32768)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that was free on `address` a moment ago; another process may take it before the caller does. Raises
    OSError if none of a hundred is free."""
    return free_ports(1, address)[0]


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return `count` different free ports, at most a hundred. Raises OSError if fewer of a hundred are free."""
    ports = random.SystemRandom().sample(PORTS, 100)
    chosen: list[int] = []
    while len(chosen) < count:
        port = ports.pop()
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                if len(ports) + len(chosen) < count:
                    raise
            else:
                chosen.append(port)
    return chosen
