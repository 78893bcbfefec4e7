"""Kernels as jobs that another process can compile: what Triton (3.6) asks for, as a plain value, and its compilation
into Triton's cache on disk. Used by `compile_processes` and `kernel_compilation`.

Processes that are asked for the same kernel compile it once, under a lock on its folder in the cache.
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
    """A kernel's function, by the module that has it."""

    module: str
    name: str


@dataclass(frozen=True)
class KernelJob:
    """A kernel as Triton was asked for it, as a plain value.

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
    """What became of a job.

    error: why the rank has to compile it; "" if it need not.
    is_busy: another process compiles it just now.
    seconds: that it took.
    """

    error: str = ""
    is_busy: bool = False
    seconds: float = 0.0


def job_of(key: str, compile_kernel: Callable[[], Any]) -> KernelJob | None:
    """The job for what Triton (3.6) hands to an asynchronous mode; None if no other process could do it.

    compile_kernel: Triton's closure over the source, the options and the target.
    """
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
    """Whether the kernel is in Triton's (3.6) cache on disk. compile_kernel: as for `job_of`."""
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


def import_compiler() -> None:
    """Import what a process needs to compile."""
    for name in COMPILER:
        importlib.import_module(name)


def _hash(key: str) -> str:
    """The name under which Triton (3.6) caches what has this key."""
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
    """Hold a lock on the key's folder in the cache; False if another process holds it."""
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
