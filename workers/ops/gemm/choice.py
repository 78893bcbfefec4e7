"""y = x W^T + b for weights of 16 or 32 bits: which GEMM runs. Chosen once for each layer, since some pack the weight.

On a CPU, oneDNN multiplies few rows by a weight in its own blocked layout 1.6 times faster than MKL does by a plain
one (float32, 1792 x 512, 4 rows: 0.54 against 0.88 ms on one core of a Xeon at 2.1 GHz, torch 2.13), so weights are
packed once after loading. These operators are what torch.compile uses for frozen weights on a CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.capability import Capability
from attention.ops.operation import Implementation
from workers.ops.activation import silu_mul
from workers.ops.gemm.workspace import GEMMOptions

_ROWS_HINT = 4  # the row count oneDNN chooses its layout for: a round's


@dataclass(frozen=True)
class TorchGEMM:
    """torch's own; what every other is equal to. weight: [out, in]."""

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
    """oneDNN's, by a copy of the weight in its layout."""

    workspace: None = None

    def __post_init__(self) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _ROWS_HINT)
        object.__setattr__(self, "weight", packed)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if out is not None:  # only a test of GPU paths gives one on a CPU
            return out.copy_(self.multiply(x, bias, None))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return y


def _wants(deterministic: bool) -> Callable[[Tensor, GEMMOptions], bool]:
    """Kernels of ours need a workspace, and inputs that are a multiple of 128."""
    return lambda weight, options: (
        options.workspace is not None and options.deterministic == deterministic and weight.shape[1] % 128 == 0
    )


def _fits_onednn(weight: Tensor, options: GEMMOptions) -> bool:
    return options.workspace is None and weight.dtype == torch.float32 and bool(torch._C._has_mkldnn)


GEMMS = (
    Implementation(
        "triton", "workers.ops.gemm.skinny_triton:FixedRowsGEMM", lambda here: True, _wants(True), "deterministic"
    ),
    Implementation(
        "triton", "workers.ops.gemm.skinny_triton:SkinnyGEMM", lambda here: True, _wants(False), "up to 128 rows"
    ),
    Implementation(
        "onednn", "workers.ops.gemm.choice:BlockedGEMM", lambda here: here.shares_host_memory, _fits_onednn, "float32"
    ),
)
"""The first that serves a layer's weight and options; else torch's."""


def choose_gemm(weight: Tensor, options: GEMMOptions) -> TorchGEMM:
    """How to multiply by a final weight [out, in], which stays where it is."""
    here = Capability.of(weight.device)
    for each in GEMMS:
        if each.needs(here) and each.serves is not None and each.serves(weight, options):
            made: TorchGEMM = each.function(weight, options.workspace)
            return made
    assert not options.deterministic, "refused at start"
    return TorchGEMM(weight)
