"""Free ports of this machine."""

import random
import socket

# Linux gives outgoing connections ports from 32768 on, Ray its workers those up to 19999: either could take a port
# between its choice and its use.
PORTS = range(20000, 32768)


def free_port(address: str = "127.0.0.1") -> int:
    """A port that was free on `address` a moment ago; another process may take it before the caller does. Raises
    OSError if none of a hundred is free."""
    return free_ports(1, address)[0]


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """`count` different ones, at most a hundred. Raises OSError if so many of a hundred are not free."""
    ports = random.SystemRandom().sample(PORTS, 100)
    found: list[int] = []
    while len(found) < count:
        port = ports.pop()
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                if len(ports) + len(found) < count:
                    raise
            else:
                found.append(port)
    return found
