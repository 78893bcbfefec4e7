"""The HTTP address, checked before anything is started."""

import errno
import socket
from dataclasses import dataclass

from cluster.config import ConfigError


@dataclass(frozen=True)
class Address:
    """host: as configured. port: 1 to 65535."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Return the URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def checked_address(host: object, port: object) -> Address:
    """Return the address if a server can listen there. Raises ConfigError."""
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 2**16:
        raise ConfigError(f"http_options.port={port}: must be a number from 1 to 65535, such as 8000 (--port)")
    if not isinstance(host, str) or not host:
        raise ConfigError(f"http_options.host={host}: must be an address of this machine, such as 127.0.0.1 (--host)")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"http_options.host={host}: is no address of this machine ({error.strerror or error}); try 127.0.0.1, or "
            "0.0.0.0 for all interfaces"
        ) from None
    family, _, _, _, where = found[0]
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ConfigError(_remedy(host, port, error)) from None
    return Address(host, port)


def _remedy(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"http_options.port={port}: {host}:{port} is in use; stop that, or choose another (--port)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"http_options.port={port}: this user may not listen there; choose one from 1024 on (--port)"
    return (
        f"http_options.host={host}: this machine cannot listen there ({error.strerror}); try 127.0.0.1, or 0.0.0.0 for "
        "all interfaces"
    )
