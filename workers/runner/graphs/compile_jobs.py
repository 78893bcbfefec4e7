"""Compiles Triton (3.6) kernels in other processes, started by `cluster`: a kernel's compilation becomes a job whose
result is stored in the disk cache, from which a rank loads it. Processes lock a kernel's folder there, so that no two
compile it. Threads would be slower: Triton holds the GIL for a third of each compilation."""

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

COMPILER = ("torch", "triton", "triton.compiler", "triton.backends.nvidia.compiler")


@dataclass(frozen=True)
class _Named:
    """A jitted function by module and name, which is picklable."""

    module: str
    name: str


@dataclass(frozen=True)
class KernelJob:
    """The arguments of a kernel's compilation, picklable.

    key: Triton's cache key of function, arguments, options, compiler and environment.
    function: a jitted function at module level.
    signature, constants, attributes: arguments of `triton.compiler.ASTSource`.
    options: options of the backend.
    target: a `GPUTarget`.
    hashes: for `function` and the functions among `constants`, Triton's hash in the rank and `content_hash`.
    """

    key: str
    function: _Named
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: Any
    hashes: dict[_Named, tuple[str, str]]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    error: why the rank must compile the kernel itself; "" otherwise.
    is_busy: whether another process is compiling the kernel.
    seconds: time of the compilation.
    """

    error: str = ""
    is_busy: bool = False
    seconds: float = 0.0


def job_of(key: str, compile_kernel: Callable[[], Any]) -> KernelJob | None:
    """Return the job of a compilation that Triton passes to its asynchronous mode; None if it cannot be pickled.

    key: Triton's cache key.
    compile_kernel: Triton's closure over source, options and target.
    """
    from triton.runtime.jit import JITFunction

    closure = inspect.getclosurevars(compile_kernel).nonlocals
    if not {"src", "options", "target"} <= closure.keys():
        return None
    source = closure["src"]
    constants = {
        path: _named(value) if isinstance(value, JITFunction) else value for path, value in source.constants.items()
    }
    job = KernelJob(
        key=key,
        function=_named(source.fn),
        signature=dict(source.signature),
        constants=constants,
        attributes=dict(source.attrs),
        options=dict(vars(closure["options"])),
        target=closure["target"],
        hashes={
            _named(function): (function.cache_key, content_hash(function))
            for function in (source.fn, *source.constants.values())
            if isinstance(function, JITFunction)
        },
    )
    try:
        if _function(job.function) is not source.fn:
            return None
        pickle.dumps(job)
    except (AttributeError, ImportError, TypeError, pickle.PicklingError):
        return None
    return job


def is_cached(key: str, compile_kernel: Callable[[], Any]) -> bool:
    """Return whether Triton's disk cache has the kernel. key, compile_kernel: as in `job_of`."""
    from triton.runtime.cache import get_cache_manager

    source = inspect.getclosurevars(compile_kernel).nonlocals.get("src")
    return source is not None and bool(get_cache_manager(_hash(key)).get_group(f"{source.name[:150]}.json"))


def compile_job(job: KernelJob) -> Outcome:
    """Compile a kernel into the disk cache, unless the cache has it. For CUDA, compile its C launcher, too."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource, make_backend
    from triton.compiler import compile as compile_source
    from triton.runtime.cache import get_cache_key

    began_s = time.perf_counter()
    for named, (triton_hash, content) in job.hashes.items():
        if content_hash(function := _function(named)) == content:
            # Triton 3.6 adds the constants of a called function to the hash only if that function was hashed before, so
            # the rank's hash depends on the kernels that it has launched.
            function.hash = triton_hash
    constants = {
        path: _function(value) if isinstance(value, _Named) else value for path, value in job.constants.items()
    }
    source = ASTSource(_function(job.function), job.signature, constants, job.attributes)
    backend, variables = make_backend(job.target), get_cache_invalidating_env_vars()
    options = backend.parse_options(dict(job.options))
    if get_cache_key(source, backend, options, variables) != job.key:
        return Outcome("its cache key differs in the compile process")
    with _lock(job.key) as is_locked:
        if not is_locked:
            return Outcome(is_busy=True)
        kernel = compile_source(source, target=job.target, options=vars(options), _env_vars=variables)
        if job.target.backend == "cuda":
            _build_launcher(kernel)
    return Outcome(seconds=time.perf_counter() - began_s)


def content_hash(function: Any) -> str:
    """Return a hash of a jitted function's source, and of our jitted functions and constants that it names, directly or
    not."""
    from triton.language import constexpr
    from triton.runtime.jit import JITFunction

    sources: dict[tuple[str, str], str] = {}
    waiting = [function]
    while waiting:
        named = waiting.pop()
        key = named.fn.__module__, named.fn.__qualname__
        if key in sources:
            continue
        values = {name: named.__globals__.get(name) for name in sorted(named.fn.__code__.co_names)}
        constants = {name: value.value for name, value in values.items() if isinstance(value, constexpr)}
        sources[key] = f"{named.src} {constants}"
        waiting += [value for value in values.values() if isinstance(value, JITFunction)]
    return hashlib.sha256(str(sorted(sources.items())).encode()).hexdigest()


def import_compiler() -> None:
    """Import the compiler's modules, which takes seconds."""
    for name in COMPILER:
        importlib.import_module(name)


def _hash(key: str) -> str:
    """Return the name of a kernel's folder in Triton's cache."""
    return hashlib.sha256(key.encode()).hexdigest()


def _named(function: Any) -> _Named:
    return _Named(function.fn.__module__, function.fn.__qualname__)


def _function(named: _Named) -> Any:
    """Return the jitted function, without wrappers such as heuristics."""
    from triton.runtime.jit import JITFunction

    function = getattr(importlib.import_module(named.module), named.name)
    while not isinstance(function, JITFunction):
        function = function.fn
    return function


def _build_launcher(kernel: Any) -> None:
    """Compile the kernel's launcher with gcc. Ignore errors, because loading the kernel raises them again."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


@contextlib.contextmanager
def _lock(key: str) -> Iterator[bool]:
    """Lock the kernel's folder in the cache. Yields False if another process holds the lock."""
    from triton.runtime.cache import get_cache_manager

    folder = getattr(get_cache_manager(_hash(key)), "cache_dir", None)
    if folder is None:  # not a cache on disk
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
    """Compile the jobs that come, and send back their outcomes, until the connection is closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = connection.recv()
            try:
                outcome = compile_job(job)
            except Exception as error:  # the rank compiles the kernel, and raises the error again
                outcome = Outcome(f"{type(error).__name__}: {error}")
            connection.send(outcome)
