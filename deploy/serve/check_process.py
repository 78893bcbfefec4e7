"""The process that checks a configuration with its checkpoints while Ray starts, and then starts the ranks.

`aerie.deploy.cli` starts it before all imports, so that it imports torch meanwhile. `aerie.deploy.serve.launch` sends
it the task later.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from aerie.cluster.linux import end_with_parent

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from aerie.deploy.serve.check_process import run; run()"
)


@dataclass(frozen=True)
class Task:
    """The task of the checking process.

    name: name of the configuration, for messages.
    config: an `AerieConfig` as JSON.
    has_nodes: False if the server joins a cluster whose nodes are not known yet.
    ranks_to: folder for the sockets of the ranks; "" to start no ranks."""

    name: str
    config: str
    has_nodes: bool
    ranks_to: str


class CheckProcess:
    """Handle of the process, which starts with this object."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # -P: a json.py in the current folder is not what `_PROGRAM` imports.
        command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)]
        # It forks ranks, so it must have no second thread; NumPy's linear algebra would start some at import.
        variables = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=variables,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        self._end = ours.makefile("rw")
        ours.close()
        self._length: Future[int] = Future()
        self._readers: list[threading.Thread] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, task: Task, receive: Callable[[str], None]) -> None:
        """Send the task, once. receive: called with each line that the process and the ranks print."""
        self._end.write(json.dumps(asdict(task)) + "\n")
        self._end.flush()
        self._readers = [
            threading.Thread(target=self._await_answer, daemon=True),
            threading.Thread(target=self._read_output, args=(receive,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def on_refusal(self, refuse: Callable[[str], None]) -> None:
        """Call `refuse` with the reason, in a thread, if the check finds a fault."""

        def look(future: "Future[int]") -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                refuse(str(error))

        self._length.add_done_callback(look)

    def checked(self) -> int:
        """Wait for the check; return what `aerie.deploy.checks.check_checkpoints` found. Raises ConfigError."""
        return self._length.result()

    def close(self) -> None:
        """End the process, and with it ranks without an attached actor."""
        self._length.cancel()  # its end is expected
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(5)  # a compiler that outlives its rank may hold the pipe for a moment
        if not self._readers:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._end.close()

    def _await_answer(self) -> None:
        """Wait for the process's answer, and set the result of `_length`: the engine's maximum length, or a
        ConfigError."""
        from aerie.cluster.config import ConfigError

        with self._end:
            try:
                line = self._end.readline()
            except ConnectionError:
                line = ""
        answer = json.loads(line) if line else {"refused": self._ended()}
        if self._length.cancelled():
            return
        if "refused" in answer:
            self._length.set_exception(ConfigError(answer["refused"]))
        else:
            self._length.set_result(int(answer["max_model_len"]))

    def _ended(self) -> str:
        status = self._process.wait()
        remedy = "it was killed, mostly for want of memory" if status == -signal.SIGKILL else "its error is in the log"
        return f"the process that checks checkpoints ended with status {status}: {remedy}"

    def _read_output(self, receive: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                receive(line)


def run() -> None:
    """Run the checks; the main function of the process."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Import torch and its 1,000 modules first: every task needs it.
    from aerie.deploy.nodes import counted_gpus

    gpus = counted_gpus()
    import aerie.speculative.build  # noqa: F401

    with socket.socket(fileno=0).makefile("rw") as end:
        line = end.readline()
        if not line:
            return  # the configuration cannot be read
        from aerie.cluster.config import AerieConfig, ConfigError
        from aerie.deploy.checks import check_and_start_ranks

        task = Task(**json.loads(line))

        def tell(message: dict[str, object]) -> None:
            end.write(json.dumps(message) + "\n")
            end.flush()

        try:
            config = AerieConfig.model_validate_json(task.config)
            here = gpus if task.has_nodes else None
            check_and_start_ranks(
                task.name, config, here, task.ranks_to, lambda max_model_len: tell({"max_model_len": max_model_len})
            )
        except ConfigError as error:
            tell({"refused": str(error)})
            sys.exit(2)
    if task.ranks_to:
        from aerie.cluster.replica.rank_process import wait_for_ranks

        wait_for_ranks()
