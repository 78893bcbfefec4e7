"""Compiles CUDA C++ kernels with NVRTC at their first use, and launches them through the driver.

CUDA C++ is for kernels that Triton cannot express. NVRTC comes with torch's CUDA wheels; without it
(`Capability.compiles_cuda`) operations use their Triton kernels. Sources include no headers. Compiled kernels are
stored in Triton's disk cache. `joined` makes one source of several files.
"""

import ctypes
import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

from aerie.kernels.capability import Capability, nvrtc_path

_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_TENSOR_MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
Defines = Sequence[tuple[str, int | float]]
"""Macros of a source, by name. A float is a literal of type double."""
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_futures: dict[str, "Future[bytes]"] = {}  # machine code by a hash of source and options
_lock = threading.Lock()
_CLUSTER, _EARLY = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def joined(*paths: Path, generated: str = "") -> str:
    """Return `device.cuh`, which is beside this module, and the files, in this order.

    generated: further device functions, between `device.cuh` and the rest.
    """
    shared = Path(__file__).with_name("device.cuh").read_text()
    return shared + generated + "".join(path.read_text() for path in paths)


def wgmma(columns: int, half: bool, in_registers: bool = True) -> str:
    """Return the device function `wgmma`, which adds the products of 16 inputs to 64 x `columns` sums.

    in_registers: whether the first operand is in registers; else in shared memory, like the second one.
    """
    number, count = "f16" if half else "bf16", columns // 2
    held = range(4 if in_registers else 1)
    sums = ", ".join(f"%{r}" for r in range(count))
    first = ", ".join(f"%{count + r}" for r in held)
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{number}.{number}"
    outputs = ", ".join(f'"+f"(d[{r}])' for r in range(count))
    inputs = ", ".join(f'"r"(a[{r}])' for r in held) if in_registers else '"l"(a)'
    operand = f"{{{first}}}" if in_registers else first
    majors = "0" if in_registers else "0, 0"  # operands in shared memory are K-major: a row's inputs are adjacent
    kind = "const u32 (&a)[4]" if in_registers else "u64 a"
    head = f"__device__ __forceinline__ void wgmma(float (&d)[{count}], {kind}, u64 b)"
    code = f"{name} {{{sums}}}, {operand}, %{count + len(held)}, 1, 1, 1, {majors};"
    return f'{head} {{\n    asm volatile("{code}" : {outputs} : {inputs}, "l"(b));\n}}\n'


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, loaded in one device's context.

    threads: per thread block.
    shared_bytes: dynamic shared memory per thread block.
    launches_early: before its predecessor has ended (`aerie.kernels.pdl`).
    """

    function: ctypes.c_void_p
    threads: int
    shared_bytes: int
    launches_early: bool

    def launch(self, grid: Sequence[int], cluster: tuple[int, int], *arguments: object) -> None:
        """Launch on the current stream.

        cluster: thread blocks per cluster; (1, 1): no clusters.
        arguments: tensors become pointers, None a null pointer, ints 32-bit ints, and floats 32-bit floats. An array of
            bytes is passed as a structure.
        """
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attributes = (_Attribute * 2)()
        count = 0
        if cluster != (1, 1):
            attributes[count].id = _CLUSTER
            attributes[count].value[:3] = [*cluster, 1]
            count += 1
        if self.launches_early:
            attributes[count].id = _EARLY
            attributes[count].value[0] = 1
            count += 1
        config = _Config(
            (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid))),
            (ctypes.c_uint * 3)(self.threads, 1, 1),
            self.shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            attributes,
            count,
        )
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None), "cuLaunchKernelEx")


@cache
def load(
    device: int, source: str, name: str, defines: tuple[tuple[str, int | float], ...], threads: int, shared_bytes: int
) -> Kernel:
    """Return a kernel loaded in a device's context. Compile it unless it is in the disk cache.

    name: name of an `extern "C"` function.
    defines: macros.

    Raises RuntimeError with the compiler's log.
    """
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    cubin, mode = compiled(source, defines, torch.cuda.get_device_capability(device)), ctypes.c_int(_RELAXED)
    with torch.cuda.device(device):
        # loading allocates memory, which capture modes other than relaxed forbid
        _check(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
        _check(driver.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
        _check(driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED_BYTES, shared_bytes), "cuFuncSetAttribute")
        _check(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    return Kernel(function, threads, shared_bytes, Capability.of(torch.device("cuda", device)).supports_pdl)


def compiled(source: str, defines: Defines, compute: tuple[int, int]) -> bytes:
    """Return machine code for a compute capability, from Triton's disk cache if possible."""
    return compile_ahead(source, defines, compute).result()


def compile_ahead(source: str, defines: Defines, compute: tuple[int, int]) -> "Future[bytes]":
    """Start to compile in a thread what `compiled` will return. NVRTC takes about a second per kernel, without holding
    the GIL."""
    target = f"sm_{compute[0]}{compute[1]}{'a' if compute == (9, 0) else ''}"
    options = [f"--gpu-architecture={target}", "-default-device", *(f"-D{key}={value}" for key, value in defines)]
    key = hashlib.sha256("\n".join([source, str(torch.version.cuda), *options]).encode()).hexdigest()
    with _lock:
        if key not in _futures:
            _futures[key] = _pool().submit(_cached, key, source, options)
        return _futures[key]


def _cached(key: str, source: str, options: Sequence[str]) -> bytes:
    cache, name = get_cache_manager(key), "kernel.cubin"
    path = cache.get_file(name) or cache.put(_compile(source, options), name, binary=True)
    return Path(path).read_bytes()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))), "nvrtc")


def _compile(source: str, options: Sequence[str]) -> bytes:
    """Return the cubin of CUDA C++ source. Raises RuntimeError with the compiler's log."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None), "nvrtc")
    flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), flags)
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC error {failed}: {log.value.decode()}")
    _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
    cubin = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def tensor_map(x: Tensor, columns: int, rows: int) -> ctypes.Array[ctypes.c_char]:
    """Return a CUtensorMap (128 bytes): boxes of `rows` by `columns` with 128-byte swizzle; zeros outside x.

    x: [any, any] bfloat16 or float16, last stride 1.
    columns: at most 64.
    rows: at most 256.
    """
    return tensor_map_of(x, (rows, columns))


def tensor_map_of(x: Tensor, box: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
    """Return a CUtensorMap as `tensor_map` does, for any number of dimensions up to 5.

    x: bfloat16 or float16, aligned to 16 bytes, last stride 1, the others multiples of 16 bytes.
    box: one size per dimension of x, the last at most 64, the others at most 256.
    """
    memory, rank = ctypes.create_string_buffer(128 + 63), x.dim()
    aligned = -(-ctypes.addressof(memory) // 64) * 64  # the driver needs an address aligned to 64 bytes
    swizzle = promotion = 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    failed = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _TENSOR_MAP_TYPES[x.dtype],
        rank,
        ctypes.c_void_p(x.data_ptr()),
        (ctypes.c_uint64 * rank)(*reversed(x.shape)),
        (ctypes.c_uint64 * (rank - 1))(*(stride * x.element_size() for stride in reversed(x.stride()[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        *(0, swizzle, promotion, 0),
    )
    _check(failed, "cuTensorMapEncodeTiled")
    return ctypes.create_string_buffer(ctypes.string_at(aligned, 128), 128)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    path = nvrtc_path()
    assert path is not None, "Capability.compiles_cuda"
    for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*") if os.sep in path else ():
        ctypes.CDLL(str(builtins))  # NVRTC looks for it by name
    return ctypes.CDLL(path)


def _value(argument: object) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float | ctypes.Array[ctypes.c_char]:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p()
    if isinstance(argument, ctypes.Array):
        return argument
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    assert isinstance(argument, int)
    return ctypes.c_int(argument)


def _check(failed: int, call: str) -> None:
    if failed:
        raise RuntimeError(f"{call}: error {failed}")
