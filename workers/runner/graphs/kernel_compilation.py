"""Compiles kernels before their first launch, and forbids compilation during a capture. Used by
`aerie.workers.runner.graphs.step_capture`.

If an asynchronous mode is set (`triton.runtime._async_compile`), Triton (3.6) passes it each kernel that this process
has not loaded. Otherwise Triton compiles or loads the kernel at its launch.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, Protocol

from aerie.attention.backend import NewUnderCaptureError
from aerie.workers.runner.graphs.compile_jobs import (
    MAX_AT_ONCE,
    CompileProcesses,
    KernelJob,
    is_cached,
    job_of,
    processes_of,
)

logger = logging.getLogger(__name__)

BUSY_S = 0.01  # wait before a retry while another process compiles the kernel
LIMIT_S = 240.0  # maximum wait for all kernels; the rest are compiled at their launch
_THREADS = "compile"  # name prefix of compile threads


class _CompileMode(Protocol):
    """Triton's interface of an asynchronous mode. Triton launches the result of `submit` instead of the kernel."""

    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any: ...


class _SkippedKernel:
    """Stands in for a kernel that is not compiled yet. Launching it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        """Unused."""

    def run(self, *_: object) -> None:
        """Launch nothing."""


class CompileAhead:
    """Compiles the kernels that a dry run would launch.

    Each of `processes` compiles one kernel at a time. Threads of this process, which share the GIL, compile the kernels
    that `processes` cannot compile, or all kernels without `processes`.

    num_threads: number of threads without `processes`; None: one per core.
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
        """Number of kernels found by dry runs."""
        return len(self._kernels)

    @contextlib.contextmanager
    def dry_run(self) -> Iterator[None]:
        """Within the context, this thread starts to compile kernels that are not loaded, instead of launching them."""
        with _mode(self):
            yield

    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
        """Start to compile or load a kernel. Called by Triton. key: identifies the kernel's source and options."""
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
        return _SkippedKernel()

    def _compile(self, kernel: Future[Any], job: KernelJob, compile_kernel: Callable[[], Any]) -> None:
        """Compile a kernel in a process and load it from the disk cache. If that fails, compile it in this thread."""
        assert self._processes is not None
        try:
            outcome = self._processes.compile(job)
            if outcome.is_busy:
                time.sleep(BUSY_S)
                self._pool.submit(self._compile, kernel, job, compile_kernel)  # retry after the other kernels
                return
            if outcome.error and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "a compile process could not compile %s, so the rank does: %s", job.function.name, outcome.error
                )
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
        """Wait for all kernels, at most `LIMIT_S`, and load them, so that they can be captured. Raises the error of a
        failed compilation."""
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
    """Start one rank's share of this node's compile processes. num_ranks: ranks on the node."""
    return CompileProcesses.start(processes_of(num_ranks))


class _NoCompilation:
    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
        raise NewUnderCaptureError("a capture launched a kernel that is not compiled yet")


@contextlib.contextmanager
def no_new_kernels() -> Iterator[None]:
    """Raise NewUnderCaptureError if this thread launches a kernel that is not loaded. CUDA forbids loading kernels
    during a capture."""
    with _mode(_NoCompilation()):
        yield


def report_compilations(wanted: bool) -> None:
    """Turn warnings about kernels that are compiled or loaded at their launch, which delays requests, on or off."""
    from triton import knobs

    knobs.compilation.listener = _report if wanted else None


def _report(*, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
    """Called by Triton after it has compiled or loaded a kernel."""
    if not threading.current_thread().name.startswith(_THREADS):
        how = "read from the disk" if cache_hit else "compiled"
        logger.warning(
            "a step waited %.2f s until kernel %s was %s, because the start did not compile it ahead",
            times.total / 1e6,
            src.name,
            how,
        )


def hash_compiler() -> None:
    """Hash the compiler's files for Triton's cache keys, in a thread. Otherwise the first kernel would wait a second
    for it."""

    def read() -> None:
        with contextlib.suppress(ImportError):
            from triton.runtime.cache import triton_key

            triton_key()

    threading.Thread(target=read, name="triton key", daemon=True).start()


@contextlib.contextmanager
def _mode(mode: _CompileMode) -> Iterator[None]:
    """Set Triton's mode of compilation within the context."""
    from triton.runtime import _async_compile

    before = _async_compile.active_mode.set(mode)
    try:
        yield
    finally:
        _async_compile.active_mode.reset(before)
