"""Whether an engine has requests: a byte of a file that two processes of a node map into memory. The coordinator's loop
writes it in each iteration; a training with `priority: engine_idle` reads it between operations, because a call would
take longer than the operation."""

import mmap
import os
import time
from pathlib import Path

_POLL_S = 0.005  # between checks of a training that waits; it continues at most this long after the last request


class EngineBusy:
    """The byte. path: its file, created if it is missing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, 1)
            self._byte = mmap.mmap(file, 1)
        finally:
            os.close(file)

    def write(self, is_busy: bool) -> None:
        self._byte[0] = is_busy

    def is_set(self) -> bool:
        return self._byte[0] != 0

    def wait_until_idle(self) -> None:
        """Return once the engine has no request, at once if it has none."""
        while self._byte[0]:
            time.sleep(_POLL_S)
