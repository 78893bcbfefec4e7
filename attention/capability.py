"""What a device, and the libraries installed beside it, can do. The only module that asks.

Read by the tables of operations (`attention.ops.operation`) and of attention backends (`attention.registry`), and
wherever memory, streams or graphs differ between devices.
"""

import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch

GENERATIONS = (
    (8, 0),
    (12, 0),
    (10, 0),
    (9, 0),
)  # one of each GPU generation that tables distinguish
_FP8_MAJORS = (9, 10)  # whose matrix units multiply FP8 in our kernels
_LIBRARIES = ("triton", "flashinfer")


@dataclass(frozen=True)
class Capability:
    """type: "cpu" or "cuda"; "meta" for tensors without memory. compute: the GPU's compute capability (major, minor);
    None on a CPU, and where it is not known, as in a plan for another machine. libraries: those installed here."""

    type: str
    compute: tuple[int, int] | None = None
    libraries: frozenset[str] = frozenset()

    @staticmethod
    def of(device: torch.device) -> "Capability":
        """The capability of a device of this process."""
        return _of(device.type, device.index)

    @property
    def is_gpu(self) -> bool:
        """Whether it runs Triton's kernels. Above operations and backends, ask for what follows from it."""
        return self.type == "cuda"

    @property
    def shares_host_memory(self) -> bool:
        """Whether the host reads and writes its tensors directly: nothing is copied, and nothing is waited for."""
        return self.type == "cpu"

    @property
    def has_memory(self) -> bool:
        """Whether its tensors hold values; those of "meta" have shapes and types only."""
        return self.type != "meta"

    @property
    def runs_kernels(self) -> bool:
        """Whether it runs our Triton kernels, which fix the order of sums that a library leaves open."""
        return self.is_gpu

    @property
    def has_streams(self) -> bool:
        """Whether kernels and copies run asynchronously, in streams, while the host goes on."""
        return self.is_gpu

    @property
    def captures_graphs(self) -> bool:
        """Whether steps can be captured as CUDA graphs, with kernels compiled before."""
        return self.is_gpu

    @property
    def collectives(self) -> str:
        """The backend of torch.distributed."""
        return "nccl" if self.is_gpu else "gloo"

    @property
    def supports_pdl(self) -> bool:
        """Whether kernels can be launched before their predecessor has ended (`attention.ops.pdl`)."""
        return self.reaches((9, 0))

    @property
    def multiplies_fp8(self) -> bool:
        """Whether our products of FP8 run."""
        return self.compute is not None and self.compute[0] in _FP8_MAJORS

    def reaches(self, compute: tuple[int, int]) -> bool:
        """Whether this is a GPU of that compute capability or a later one."""
        return self.compute is not None and self.compute >= compute

    def possible(self) -> tuple["Capability", ...]:
        """What it may be: itself, or a GPU of each generation where the compute capability is not known."""
        if self.compute is None and self.is_gpu:
            return tuple(replace(self, compute=each) for each in GENERATIONS)
        return (self,)


@cache
def _of(kind: str, index: int | None) -> Capability:
    compute = torch.cuda.get_device_capability(index) if kind == "cuda" and torch.cuda.is_available() else None
    return Capability(kind, compute, frozenset(name for name in _LIBRARIES if is_installed(name)))


def is_installed(library: str) -> bool:
    """Whether `import library` would find a package."""
    return library in sys.modules or find_spec(library) is not None


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device's current stream."""
    return Capability.of(device).captures_graphs and torch.cuda.is_current_stream_capturing()
