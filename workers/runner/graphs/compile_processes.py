"""Processes that compile kernels into Triton's disk cache, from which a rank loads them. Started by `cluster`. The rank
itself compiles kernels that no process can compile.

Threads would be slower: Triton (3.6) holds the GIL for a third of each compilation, and compiles launchers one by one
when it loads kernels.
"""

import contextlib
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from aerie.workers.runner.graphs.compile_jobs import KernelJob, Outcome, compile_job, import_compiler

MAX_AT_ONCE = 16  # processes; an engine has about 100 kernels of about one core-second each
_NICENESS = 10  # there may be one process per core, and these must not delay the other processes of a start
_SERVER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import serve; serve(sys.argv[2])"


class CompileProcesses:
    """Compile processes of one rank, one per connection. `compile` may be called from as many threads at once."""

    def __init__(self, connections: Sequence[Connection], server: "subprocess.Popen[bytes] | None" = None) -> None:
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._connections = list(connections)
        self._server = server
        for connection in connections:
            self._free.put(connection)

    @staticmethod
    def start(count: int) -> "CompileProcesses":
        """Start a Python process that imports the compiler and forks `count` compile processes. Does not wait for the
        import, which takes seconds; the first `compile` does."""
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [pair[1].fileno() for pair in pairs]
        code = _SERVER.format(__name__)
        command = [sys.executable, "-P", "-c", code, json.dumps(sys.path), json.dumps(theirs)]
        server = subprocess.Popen(command, pass_fds=theirs, stdin=subprocess.DEVNULL)
        for _, end in pairs:
            end.close()
        return CompileProcesses([Connection(ours.detach()) for ours, _ in pairs], server)

    @staticmethod
    def fork(count: int) -> "CompileProcesses":
        """Fork `count` compile processes from this process. It must have imported the compiler, must have no other
        thread, and must not have used a device."""
        pairs = [socket.socketpair() for _ in range(count)]
        if os.fork() == 0:
            _end_as(functools.partial(_serve, [end for _, end in pairs]), [ours for ours, _ in pairs])
        for _, end in pairs:
            end.close()
        return CompileProcesses([Connection(ours.detach()) for ours, _ in pairs])

    @property
    def count(self) -> int:
        return len(self._connections)

    def compile(self, job: KernelJob) -> Outcome:
        """Compile `job` in the next free process, and return the outcome."""
        connection = self._free.get()
        try:
            connection.send(job)
            outcome: Outcome = connection.recv()
        except (EOFError, OSError) as error:
            outcome = Outcome(f"the process ended ({type(error).__name__})")
        finally:
            self._free.put(connection)
        return outcome

    def close(self) -> None:
        """End the processes, each after its current job, or at once if the compiler is still being imported."""
        for connection in self._connections:
            connection.close()
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


def serve(numbers: str) -> None:
    """Run the process that `CompileProcesses.start` starts. numbers: JSON list of its sockets' file descriptors."""
    import_compiler()
    _serve([socket.socket(fileno=number) for number in json.loads(numbers)])


def processes_of(num_ranks: int) -> int:
    """Return the number of compile processes per rank, on a node with `num_ranks` ranks."""
    return max(1, min(MAX_AT_ONCE, len(os.sched_getaffinity(0)) // num_ranks))


def _serve(ends: Sequence[socket.socket]) -> None:
    """Fork a process for each socket, and wait until all have ended.

    Hashes the compiler's files for Triton's cache keys once, before the forks. Only cubins are stored, because a rank
    would also read the earlier stages of compilation.
    """
    from triton import knobs
    from triton.runtime.cache import triton_key

    triton_key()
    knobs.compilation.store_binary_only = True
    for end in ends:
        if os.fork() == 0:
            _end_as(functools.partial(_work, Connection(os.dup(end.fileno()))), ends)
    for end in ends:
        end.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _end_as(work: Callable[[], None], others: Sequence[socket.socket]) -> None:
    """Run `work` as a forked process, and exit. others: inherited sockets to close."""
    try:
        for end in others:
            end.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends when its connection is closed
        os.nice(_NICENESS)
        work()
    finally:
        os._exit(0)


def _work(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = connection.recv()
            try:
                outcome = compile_job(job)
            except Exception as error:  # the rank compiles the kernel, and raises the error again
                outcome = Outcome(f"{type(error).__name__}: {error}")
            connection.send(outcome)
