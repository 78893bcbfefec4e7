"""y = x W^T + b for weights of 16 or 32 bits: which GEMM runs, chosen once by `choose_gemm`.

On a CPU, oneDNN multiplies few rows by a weight in its own blocked layout 1.6 times faster than MKL does by a plain
one (float32, 1792 x 512, 4 rows: 0.54 against 0.88 ms on one core of a Xeon at 2.1 GHz, torch 2.13), so weights are
packed once after loading. These operators are what torch.compile uses for frozen weights on a CPU. On a GPU the few
rows of a round go through kernels of ours (`workers.ops.gemm.skinny_triton`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.ops.activation import silu_mul

if TYPE_CHECKING:
    from workers.ops.gemm.skinny_triton import Workspace

_FP8_MAJORS = (9, 10)  # compute capabilities whose matrix units multiply FP8 in our kernels
_ROWS_HINT = 4  # the row count oneDNN chooses its layout for: a round's


@dataclass(frozen=True)
class GEMMOptions:
    """workspace: of the skinny GEMMs, shared by all layers of a model that runs in a 16-bit type on a GPU, else None.
    deterministic: a row's result must not depend on the rows beside it (needs the workspace).
    fp8: the device multiplies FP8 (needs the workspace)."""

    workspace: "Workspace | None" = None
    deterministic: bool = False
    fp8: bool = False


@dataclass(frozen=True)
class TorchGEMM:
    """torch's own. weight: [out, in]."""

    weight: Tensor

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """[rows, out] for x [rows, in]; in the memory `out` if it is given."""
        if out is None:
            return F.linear(x, self.weight, bias)
        transposed = self.weight.t()
        return torch.mm(x, transposed, out=out) if bias is None else torch.addmm(bias, x, transposed, out=out)

    def multiply_gated(self, x: Tensor) -> Tensor:
        """[rows, out / 2], silu of the first half of the outputs times the second, for x [rows, in]."""
        return silu_mul(self.multiply(x, None, None))


@dataclass(frozen=True)
class BlockedGEMM(TorchGEMM):
    """oneDNN's. weight: a copy in its layout."""

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if out is not None:  # only a test of GPU paths gives one on a CPU
            return out.copy_(self.multiply(x, bias, None))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return y


@dataclass(frozen=True)
class FixedRowsGEMM(TorchGEMM):
    """A kernel of ours for any number of rows, a row's bits being a function of that row alone."""

    workspace: "Workspace"

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        from workers.ops.gemm.skinny_triton import fixed_rows

        return fixed_rows(x, self.weight, bias, self.workspace, out)


@dataclass(frozen=True)
class SkinnyGEMM(TorchGEMM):
    """Kernels of ours for as many rows as they have tiles for."""

    workspace: "Workspace"

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        from workers.ops.gemm.skinny_triton import skinny_gemm, skinny_gemm_tiles

        tiles = skinny_gemm_tiles(x.shape[0], *self.weight.shape)
        if tiles is None:
            return super().multiply(x, bias, out)
        return skinny_gemm(x, self.weight, bias, self.workspace, tiles, out)

    def multiply_gated(self, x: Tensor) -> Tensor:
        from workers.ops.gemm.skinny_triton import gated_tiles, skinny_gemm_gated

        tiles = gated_tiles(x.shape[0], *self.weight.shape)
        if tiles is None:
            return super().multiply_gated(x)
        return skinny_gemm_gated(x, self.weight, self.workspace, tiles)


def choose_gemm(weight: Tensor, options: GEMMOptions) -> TorchGEMM:
    """How to multiply by a final weight [out, in], which stays where it is."""
    if options.workspace is not None:
        from workers.ops.gemm.skinny_triton import skinny_gemm_tiles

        fits = skinny_gemm_tiles(1, *weight.shape) is not None
        assert fits or not options.deterministic, "refused at start"
        if fits:
            return (FixedRowsGEMM if options.deterministic else SkinnyGEMM)(weight, options.workspace)
    elif weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn:
        return BlockedGEMM(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT))
    return TorchGEMM(weight)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether our products of FP8 run there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _FP8_MAJORS
