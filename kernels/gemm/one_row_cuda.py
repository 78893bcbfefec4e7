"""y = W x + b for one row, by `one_row.cu`: shared memory has all of W before x is computed. Chosen by
`aerie.kernels.gemm.choice` for weights that fit."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from aerie.kernels.capability import Capability, num_multiprocessors
from aerie.kernels.cuda_source import Kernel, compile_ahead, load
from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.gemm.skinny_triton import SkinnyGEMM
from aerie.kernels.gemm.tiles import one_row_bytes

_NAME, _THREADS = "one_row", 512


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write W x + b to `out`.

    x: [1, K] bfloat16 or float16, aligned to 16 bytes.
    weight: [N, K] in x's dtype, contiguous; see `aerie.kernels.gemm.choice`.
    bias: [N] in x's dtype, or None.
    out: [1, N] in x's dtype, contiguous.

    Reference: `torch.nn.functional.linear`.
    """
    n, k = weight.shape
    assert x.shape == (1, k) and out.shape == (1, n) and x.dtype == weight.dtype == out.dtype
    assert x.stride(1) == 1 and x.data_ptr() % 16 == 0 and weight.is_contiguous() and out.is_contiguous()
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    blocks = num_multiprocessors(weight.device)
    _kernel(x.get_device(), n, k, x.dtype == torch.float16, blocks).launch([blocks], (1, 1), x, weight, bias, out, n)
    return out


@cache
def source() -> str:
    return (Path(__file__).parent / f"{_NAME}.cu").read_text()


def defines(n: int, k: int, half: bool, blocks: int) -> tuple[tuple[str, int], ...]:
    """Return the macros of the kernel."""
    return ("K", k), ("ROWS", cdiv(n, blocks)), ("HALF", int(half)), ("SHARED_BYTES", _shared_bytes(n, k, blocks))


def _shared_bytes(n: int, k: int, blocks: int) -> int:
    needed = one_row_bytes(n, k, blocks)
    assert needed is not None, "W fits in shared memory"
    return needed


@cache
def _kernel(device: int, n: int, k: int, half: bool, blocks: int) -> Kernel:
    macros = defines(n, k, half, blocks)
    return load(device, source(), _NAME, macros, _THREADS, _shared_bytes(n, k, blocks))


@dataclass(frozen=True)
class OneRowGEMM(SkinnyGEMM):
    """`SkinnyGEMM`, except that `one_row` multiplies a single row."""

    def __post_init__(self) -> None:
        (n, k), half = self.weight.shape, self.weight.dtype == torch.float16
        compute = Capability.of(self.weight.device).compute
        assert compute is not None, "chosen for a Hopper GPU"
        compile_ahead(source(), defines(n, k, half, num_multiprocessors(self.weight.device)), compute)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        fits = x.shape[0] == 1 and x.stride(1) == 1 and x.data_ptr() % 16 == 0
        if not fits or (out is not None and (out.dtype != x.dtype or out.dim() != 2 or not out.is_contiguous())):
            return super().multiply(x, bias, out)
        if out is None:
            out = torch.empty((1, self.weight.shape[0]), dtype=x.dtype, device=x.device)
        return one_row(x, self.weight, bias, out)
