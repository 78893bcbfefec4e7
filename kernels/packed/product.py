"""y = x W^T + b for a low-bit weight (`aerie.kernels.packed.weight`); a layer calls `choose_product`
once, because some kernels are compiled for its shape. `gated_mlp` is an MLP of two such products."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.capability import num_multiprocessors
from aerie.kernels.cpp_library import compiles
from aerie.kernels.gemm.host_cpp import multiply, rows_of
from aerie.kernels.gemm.host_weight import HostWeight, packed
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.norm.norm import silu_mul
from aerie.kernels.operation import Implementation, operation
from aerie.kernels.packed.cuda.gated_mlp_tiles import GROUP, MAX_ROWS, gated_mlp_tiles
from aerie.kernels.packed.cuda.tiles import STEP
from aerie.kernels.packed.weight import SYMMETRIC_ZERO, PackedWeight, dequantize, plain_codes, without_memory


def packed_product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return x W^T + b: [rows, out_features] in x's dtype.

    x: [rows, in_features] bfloat16, float16 or float32, last stride 1.
    weight: weight of a linear layer, without experts.
    bias: [out_features], or None.
    out: contiguous memory for the result; None allocates it.

    Sums are float32; a row's result does not depend on the other rows' values.
    """
    y = F.linear(x.float(), dequantize(weight, x.float().dtype), None if bias is None else bias.float())
    return y.to(x.dtype) if out is None else out.copy_(y)


def check_rows(x: Tensor, weight: PackedWeight, out: Tensor | None) -> None:
    """Assert what the kernels require of rows, so that the reference on a CPU refuses what a GPU would refuse."""
    assert x.dim() == 2 and x.shape[1] == weight.in_features and x.stride(1) == 1
    assert x.stride(0) % 8 == 0 or weight.in_features % 8 != 0, "rows are aligned for loads of 16 bytes"
    assert out is None or (out.is_contiguous() and out.dtype == x.dtype)


@dataclass(frozen=True)
class PackedProduct:
    """The reference: products with one weight. Base class of the implementations."""

    weight: PackedWeight

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """See `packed_product`."""
        check_rows(x, self.weight, out)
        return packed_product(x, self.weight, bias, out)

    def multiply_gated(self, x: Tensor) -> Tensor:
        """Return silu(first half of the outputs) * second half, [rows, out_features / 2]."""
        return silu_mul(self.multiply(x, None))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight, [out_features, in_features]."""
        return dequantize(self.weight, dtype)


@dataclass(frozen=True)
class HostPackedProduct(PackedProduct):
    """C++ on a CPU. weight: without memory. stored: the weight, in one copy."""

    stored: HostWeight

    @classmethod
    def of(cls, weight: PackedWeight, options: GEMMOptions) -> "HostPackedProduct":
        """Implement `choose_product`."""
        codes, scales, zeros = plain_codes(weight)
        offsets = None
        if zeros is not None:
            offsets = (SYMMETRIC_ZERO[weight.code] - zeros.float()) * scales.float()
        stored = packed(codes, scales, offsets, weight.group, 4 if weight.code == "int4" else 8)
        return cls(without_memory(weight), stored)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return rows_of(self.stored, torch.arange(self.stored.outputs)).to(dtype)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return multiply(self.stored, x, bias, out)


def _fits_host(weight: PackedWeight, options: GEMMOptions) -> bool:
    return options.host and weight.code != "e2m1" and weight.row_scale is None and weight.group % 2 == 0


@operation(
    Implementation(
        "c++", "aerie.kernels.packed.product:HostPackedProduct.of", compiles, _fits_host, "float32 rows, integers"
    ),
    Implementation(
        "cuda",
        "aerie.kernels.packed.cuda.kernels_cuda:CudaPackedProduct.of",
        lambda device: device.compiles_cuda,
        lambda weight, options: (
            options.workspace is not None
            and weight.code == "int4"
            and weight.row_scale is None
            and weight.scales.dtype.itemsize == 2
            and weight.in_features % STEP == 0
            and (weight.group == weight.in_features or weight.group % STEP == 0)
        ),
        f"int4, 16-bit rows and scales, inputs and groups a multiple of {STEP}",
    ),
    Implementation(
        "triton",
        "aerie.kernels.packed.product_triton:TritonPackedProduct.of",
        lambda device: device.reaches((8, 0)),
        lambda weight, options: (
            options.workspace is not None and weight.scales.dtype.itemsize == 2 and weight.in_features % 8 == 0
        ),
        "16-bit rows and scales, inputs a multiple of 8",
    ),
)
def choose_product(weight: PackedWeight, options: GEMMOptions) -> PackedProduct:
    """Return the product of 16-bit rows with a final weight, which must stay at its address."""
    return PackedProduct(weight)


def _serves(
    x: Tensor, gate_up: PackedProduct, down: PackedProduct, options: GEMMOptions, out: Tensor | None = None
) -> bool:
    """Return whether one kernel can compute the whole MLP."""
    if x.shape[0] > MAX_ROWS or x.dtype != torch.bfloat16 or options.workspace is None or options.deterministic:
        return False
    for weight in (gate_up.weight, down.weight):
        if weight.code != "int4" or weight.group != GROUP or weight.scales.dtype != x.dtype:
            return False
        if weight.zeros is not None or weight.row_scale is not None:
            return False
    if x.data_ptr() % 16 or x.stride(1) != 1 or (x.shape[0] > 1 and x.stride(0) % 8):
        return False
    tiles = gated_mlp_tiles(x.shape[1], down.weight.in_features, x.shape[0], num_multiprocessors(x.device))
    return tiles is not None and options.workspace.tickets.numel() >= tiles.words


def _check(
    x: Tensor, gate_up: PackedProduct, down: PackedProduct, options: GEMMOptions, out: Tensor | None = None
) -> None:
    check_rows(x, gate_up.weight, None)
    assert gate_up.weight.out_features == 2 * down.weight.in_features
    assert out is None or (out.shape == (x.shape[0], down.weight.out_features) and out.is_contiguous())


@operation(
    Implementation(
        "cuda",
        "aerie.kernels.packed.cuda.gated_mlp_cuda:gated_mlp",
        lambda device: device.compiles_cuda,
        _serves,
        f"up to {MAX_ROWS} rows, bfloat16, int4 in groups of {GROUP}",
    ),
    contract=_check,
)
def gated_mlp(
    x: Tensor, gate_up: PackedProduct, down: PackedProduct, options: GEMMOptions, out: Tensor | None = None
) -> Tensor:
    """Return (silu(x G^T) * (x U^T)) D^T: [rows, outputs of `down`] in x's dtype.

    x: [rows, size]; see `aerie.kernels.packed.product.packed_product`.
    gate_up: the product with G above U.
    down: the product with D.
    options: options of both layers.
    out: contiguous memory for the result; None allocates it.

    The reference calls the layers' own products, which are chosen for their shapes.
    """
    return down.multiply(gate_up.multiply_gated(x), None, out)
