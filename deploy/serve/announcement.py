"""Prints the last line of a start: the server's address, and how long the start took."""

import contextlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from deploy.serve.address import Address
from deploy.serve.console import Console

_POLL_S = 0.1


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
