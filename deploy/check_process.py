"""The process that checks a configuration with its checkpoints while Ray starts, and then begins the ranks. Made by
`deploy.cli` before anything is imported, so that torch is imported at once; told what to check by `deploy.launch`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.linux import end_with_parent

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from deploy.check_process import run; run()"


@dataclass(frozen=True)
class Task:
    """path: a Serve config file. has_nodes: false where it will join a cluster whose nodes are not known yet.
    ranks_to: a folder for the sockets of ranks that are to be begun, "" if none are."""

    path: str
    has_nodes: bool
    ranks_to: str


class CheckProcess:
    """Begins with this object. `returncode` is there once `checked` has returned None."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
        # It forks ranks, and must have no second thread: NumPy's algebra would have some from its import on.
        variables = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with theirs:
            self._process = subprocess.Popen(command, env=variables, stdin=theirs.fileno())
        self._end = ours.makefile("rw")
        ours.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int:
        return self._process.wait()

    def begin(self, task: Task) -> None:
        """Say what to do, once."""
        self._end.write(json.dumps(asdict(task)) + "\n")
        self._end.flush()

    def checked(self) -> dict[str, object] | None:
        """What only the checkpoints know, see `deploy.configs.use_checked`, as soon as nothing is found wrong; None if
        something is, which has been printed."""
        try:
            line = self._end.readline()
        except ConnectionError:
            line = ""
        return json.loads(line) if line else None

    def close(self) -> None:
        """End it, and with it ranks that nobody has taken."""
        self._process.kill()
        self._process.wait()
        self._end.close()


def run() -> None:
    """The process itself."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Torch with its 1,000 modules first: nothing that is asked for goes without it.
    from deploy.checks import counted_gpus

    gpus = counted_gpus()
    import speculative.build  # noqa: F401

    with socket.socket(fileno=0).makefile("rw") as end:
        line = end.readline()
        if not line:
            return  # the configuration cannot be read
        from cluster.config import ConfigError
        from deploy.checks import check_and_begin

        task = Task(**json.loads(line))

        def tell(found: dict[str, object]) -> None:
            end.write(json.dumps(found) + "\n")
            end.flush()

        try:
            check_and_begin(Path(task.path), gpus if task.has_nodes else None, task.ranks_to, tell)
        except ConfigError as error:
            print(error, file=sys.stderr, flush=True)
            sys.exit(2)
    if task.ranks_to:
        from cluster.replica.rank_process import wait_for_ranks

        wait_for_ranks()
