"""y = x W^T + b for weights of 16 or 32 bits. A layer calls `choose_gemm` once, because some GEMMs pack the weight or
compile for its shape.

On a CPU, oneDNN with its own blocked layout multiplies few rows 1.6 times faster than MKL (float32, 1792 x 512, 4 rows:
0.54 instead of 0.88 ms on one core of a Xeon at 2.1 GHz, torch 2.13). So weights are packed once after loading, with
the operators that torch.compile uses for frozen weights. These have an overhead of about 30 us per call, so small
weights use torch (4 rows, torch and oneDNN: 64 x 64, 4 and 23 us; 256 x 512, 36 and 85; 512 x 512, 84 and 82).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.capability import num_multiprocessors
from aerie.kernels.cpp_library import compiles
from aerie.kernels.gemm.tiles import INPUT_STEP, MAX_ROWS, gated_tiles, gated_width, one_row_bytes, split_width
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.lora.product import RowAdapters
from aerie.kernels.norm.norm import silu_mul
from aerie.kernels.operation import Implementation, anywhere, on_host, operation

_ROWS_HINT = 4  # number of rows for which oneDNN optimises its layout
_MIN_SHARED_WEIGHTS = 1 << 21  # with fewer, shared memory does not limit Triton's kernels
_MIN_PACKED_WEIGHTS = 1 << 18  # with fewer, the call overhead exceeds the gain


@dataclass(frozen=True)
class TorchGEMM:
    """torch's GEMM, the reference. weight: [out, in]."""

    weight: Tensor

    owns_weight: ClassVar[bool] = False  # whether it has a copy of its own, so that the given weight can be freed

    def dense(self) -> Tensor:
        """Return the weight [out, in]."""
        return self.weight

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [n] int64 of the weight: [n, in]."""
        return F.embedding(ids, self.weight)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """Return [rows, out] for x [rows, in], in `out` if given."""
        if out is None:
            return F.linear(x, self.weight, bias)
        transposed = self.weight.t()
        return torch.mm(x, transposed, out=out) if bias is None else torch.addmm(bias, x, transposed, out=out)

    def multiply_adapted(
        self, x: Tensor, bias: Tensor | None, out: Tensor | None, adapters: RowAdapters, gated: bool
    ) -> Tensor | None:
        """Return `multiply`, or `multiply_gated`, of the weight with the adapters of each row; None if no kernel adds
        them in the product's launch."""
        return None

    def multiply_gated(self, x: Tensor) -> Tensor:
        """Return silu(first half of the outputs) * second half, [rows, out / 2], for x [rows, in]."""
        return silu_mul(self.multiply(x, None, None))


@dataclass(frozen=True)
class BlockedGEMM(TorchGEMM):
    """oneDNN's GEMM, with a copy of the weight in its layout."""

    @classmethod
    def of(cls, weight: Tensor, options: GEMMOptions) -> "BlockedGEMM":
        """Implement `choose_gemm`."""
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT))

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if out is not None:  # on a CPU only in tests of GPU paths
            return out.copy_(self.multiply(x, bias, None))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return y


def _wants(deterministic: bool) -> Callable[[Tensor, GEMMOptions], bool]:
    """Return the condition for the Triton kernels: a workspace, and inputs divisible by INPUT_STEP. Tensor maps cannot
    be empty, so torch multiplies by a weight without inputs (a shared expert of width 0)."""

    def wants(weight: Tensor, options: GEMMOptions) -> bool:
        inputs = weight.shape[1]
        has_workspace = options.workspace is not None and options.deterministic == deterministic
        return has_workspace and inputs > 0 and inputs % INPUT_STEP == 0

    return wants


def _fits_shared_memory(weight: Tensor, options: GEMMOptions) -> bool:
    if not _wants(False)(weight, options) or weight.dtype.itemsize != 2 or weight.numel() < _MIN_SHARED_WEIGHTS:
        return False
    n, k = weight.shape
    return one_row_bytes(n, k, num_multiprocessors(weight.device)) is not None


def _wants_halves(weight: Tensor, options: GEMMOptions) -> bool:
    return _wants(False)(weight, options) and weight.dtype in (torch.bfloat16, torch.float16)


def _wants_ordered_halves(weight: Tensor, options: GEMMOptions) -> bool:
    return _wants(True)(weight, options) and weight.dtype in (torch.bfloat16, torch.float16)


def _fills_waves(weight: Tensor, options: GEMMOptions) -> bool:
    """Return whether the weight may be G above U, with a shape for which tiles of a width of their own are
    faster than cuBLAS."""
    n, k = weight.shape
    if not _wants_halves(weight, options) or n % 2:
        return False
    return gated_tiles(MAX_ROWS, n, k) is not None and gated_width(n // 2) is not None


def _fits_one_wave(weight: Tensor, options: GEMMOptions) -> bool:
    """Return whether clusters that share a tile of the weight fill one wave."""
    return _wants_halves(weight, options) and split_width(*weight.shape) is not None


def _fits_onednn(weight: Tensor, options: GEMMOptions) -> bool:
    is_large = weight.numel() >= _MIN_PACKED_WEIGHTS
    return options.workspace is None and weight.dtype == torch.float32 and is_large and bool(torch._C._has_mkldnn)


def _fits_host(weight: Tensor, options: GEMMOptions) -> bool:
    return options.host and weight.numel() >= _MIN_PACKED_WEIGHTS


@operation(
    Implementation(
        "c++", "aerie.kernels.gemm.host_cpp:HostGEMM.of", compiles, _fits_host, "float32 rows, 2**18 weights or more"
    ),
    Implementation(
        "cuda",
        "aerie.kernels.gemm.ordered_cuda:OrderedCudaGEMM.of",
        lambda device: device.compiles_cuda,
        _wants_ordered_halves,
        "deterministic, 16 bits",
    ),
    Implementation(
        "triton", "aerie.kernels.gemm.ordered_triton:OrderedGEMM.of", anywhere, _wants(True), "deterministic"
    ),
    Implementation(
        "cuda",
        "aerie.kernels.gemm.one_row_cuda:OneRowGEMM.of",
        lambda device: device.compiles_cuda,
        _fits_shared_memory,
        "one row, 16 bits; W fits in shared memory",
    ),
    Implementation(
        "cuda",
        "aerie.kernels.gemm.gated_rows_cuda:GatedRowsGEMM.of",
        lambda device: device.compiles_cuda,
        _fills_waves,
        "gated, 241 to 256 rows, 16 bits; fewer or smaller waves",
    ),
    Implementation(
        "cuda",
        "aerie.kernels.gemm.split_k_cuda:SplitKGEMM.of",
        lambda device: device.compiles_cuda,
        _fits_one_wave,
        "209 to 256 rows, 16 bits, many inputs; one wave",
    ),
    Implementation(
        "triton", "aerie.kernels.gemm.skinny_triton:SkinnyGEMM.of", anywhere, _wants(False), "up to 128 rows"
    ),
    Implementation(
        "onednn",
        "aerie.kernels.gemm.choice:BlockedGEMM.of",
        on_host,
        _fits_onednn,
        "float32, 2**18 weights or more",
    ),
)
def choose_gemm(weight: Tensor, options: GEMMOptions) -> TorchGEMM:
    """Return the GEMM of a final weight [out, in], which must stay at its address. The reference is torch's GEMM."""
    assert not options.deterministic, "refused at start"
    return TorchGEMM(weight)
