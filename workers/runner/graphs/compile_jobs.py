"""Turns the compilation of a Triton (3.6) kernel into a job for another process, which stores it in the disk cache.

A process locks the kernel's folder in the cache, so that no two compile the same kernel.
"""

import contextlib
import fcntl
import hashlib
import importlib
import inspect
import os
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

    found = getattr(importlib.import_module(named.module), named.name)
    while not isinstance(found, JITFunction):
        found = found.fn
    return found


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
