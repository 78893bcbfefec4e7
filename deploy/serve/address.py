"""The HTTP address: checked before anything is started, printed when the server is ready."""

import contextlib
import errno
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aerie.cluster.config import ConfigError
from aerie.deploy.serve.console import Console


@dataclass(frozen=True)
class Address:
    """Where the HTTP server listens.

    host: as configured.
    port: 1 to 65535.
    """

    host: str
    port: int

    @property
    def url(self) -> str:
        """Return the URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def checked_address(host: object, port: object, listens: bool = True) -> Address:
    """Return the address if a server can listen there. listens: whether this command starts that server; else the port
    may be in use, by the cluster's Serve. Raises ConfigError."""
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 2**16:
        raise ConfigError(f"http_options.port={port}: must be a number from 1 to 65535, such as 8000 (--port)")
    if not isinstance(host, str) or not host:
        raise ConfigError(f"http_options.host={host}: must be an address of this machine, such as 127.0.0.1 (--host)")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"http_options.host={host}: is no address of this machine ({error.strerror or error}); try 127.0.0.1, or "
            "0.0.0.0 for all interfaces"
        ) from None
    family, _, _, _, where = addresses[0]
    if not listens:
        return Address(host, port)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ConfigError(_remedy(host, port, error)) from None
    return Address(host, port)


def _remedy(host: str, port: int, error: OSError) -> str:
    """Return the error of an address at which the server cannot listen, with a remedy."""
    if error.errno == errno.EADDRINUSE:
        return f"http_options.port={port}: {host}:{port} is in use; stop that, or choose another (--port)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"http_options.port={port}: this user may not listen there; choose one from 1024 on (--port)"
    return (
        f"http_options.host={host}: this machine cannot listen there ({error.strerror}); try 127.0.0.1, or 0.0.0.0 for "
        "all interfaces"
    )


_POLL_S = 0.1  # seconds between two looks


class Announcement:
    """Waits in a thread until an engine is ready and /health answers 200, then prints the address.

    ready: called before the line is printed."""

    def __init__(
        self, address: Address, content: Mapping[str, Any], console: Console, began_s: float, ready: Callable[[], None]
    ) -> None:
        """content: content of the Serve config file."""
        application = content["applications"][0]
        self._url = address.url + str(application.get("route_prefix") or "/").rstrip("/")
        self._console = console
        self._began_s = began_s
        self._ready = ready
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcement", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Print nothing from now on."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        """Print the address once the server answers there."""
        while not self._stopped.wait(_POLL_S):
            if self._console.ready.is_set() and self._answers():
                break
        else:
            return
        self._ready()
        self._console.end_start()
        url, seconds = self._url, time.time() - self._began_s
        self._console.say(f"{url} is ready after {seconds:.1f} s: open it, or `aerie chat {url}`; Ctrl-C stops it")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, urllib.error.URLError):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{self._url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        return False
