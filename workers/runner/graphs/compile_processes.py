"""Processes that compile kernels into Triton's cache on disk, where the rank that asked finds them, launchers too.
Made by `cluster`, used by `workers.runner.graphs.kernel_compilation`.

Threads do less: Triton (3.6) holds Python's lock for a third of a compilation, and has gcc compile a launcher for every
signature, one after the other, when a kernel is loaded. A process takes a job at a time; those of a
node that are asked for the same kernel compile it once, under a lock on its folder in the cache.

Nothing here is needed: what a process cannot do, or not as the rank asks for it, is compiled by the rank itself.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib
import inspect
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_NICENESS = 10  # there is one for every core, and what else starts is begun by few
COMPILER = ("torch", "triton", "triton.compiler", "triton.backends.nvidia.compiler")
_SERVER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import serve; serve(sys.argv[2])"


@dataclass(frozen=True)
class _Named:
    """A kernel's function, by the module that has it."""

    module: str
    name: str


@dataclass(frozen=True)
class KernelJob:
    """A kernel as Triton was asked for it.

    key: what Triton calls the kernel in its cache: a hash of function, arguments, options, compiler and environment.
    function: jitted, at the top of a module.
    signature, constants, attributes: as `triton.compiler.ASTSource` takes them.
    options: of the backend, by name. target: a `GPUTarget`.
    """

    key: str
    function: _Named
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: Any


@dataclass(frozen=True)
class Outcome:
    """error: why the rank has to compile it, "" if it need not. is_busy: another process compiles it just now."""

    error: str = ""
    is_busy: bool = False
    seconds: float = 0.0


def job_of(key: str, compile_kernel: Callable[[], Any]) -> KernelJob | None:
    """The job of what Triton (3.6) hands to an asynchronous mode; None if no other process could do it.

    compile_kernel: closes over the source, the options and the target."""
    from triton.runtime.jit import JITFunction

    asked = inspect.getclosurevars(compile_kernel).nonlocals
    if not {"src", "options", "target"} <= asked.keys():
        return None
    source = asked["src"]
    constants = {
        path: _named(value) if isinstance(value, JITFunction) else value for path, value in source.constants.items()
    }
    job = KernelJob(
        key=key,
        function=_named(source.fn),
        signature=dict(source.signature),
        constants=constants,
        attributes=dict(source.attrs),
        options=dict(vars(asked["options"])),
        target=asked["target"],
    )
    try:
        if _function(job.function) is not source.fn:
            return None
        pickle.dumps(job)
    except (AttributeError, ImportError, TypeError, pickle.PicklingError):
        return None
    return job


def is_cached(key: str, compile_kernel: Callable[[], Any]) -> bool:
    """Whether the kernel need not be compiled, as Triton (3.6) finds out. compile_kernel: as for `job_of`."""
    from triton.runtime.cache import get_cache_manager

    source = inspect.getclosurevars(compile_kernel).nonlocals.get("src")
    return source is not None and bool(get_cache_manager(_hash(key)).get_group(f"{source.name[:150]}.json"))


def compile_job(job: KernelJob) -> Outcome:
    """Compile into the cache, unless it is there; the kernel's C launcher too, where there is CUDA's driver library."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource, make_backend
    from triton.compiler import compile as compile_source
    from triton.runtime.cache import get_cache_key

    began_s = time.perf_counter()
    constants = {
        path: _function(value) if isinstance(value, _Named) else value for path, value in job.constants.items()
    }
    source = ASTSource(_function(job.function), job.signature, constants, job.attributes)
    backend, variables = make_backend(job.target), get_cache_invalidating_env_vars()
    options = backend.parse_options(dict(job.options))
    if get_cache_key(source, backend, options, variables) != job.key:
        return Outcome("its key is another one in this process")
    with _alone(job.key) as is_alone:
        if not is_alone:
            return Outcome(is_busy=True)
        kernel = compile_source(source, target=job.target, options=vars(options), _env_vars=variables)
        if job.target.backend == "cuda":
            _build_launcher(kernel)
    return Outcome(seconds=time.perf_counter() - began_s)


class CompileProcesses:
    """Processes for one rank, each at the other end of a connection. `compile` may be called by as many threads."""

    def __init__(self, connections: Sequence[Connection], server: "subprocess.Popen[bytes] | None" = None) -> None:
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._connections = list(connections)
        self._server = server
        for connection in connections:
            self._free.put(connection)

    @staticmethod
    def begin(count: int) -> "CompileProcesses":
        """Through a new Python that imports the compiler, once, while this process goes on: seconds, for which the
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
        """Of this process, which has imported the compiler, has no second thread and has used no device."""
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
        """Waits for it, and for a free process."""
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
        """Ends the processes, once they are done with what they do, or at once while they import."""
        for connection in self._connections:
            connection.close()
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


def serve(numbers: str) -> None:
    """The new Python of `CompileProcesses.begin`. numbers: the files of its ends, as JSON."""
    import_compiler()
    _serve([socket.socket(fileno=number) for number in json.loads(numbers)])


def import_compiler() -> None:
    """What every process that compiles has imported."""
    for name in COMPILER:
        importlib.import_module(name)


def _serve(ends: Sequence[socket.socket]) -> None:
    """A process for each end, until they have ended. They share what Triton's keys are made of, which is read once: all
    of the compiler's files. What they keep is without the stages before the cubin, which a rank would read too."""
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
    """What a forked process does; never returns. others: ends that are to be closed here."""
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


def _hash(key: str) -> str:
    """Under which Triton (3.6) keeps what has this key."""
    return hashlib.sha256(key.encode()).hexdigest()


def _named(function: Any) -> _Named:
    return _Named(function.fn.__module__, function.fn.__qualname__)


def _function(named: _Named) -> Any:
    """The jitted function, out of what it may be wrapped in."""
    from triton.runtime.jit import JITFunction

    found = getattr(importlib.import_module(named.module), named.name)
    while not isinstance(found, JITFunction):
        found = found.fn
    return found


def _build_launcher(kernel: Any) -> None:
    """gcc's part; where it cannot be done, loading the kernel says why."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


@contextlib.contextmanager
def _alone(key: str) -> Iterator[bool]:
    """Whether this process alone compiles what has this key: holds a lock on its folder in the cache meanwhile."""
    from triton.runtime.cache import get_cache_manager

    folder = getattr(get_cache_manager(_hash(key)), "cache_dir", None)
    if folder is None:  # a cache of another kind
        yield True
        return
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(file)
