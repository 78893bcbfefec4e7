"""NVRTC, the compiler of CUDA C++ that comes with PyTorch. Needs no GPU and no toolkit."""

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch


@cache
def nvrtc() -> ctypes.CDLL | None:
    """The compiler of PyTorch's CUDA version; None where it is not installed."""
    return None if torch.version.cuda is None else nvrtc_of(int(torch.version.cuda.split(".")[0]))


def nvrtc_of(major: int) -> ctypes.CDLL | None:
    """The compiler of a CUDA version that is installed as a package, or else where the system looks for libraries."""
    for path in (*_packaged(f"libnvrtc.so.{major}"), f"libnvrtc.so.{major}"):
        try:
            # it opens its second library by name alone, which finds one that is loaded
            for beside in Path(path).parent.glob("libnvrtc-builtins.so.*[0-9]") if "/" in path else ():
                ctypes.CDLL(str(beside))
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _packaged(name: str) -> Iterator[str]:
    packages = find_spec("nvidia")
    for folder in packages.submodule_search_locations or () if packages else ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}")))


def compiled(source: str, options: Sequence[str], library: ctypes.CDLL) -> bytes:
    """The machine code of `source`. RuntimeError with the compiler's messages if it does not compile."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        if library.nvrtcCompileProgram(program, len(options), given):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC: {log.value.decode()}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
