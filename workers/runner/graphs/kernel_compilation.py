"""When Triton's kernels are compiled: ahead of their first launch, in processes, and never while a graph is captured.
Used by `workers.runner.graphs.recorder`.

Triton asks whatever is set as its asynchronous mode (`triton.runtime._async_compile`, Triton 3.6) for every kernel that
this process has not compiled or read from the disk cache yet. Elsewhere it is compiled where it is launched.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, Protocol

from attention.backend import NewUnderCaptureError
from workers.runner.graphs.compile_jobs import KernelJob, is_cached, job_of
from workers.runner.graphs.compile_processes import MAX_AT_ONCE, CompileProcesses, processes_of

logger = logging.getLogger(__name__)

BUSY_S = 0.01  # until what another process compiles is asked for again
_THREADS = "compile"  # how the names of those begin that compile ahead
LIMIT_S = 240.0  # for all kernels that are waited for; those that take longer are compiled where they are launched


class _CompileMode(Protocol):
    """What Triton expects of the mode; what `submit` returns is launched in the kernel's place."""

    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any: ...


class _Unlaunched:
    """Stands for a kernel that is not there yet: its launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        """None: nobody measures it."""

    def run(self, *_: object) -> None:
        """Launches nothing."""


class CompileAhead:
    """Compiles what is launched while `rehearsing`, and launches nothing of it: in `processes`, one kernel each at a
    time, and what they do not do in `num_threads` threads (None: one per core), which share Python's lock.

    num_missing: kernels that were not in the disk cache.
    process_seconds: what each kernel took in its process.
    """

    def __init__(self, num_threads: int | None = None, processes: CompileProcesses | None = None) -> None:
        cores = len(os.sched_getaffinity(0))
        count = processes.count if processes is not None else min(MAX_AT_ONCE, num_threads or cores)
        self._processes = processes
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=_THREADS)
        self._kernels: dict[Hashable, Future[Any]] = {}
        self._finalize: dict[Hashable, Callable[[Any], None]] = {}
        self._has_warned = False
        self.num_missing = 0
        self.process_seconds: list[float] = []

    @property
    def num_kernels(self) -> int:
        """How many kernels were met that were not there."""
        return len(self._kernels)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within, and in this thread, kernels are compiled instead of launched, but for those that are there."""
        with _mode(self):
            yield

    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
        """Called by Triton. key: of the source and its options."""
        if key not in self._kernels:
            self._finalize[key] = finalize
            is_here = is_cached(str(key), compile_kernel)
            self.num_missing += not is_here
            job = None if is_here or self._processes is None else job_of(str(key), compile_kernel)
            if job is None:
                self._kernels[key] = self._pool.submit(compile_kernel)
            else:
                self._kernels[key] = Future()
                self._pool.submit(self._compile, self._kernels[key], job, compile_kernel)
        return _Unlaunched()

    def _compile(self, kernel: Future[Any], job: KernelJob, compile_kernel: Callable[[], Any]) -> None:
        """In a thread: have a process compile it, then load it from the cache, or if that process could not do it,
        compile it here."""
        assert self._processes is not None
        try:
            outcome = self._processes.compile(job)
            if outcome.is_busy:
                time.sleep(BUSY_S)
                self._pool.submit(self._compile, kernel, job, compile_kernel)  # after what else waits
                return
            if outcome.error and not self._has_warned:
                self._has_warned = True
                logger.warning("%s is compiled by the rank itself: %s", job.function.name, outcome.error)
            if outcome.seconds:
                self.process_seconds.append(outcome.seconds)
            kernel.set_result(compile_kernel())
        except BaseException as error:
            kernel.set_exception(error)

    def take_done(self) -> None:
        """Load those kernels that are compiled. Raises what a compilation raised that failed."""
        for key in [key for key in self._finalize if self._kernels[key].done()]:
            self._load(key)

    def finish(self) -> None:
        """Wait for all kernels and load them, after which their launch may be captured. Raises what the first
        compilation raised that failed."""
        waiting = {self._kernels[key]: key for key in self._finalize}
        with contextlib.suppress(TimeoutError):
            for done in as_completed(waiting, timeout=LIMIT_S):
                self._load(waiting[done])

    def _load(self, key: Hashable) -> None:
        kernel = self._kernels[key].result()
        self._finalize.pop(key)(kernel)
        kernel._init_handles()

    def close(self) -> None:
        """Ends the threads, and the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()


def compile_processes(num_ranks: int) -> CompileProcesses:
    """Begin one rank's share of this node's. num_ranks: of the node, as far as is known."""
    return CompileProcesses.begin(processes_of(num_ranks))


class _NothingNew:
    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
        raise NewUnderCaptureError("a kernel that is not compiled yet, under capture")


@contextlib.contextmanager
def nothing_new() -> Iterator[None]:
    """Within, and in this thread, the launch of a kernel that is not there raises NewUnderCaptureError: to load one is
    forbidden under capture."""
    with _mode(_NothingNew()):
        yield


def report_compilations(wanted: bool) -> None:
    """Whether a warning names each kernel that is compiled or read from the disk where it is launched: once a rank
    serves, all its requests wait for that."""
    from triton import knobs

    knobs.compilation.listener = _report if wanted else None


def _report(*, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
    """Called by Triton after it has compiled, or read."""
    if not threading.current_thread().name.startswith(_THREADS):
        how = "read from the disk" if cache_hit else "compiled"
        logger.warning(
            "a step waited %.2f s until kernel %s was %s: no start asked for it", times.total / 1e6, src.name, how
        )


def read_compiler() -> None:
    """Begin to read what keys of Triton's disk cache are made of, all of the compiler's files: a second, which the
    first kernel would wait for."""

    def read() -> None:
        with contextlib.suppress(ImportError):
            from triton.runtime.cache import triton_key

            triton_key()

    threading.Thread(target=read, name="triton key", daemon=True).start()


@contextlib.contextmanager
def _mode(mode: _CompileMode) -> Iterator[None]:
    from triton.runtime import _async_compile

    before = _async_compile.active_mode.set(mode)
    try:
        yield
    finally:
        _async_compile.active_mode.reset(before)
