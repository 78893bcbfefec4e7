"""The GEMM of deterministic engines on Hopper: `ordered.cu` multiplies many rows, in the order of
`aerie.kernels.gemm.ordered_triton`, which multiplies few. Chosen by `aerie.kernels.gemm.choice`."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from aerie.kernels.capability import Capability, num_multiprocessors
from aerie.kernels.cuda_source import Kernel, compile_ahead, joined, load, tensor_map, wgmma
from aerie.kernels.gemm.ordered_triton import OrderedGEMM
from aerie.kernels.gemm.tiles import CUDA_ROWS, INPUT_STEP, ordered_cuda_rows, ordered_cuda_stages, sum_order
from aerie.kernels.gemm.wgmma_cuda import fits
from aerie.kernels.gemm.workspace import Workspace

_THREADS = 384  # threads per program
ROW_TILES = Path(__file__).with_name("row_tiles.cuh")  # functions of `ordered.cu` and many_rows.cu
_BARRIERS_AND_STAGING = 8192 + 256  # bytes, beside the stages


def source(rows: int, half: bool) -> str:
    """Return the source for tiles of `rows` rows. half: float16, else bfloat16."""
    return joined(ROW_TILES, Path(__file__).with_name("ordered.cu"), generated=wgmma(rows, half, in_registers=False))


def defines(rows: int, gated: bool, half: bool) -> tuple[tuple[str, int], ...]:
    """Return the macros."""
    return (
        ("ROWS", rows),
        ("STAGES", ordered_cuda_stages(rows)),
        ("GATED", int(gated)),
        ("HALF", int(half)),
        ("SHARED_BYTES", _shared_bytes(rows)),
    )


def _shared_bytes(rows: int) -> int:
    return ordered_cuda_stages(rows) * (rows + 128) * 128 + _BARRIERS_AND_STAGING


@cache
def _loaded(device: int, rows: int, gated: bool, half: bool) -> Kernel:
    return load(device, source(rows, half), "ordered", defines(rows, gated, half), _THREADS, _shared_bytes(rows))


def ordered_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace, tile_rows: int, out: Tensor, gated: bool
) -> None:
    """Write x W^T + b to out [rows, N]; gated: silu(x G^T) * (x U^T), where W [2 N, K] is G above U.

    x: [rows, K] bfloat16 or float16, last stride 1, rows at multiples of 16 bytes, K a multiple of 64.
    weight: in x's dtype, contiguous.
    bias: [N] in x's dtype, or None.
    workspace: at least `aerie.kernels.gemm.tiles.ordered_workspace_size`.
    tile_rows: from `ordered_cuda_rows`.
    out: in x's dtype, contiguous.

    Reference: `torch.nn.functional.linear`, and `aerie.kernels.norm.norm.silu_mul` of it.
    """
    (rows, n), (outputs, k) = out.shape, weight.shape
    assert x.shape == (rows, k) and outputs == (2 * n if gated else n) and x.dtype == weight.dtype == out.dtype
    assert rows > 0 and k % INPUT_STEP == 0 and fits(x) and weight.is_contiguous() and out.is_contiguous()
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous() and not gated)
    order, programs = sum_order(outputs, k), num_multiprocessors(x.device) // 2 * 2
    assert order.splits == 1 or workspace.part.numel() >= programs * tile_rows * 128
    _loaded(x.get_device(), tile_rows, gated, x.dtype == torch.float16).launch(
        [programs],
        (2, 1),
        tensor_map(x, 64, tile_rows // 2),
        tensor_map(weight, 64, 64),
        bias,
        out,
        workspace.part,
        rows,
        n,
        order.splits,
        min(order.span, k) // INPUT_STEP,
        order.last // INPUT_STEP,
    )


@dataclass(frozen=True)
class OrderedCudaGEMM(OrderedGEMM):
    """`OrderedGEMM`, except that `ordered.cu` multiplies many rows."""

    def __post_init__(self) -> None:
        compute, half = Capability.of(self.weight.device).compute, self.weight.dtype == torch.float16
        assert compute is not None, "chosen for a Hopper GPU"
        for rows in CUDA_ROWS:
            for gated in (False, True):
                compile_ahead(source(rows, half), defines(rows, gated, half), compute)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        tile_rows = ordered_cuda_rows(x.shape[0], *self.weight.shape)
        if tile_rows is None or not fits(x) or (out is not None and out.dtype != x.dtype):
            return super().multiply(x, bias, out)
        if out is None:
            out = torch.empty((x.shape[0], self.weight.shape[0]), dtype=x.dtype, device=x.device)
        ordered_cuda(x, self.weight, bias, self.workspace, tile_rows, out, gated=False)
        return out

    def multiply_gated(self, x: Tensor) -> Tensor:
        tile_rows = ordered_cuda_rows(x.shape[0], *self.weight.shape)
        if tile_rows is None or not fits(x) or self.weight.shape[0] % 2:
            return super().multiply_gated(x)
        out = torch.empty((x.shape[0], self.weight.shape[0] // 2), dtype=x.dtype, device=x.device)
        ordered_cuda(x, self.weight, None, self.workspace, tile_rows, out, gated=True)
        return out
