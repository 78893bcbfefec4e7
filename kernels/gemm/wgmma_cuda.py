"""Common parts of the CUDA kernels for up to 256 rows (`gated_rows.cu`, `split_k.cu`): both multiply tiles of arbitrary
width with wgmma, from stages of 64 inputs in shared memory."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.kernels.cuda_source import Kernel, compile_ahead, joined, load, wgmma
from aerie.kernels.gemm.tiles import stage_bytes, wgmma_stages

_THREADS = 384  # threads per program


@dataclass(frozen=True)
class WgmmaKernel:
    """A kernel, by device and dtype. name: name of the kernel and its file. rows: rows of x in a program's shared
    memory. `width`: rows of W in a tile."""

    name: str
    rows: int

    def source(self, width: int, half: bool) -> str:
        """Return the source. half: float16, else bfloat16."""
        return joined(Path(__file__).parent / f"{self.name}.cu", generated=wgmma(width, half, in_registers=False))

    def defines(self, width: int, half: bool) -> tuple[tuple[str, int], ...]:
        """Return the macros."""
        return (
            ("WIDTH", width),
            ("STAGES", wgmma_stages(self.rows, width)),
            ("HALF", int(half)),
            ("SHARED_BYTES", self._shared_bytes(width)),
        )

    def compile_ahead(self, weight: Tensor, width: int) -> None:
        """Start to compile the kernel for a weight on a Hopper GPU."""
        compute, half = Capability.of(weight.device).compute, weight.dtype == torch.float16
        assert compute is not None, "chosen for a Hopper GPU"
        compile_ahead(self.source(width, half), self.defines(width, half), compute)

    def on(self, x: Tensor, width: int) -> Kernel:
        """Return the kernel for the device and dtype of x."""
        return _loaded(self, x.get_device(), width, x.dtype == torch.float16)

    def _shared_bytes(self, width: int) -> int:
        return wgmma_stages(self.rows, width) * stage_bytes(self.rows, width)


@cache
def _loaded(kernel: WgmmaKernel, device: int, width: int, half: bool) -> Kernel:
    source, defines = kernel.source(width, half), kernel.defines(width, half)
    return load(device, source, kernel.name, defines, _THREADS, kernel._shared_bytes(width))


def fits(x: Tensor) -> bool:
    """Return whether x can have a tensor map."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
