"""Memory that is given back to the system and taken again at the same addresses, which captured graphs contain.

Used by `aerie.attention.kv_cache.pool`. On a CPU it is an anonymous mapping. On a GPU it is a range of virtual
addresses whose physical memory comes and goes (CUDA driver API, virtual memory management).
"""

import ctypes
import mmap
import weakref
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from aerie.kernels.capability import Capability


class Releasable(Protocol):
    """Bytes on one device. tensor: [num_bytes] uint8, zeros at first. Must not be read or written while released."""

    tensor: Tensor

    def release(self) -> None:
        """Give the physical memory back."""

    def restore(self) -> None:
        """Take physical memory again, which is zero. Raises RuntimeError if there is not enough; then nothing has
        changed."""


def releasable(num_bytes: int, device: torch.device) -> Releasable:
    """Return zeroed memory that can be released. Raises RuntimeError if there is not enough."""
    return HostMemory(num_bytes) if Capability.of(device).shares_host_memory else CudaMemory(num_bytes, device)


class HostMemory:
    """`Releasable` on the host: the system zeroes each page at its first write."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, max(1, num_bytes))
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)[:num_bytes]

    def release(self) -> None:
        """See `Releasable`."""
        self._memory.madvise(mmap.MADV_REMOVE)  # Python's mappings are shared ones, which MADV_DONTNEED does not free

    def restore(self) -> None:
        """See `Releasable`."""


class CudaMemory:
    """`Releasable` on a GPU. One handle of physical memory is mapped to the whole range."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # the driver's calls need torch's context
            index = torch.cuda.current_device()
            self._access = _Access(_Location(_DEVICE, index), _READ_WRITE)
            self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, index))
            granularity = ctypes.c_size_t()
            _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
            self._size = -(-max(1, num_bytes) // granularity.value) * granularity.value
            address = ctypes.c_uint64()
            _call(
                "cuMemAddressReserve", ctypes.byref(address), _size(self._size), _size(0), ctypes.c_uint64(0), _flags()
            )
            self._address = address.value
            self._handles: list[int] = []
            self._close = weakref.finalize(self, _close, self._address, self._size, self._handles)
            self.restore()
            self.tensor = torch.as_tensor(_Array(self._address, self._size), device=device)[:num_bytes]

    def release(self) -> None:
        """See `Releasable`. Waits for the device."""
        torch.cuda.synchronize(self._device)
        _unmap(self._address, self._size, self._handles)

    def restore(self) -> None:
        """See `Releasable`."""
        if self._handles:
            return
        torch.cuda.empty_cache()
        handle = ctypes.c_uint64()
        _call("cuMemCreate", ctypes.byref(handle), _size(self._size), ctypes.byref(self._properties), _flags())
        self._handles.append(handle.value)
        _call("cuMemMap", _address(self._address), _size(self._size), _size(0), handle, _flags())
        _call("cuMemSetAccess", _address(self._address), _size(self._size), ctypes.byref(self._access), _size(1))
        _call("cuMemsetD8_v2", _address(self._address), ctypes.c_ubyte(0), _size(self._size))
        torch.cuda.synchronize(self._device)


# Values of cuda.h
_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; the last 8 bytes are its allocation flags."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Array:
    """A range of device memory as torch reads it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


_size, _address, _flags = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_driver(), name)(*arguments):
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()}")


def _unmap(address: int, size: int, handles: list[int]) -> None:
    while handles:
        _call("cuMemUnmap", _address(address), _size(size))
        _call("cuMemRelease", _address(handles.pop()))


def _close(address: int, size: int, handles: list[int]) -> None:
    """Free all of it. At the end of a process the driver may be gone already; then so is the memory."""
    try:
        torch.cuda.synchronize()
        _unmap(address, size, handles)
        _call("cuMemAddressFree", _address(address), _size(size))
    except (RuntimeError, AssertionError):
        return
