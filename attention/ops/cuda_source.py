"""CUDA C++ kernels: compiled by NVRTC, which comes with PyTorch, and launched through the driver.

For kernels that Triton cannot express; `attention.ops.delta_rule.few_rows_cuda` is one. Compiled code is kept in
Triton's cache folder, so that a machine compiles a kernel once. Sources include no header, so no toolkit is needed.
A kernel is compiled at its first launch, or ahead of a capture as Triton's are (`compiled_by`).
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from attention.backend import NewUnderCaptureError
from attention.capability import Capability, is_capturing
from attention.nvrtc import compiled, nvrtc

_EARLY_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
Argument = Tensor | int | float


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a union of 64 bytes after the id."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of one source file, without its constants.

    path: the source, which includes nothing.
    name: the `extern "C"` function.
    """

    path: Path
    name: str

    def launch(
        self,
        device: torch.device,
        constants: tuple[tuple[str, int], ...],
        grid: tuple[int, int],
        threads: int,
        early: bool,
        arguments: Sequence[Argument],
    ) -> None:
        """Launch it on the current stream.

        constants: macros. Each set of values is compiled once.
        early: before its predecessor has ended (`attention.ops.pdl`).
        arguments: tensors as their addresses, integers as long long, floats as float.
        """
        function = _FUNCTIONS.get(key := (self, constants, device.index or 0))
        if function is None and (ahead := _AHEAD.get()) is not None:
            ahead(key, partial(_code, *key), partial(_load, key))
            return
        if function is None:
            if is_capturing(device):
                raise NewUnderCaptureError(f"kernel {self.name} is not compiled yet", lambda: _load(key, _code(*key)))
            _load(key, _code(*key))
            function = _FUNCTIONS[key]
        values = [
            ctypes.c_void_p(each.data_ptr())
            if isinstance(each, Tensor)
            else ctypes.c_float(each)
            if isinstance(each, float)
            else ctypes.c_longlong(each)
            for each in arguments
        ]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attribute = _Attribute(id=_EARLY_LAUNCH, value=(ctypes.c_int * 16)(1))
        stream = torch.cuda.current_stream(device).cuda_stream
        config = _Launch((*grid, 1), (threads, 1, 1), 0, stream, ctypes.pointer(attribute), int(early))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), function, addresses, None))


Key = tuple[CudaKernel, tuple[tuple[str, int], ...], int]  # the last: the device's number
Ahead = Callable[[Key, Callable[[], bytes], Callable[[bytes], None]], None]
_FUNCTIONS: dict[Key, ctypes.c_void_p] = {}  # loaded
_AHEAD: ContextVar[Ahead | None] = ContextVar("ahead", default=None)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(error: int) -> None:
    if error:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {error}: {(text.value or b'unknown').decode()}")


def options_of(constants: tuple[tuple[str, int], ...], compute: tuple[int, int]) -> tuple[str, ...]:
    """Options of the compiler."""
    major, minor = compute
    macros = (f"-D{name}={value}" for name, value in constants)
    return (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *macros)


def _code(kernel: CudaKernel, constants: tuple[tuple[str, int], ...], device: int) -> bytes:
    """Machine code from the cache folder, where it is put if it is not there."""
    compute, library = Capability.of(torch.device("cuda", device)).compute, nvrtc()
    assert compute is not None and library is not None
    source, options = kernel.path.read_text(), options_of(constants, compute)
    key = hashlib.sha256("\n".join((torch.version.cuda or "", *options, source)).encode()).hexdigest()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    file = folder / f"{kernel.name}-{key[:32]}.cubin"
    if file.exists():
        return file.read_bytes()
    code = compiled(source, options, library)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
        part.write(code)
    os.replace(part.name, file)  # whole or not at all, for other ranks
    return code


def _use(device: int) -> None:
    """Make the device's context current. Allocates, since choosing a device does not create its context."""
    torch.cuda.set_device(device)
    torch.empty(1, device=f"cuda:{device}")


def _load(key: Key, code: bytes) -> None:
    kernel, _, device = key
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _use(device)
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code))
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()))
    _FUNCTIONS[key] = function


@contextmanager
def compiled_by(ahead: Ahead) -> Iterator[None]:
    """In this thread, launch only kernels that are loaded. `ahead` gets each other kernel: its key, a function that
    compiles it and may run in any thread, and one that loads the result."""
    token = _AHEAD.set(ahead)
    try:
        yield
    finally:
        _AHEAD.reset(token)
