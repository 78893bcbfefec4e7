"""Processes that compile kernels into Triton's cache on disk, where the rank that asked finds them, launchers too.
Made by `cluster`, used by `workers.runner.graphs.kernel_compilation`.

Threads do less: Triton (3.6) holds Python's lock for a third of a compilation, and has gcc compile a launcher for every
signature, one after the other, when a kernel is loaded. A process takes one job (`compile_jobs`) at a time.

Nothing here is needed: the rank itself compiles what a process cannot, or cannot as the rank asks for it.
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

from workers.runner.graphs.compile_jobs import KernelJob, Outcome, compile_job, import_compiler

MAX_AT_ONCE = 16  # a kernel takes a core for about a second; an engine has about a hundred
_NICENESS = 10  # there is a process per core; the few that start everything else go first
_SERVER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import serve; serve(sys.argv[2])"


class CompileProcesses:
    """Processes for one rank, each at the other end of a connection. As many threads may call `compile` at once."""

    def __init__(self, connections: Sequence[Connection], server: "subprocess.Popen[bytes] | None" = None) -> None:
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._connections = list(connections)
        self._server = server
        for connection in connections:
            self._free.put(connection)

    @staticmethod
    def begin(count: int) -> "CompileProcesses":
        """Start a new Python that imports the compiler once and forks the processes. This takes seconds, for which the
        first `compile` waits."""
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [pair[1].fileno() for pair in pairs]
        code = _SERVER.format(__name__)
        command = [sys.executable, "-c", code, json.dumps(sys.path), json.dumps(theirs)]
        server = subprocess.Popen(command, pass_fds=theirs, stdin=subprocess.DEVNULL)
        for _, end in pairs:
            end.close()
        return CompileProcesses([Connection(ours.detach()) for ours, _ in pairs], server)

    @staticmethod
    def fork(count: int) -> "CompileProcesses":
        """Fork this process, which has imported the compiler, has no second thread and has used no device."""
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
        """Wait for a free process, then for its outcome."""
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
        """End the processes: after their current job, or at once while they import."""
        for connection in self._connections:
            connection.close()
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


def serve(numbers: str) -> None:
    """Main function of the Python that `CompileProcesses.begin` starts. numbers: descriptors of its ends, as JSON."""
    import_compiler()
    _serve([socket.socket(fileno=number) for number in json.loads(numbers)])


def processes_of(num_ranks: int) -> int:
    """The number of compile processes of each of so many ranks."""
    return max(1, min(MAX_AT_ONCE, len(os.sched_getaffinity(0)) // num_ranks))


def _serve(ends: Sequence[socket.socket]) -> None:
    """Fork a process for each end, and wait until all have ended. The hash of the compiler's files, which is a part of
    Triton's keys, is computed once before. Only cubins are stored, not the stages before, which a rank would read too.
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
    """Run `work` in a forked process; never returns. others: ends to close here."""
    try:
        for end in others:
            end.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other end says when it is over
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
            except Exception as error:  # whatever it is, the rank meets it again, where it can be raised
                outcome = Outcome(f"{type(error).__name__}: {error}")
            connection.send(outcome)
