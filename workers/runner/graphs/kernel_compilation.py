"""Compiles kernels before their first launch, and forbids it during a capture. Used by
`workers.runner.graphs.recorder`.

Triton (3.6) calls its asynchronous mode (`triton.runtime._async_compile`) for each kernel that this process has neither
compiled nor loaded. Without a mode, a kernel is compiled when it is launched.
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

BUSY_S = 0.01  # between questions whether another process has compiled a kernel
LIMIT_S = 240.0  # wait for all kernels; slower ones are compiled when they are launched
_THREADS = "compile"  # name prefix of compile threads


class _CompileMode(Protocol):
    """Triton's interface of a mode. Triton launches what `submit` returns instead of the kernel."""

    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any: ...


class _Unlaunched:
    """Replaces a kernel that is not compiled yet. Its launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        """Unused."""

    def run(self, *_: object) -> None:
        """Launch nothing."""


class CompileAhead:
    """Compiles the kernels that a dry run would launch.

    Each of `processes` compiles one kernel at a time. What they cannot compile, threads of this process do (default:
    one per core); these share the GIL.

    num_missing: kernels that were not in the disk cache.
    process_seconds: compile time of each kernel in its process.
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
        """Kernels that had to be compiled or loaded."""
        return len(self._kernels)

    @contextlib.contextmanager
    def dry_run(self) -> Iterator[None]:
        """Launch only kernels that are loaded, and compile the others, in this thread."""
        with _mode(self):
            yield

    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
        """Called by Triton. key: identifies source and options."""
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
        """Compile in a process and load from the cache; if that fails, compile here. Runs in a thread."""
        assert self._processes is not None
        try:
            outcome = self._processes.compile(job)
            if outcome.is_busy:
                time.sleep(BUSY_S)
                self._pool.submit(self._compile, kernel, job, compile_kernel)  # at the end of the queue
                return
            if outcome.error and not self._has_warned:
                self._has_warned = True
                logger.warning("the rank itself compiles %s: %s", job.function.name, outcome.error)
            if outcome.seconds:
                self.process_seconds.append(outcome.seconds)
            kernel.set_result(compile_kernel())
        except BaseException as error:
            kernel.set_exception(error)

    def load_compiled(self) -> None:
        """Load the kernels compiled so far. Raises the error of a failed compilation."""
        for key in [key for key in self._finalize if self._kernels[key].done()]:
            self._load(key)

    def finish(self) -> None:
        """Wait for all kernels and load them; then they can be captured. Raises the error of the first failed
        compilation."""
        waiting = {self._kernels[key]: key for key in self._finalize}
        with contextlib.suppress(TimeoutError):
            for done in as_completed(waiting, timeout=LIMIT_S):
                self._load(waiting[done])

    def _load(self, key: Hashable) -> None:
        kernel = self._kernels[key].result()
        self._finalize.pop(key)(kernel)
        kernel._init_handles()

    def close(self) -> None:
        """End the threads and the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()


def compile_processes(num_ranks: int) -> CompileProcesses:
    """Start one rank's share of this node's compile processes. num_ranks: expected ranks on the node."""
    return CompileProcesses.start(processes_of(num_ranks))


class _NothingNew:
    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
        raise NewUnderCaptureError("a kernel that is not compiled yet was launched during a capture")


@contextlib.contextmanager
def no_new_kernels() -> Iterator[None]:
    """Raise NewUnderCaptureError if this thread launches a kernel that is not loaded: a capture forbids loading."""
    with _mode(_NothingNew()):
        yield


def report_compilations(wanted: bool) -> None:
    """Turn on or off a warning for each kernel that is compiled or loaded at its launch: while serving, all requests
    wait for that."""
    from triton import knobs

    knobs.compilation.listener = _report if wanted else None


def _report(*, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
    """Called by Triton after it has compiled or loaded a kernel."""
    if not threading.current_thread().name.startswith(_THREADS):
        how = "read from the disk" if cache_hit else "compiled"
        logger.warning(
            "a step waited %.2f s until kernel %s was %s: no start asked for it", times.total / 1e6, src.name, how
        )


def read_compiler() -> None:
    """Start hashing the compiler's files for Triton's cache keys, in a thread. It takes a second, which the first
    kernel would wait for."""

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
