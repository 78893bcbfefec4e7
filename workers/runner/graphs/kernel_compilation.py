"""When Triton's kernels are compiled: ahead of their first launch, in threads, and never while a graph is captured.
Used by `workers.runner.graphs.recorder`.

Triton asks whatever is set as its asynchronous mode (`triton.runtime._async_compile`, Triton 3.6) for every kernel that
this process has not compiled or read from the disk cache yet. Elsewhere it is compiled where it is launched.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from attention.backend import NewUnderCaptureError

MAX_THREADS = 16  # a kernel takes a core for about a second; an engine has fewer than a hundred
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
    """Compiles in `num_threads` threads (None: one per core) what is launched while `rehearsing`, and launches nothing
    of it. Most of the compiler and all of the assembler run without Python's lock."""

    def __init__(self, num_threads: int | None = None) -> None:
        count = min(MAX_THREADS, num_threads or len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="compile")
        self._kernels: dict[Hashable, Future[Any]] = {}
        self._finalize: dict[Hashable, Callable[[Any], None]] = {}

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
            self._kernels[key] = self._pool.submit(compile_kernel)
            self._finalize[key] = finalize
        return _Unlaunched()

    def finish(self) -> float:
        """Wait for all kernels and load them, after which their launch may be captured; returns the seconds that this
        took. Raises what the first compilation raised that failed."""
        since_s = time.perf_counter()
        wait([self._kernels[key] for key in self._finalize], timeout=LIMIT_S)
        for key in [key for key in self._finalize if self._kernels[key].done()]:
            kernel = self._kernels[key].result()
            self._finalize.pop(key)(kernel)
            kernel._init_handles()
        return time.perf_counter() - since_s

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _NothingNew:
    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
        raise NewUnderCaptureError("a kernel that is not compiled yet, under capture")


@contextlib.contextmanager
def nothing_new() -> Iterator[None]:
    """Within, and in this thread, the launch of a kernel that is not there raises NewUnderCaptureError: to load one is
    forbidden under capture."""
    with _mode(_NothingNew()):
        yield


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
