"""Abilities of a device and of the installed libraries. No other module tests for them.

Used by the tables of operations (`aerie.kernels.operation`) and attention backends (`aerie.attention.registry`),
and by code whose memory, streams or graphs differ between devices.
"""

import sys
from ctypes import CDLL
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

GENERATIONS = (
    (8, 0),
    (12, 0),
    (10, 0),
    (9, 0),
)  # one for each GPU generation that tables distinguish
ALIGNED_BYTES = 16  # alignment of addresses that kernels are compiled for, and that tensor maps need
MULTIPROCESSORS = 132  # an H100's or H200's; tables of tiles are for this number
_FP8_MAJORS = (9, 10)  # GPUs whose tensor cores multiply FP8 in our kernels
_LIBRARIES = ("triton", "flashinfer")
_NVRTC = "nvrtc"  # entry of `Capability.libraries`, see `nvrtc_path`


@dataclass(frozen=True)
class Capability:
    """What a device can do.

    type: "cpu" or "cuda"; "meta" for tensors without memory.
    compute: the GPU's compute capability (major, minor); None on a CPU, or if unknown, as in a plan for another
        machine.
    libraries: installed libraries.
    """

    type: str
    compute: tuple[int, int] | None = None
    libraries: frozenset[str] = frozenset()

    @staticmethod
    def of(device: torch.device) -> "Capability":
        """Return the capability of a device of this process."""
        return _of(device.type, device.index)

    @property
    def is_gpu(self) -> bool:
        """Whether it runs Triton kernels. Modules above operations and backends ask a more specific question
        instead."""
        return self.type == "cuda"

    @property
    def shares_host_memory(self) -> bool:
        """Whether the host accesses its tensors directly, without copies and synchronisation."""
        return self.type == "cpu"

    @property
    def has_memory(self) -> bool:
        """Whether its tensors have values; those of "meta" have only shapes and dtypes."""
        return self.type != "meta"

    @property
    def runs_kernels(self) -> bool:
        """Whether it runs our Triton kernels, which fix the order of sums."""
        return self.is_gpu

    @property
    def has_streams(self) -> bool:
        """Whether work is queued on streams, so that the host does not wait for kernels and copies."""
        return self.is_gpu

    @property
    def captures_graphs(self) -> bool:
        """Whether steps can be captured as CUDA graphs."""
        return self.is_gpu

    @property
    def collectives(self) -> str:
        """The backend of torch.distributed."""
        return "nccl" if self.is_gpu else "gloo"

    @property
    def supports_pdl(self) -> bool:
        """Whether kernels can be launched before their predecessor has ended (`aerie.kernels.pdl`)."""
        return self.reaches((9, 0))

    @property
    def multiplies_fp8(self) -> bool:
        """Whether our FP8 matrix products run."""
        return self.compute is not None and self.compute[0] in _FP8_MAJORS

    @property
    def compiles_cuda(self) -> bool:
        """Whether our CUDA C++ kernels, which are written for Hopper, are compiled and run."""
        return self.compute == (9, 0) and _NVRTC in self.libraries

    def reaches(self, compute: tuple[int, int]) -> bool:
        """Whether this is a GPU of at least that compute capability."""
        return self.compute is not None and self.compute >= compute

    def possible(self) -> tuple["Capability", ...]:
        """Return the possible capabilities: itself, or a GPU of each generation if the compute capability is
        unknown."""
        if self.compute is None and self.is_gpu:
            return tuple(replace(self, compute=compute) for compute in GENERATIONS)
        return (self,)


@cache
def _of(kind: str, index: int | None) -> Capability:
    compute = torch.cuda.get_device_capability(index) if kind == "cuda" and torch.cuda.is_available() else None
    libraries = {name for name in _LIBRARIES if is_installed(name)}
    if compute is not None and nvrtc_path() is not None:
        libraries.add(_NVRTC)
    return Capability(kind, compute, frozenset(libraries))


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU. All blocks of a grid of this size run at once, so they may wait for each
    other."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def nvrtc_path() -> str | None:
    """Return the library that compiles CUDA C++ for torch's CUDA: in the wheels beside torch, or on the library path;
    None without."""
    if torch.version.cuda is None:
        return None
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    for path in sorted((Path(torch.__file__).parents[1] / "nvidia").glob(f"*/lib/{name}")):
        return str(path)
    try:
        CDLL(name)
    except OSError:
        return None
    return name


def is_installed(library: str) -> bool:
    """Whether a library is installed."""
    return library in sys.modules or find_spec(library) is not None


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the device's current stream."""
    return Capability.of(device).captures_graphs and torch.cuda.is_current_stream_capturing()
