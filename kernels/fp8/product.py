"""y = x W^T + b for an FP8 weight, with rows quantised to FP8 and float32 sums; and `fp8_rms_norm`, the RMSNorm that
returns FP8 rows for the next such product, in one launch.

A layer calls `build_product` once. There is nothing to choose: `GEMMOptions.fp8` decides before, because without it the
layer dequantises its weight. The reference is the product of the dequantised rows (`dequantized_rows`) and the
dequantised weight."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows, quantize_rows
from aerie.kernels.fp8.tiles import Fp8Matrix
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.lazy_import import load
from aerie.kernels.norm.norm import add_rms_norm, rms_norm
from aerie.kernels.operation import Implementation, on_gpu, operation


class Fp8Product(ABC):
    """Products with one weight [N, K].

    x: [rows, K] of 16 bits, or in the format `inputs`.
    """

    @property
    @abstractmethod
    def inputs(self) -> Fp8Inputs:
        """The FP8 format that `multiply` accepts."""

    @abstractmethod
    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Return [rows, N] in the layer's dtype, in `out` if given."""

    @abstractmethod
    def multiply_apart(self, x: Tensor | Fp8Rows) -> Tensor | None:
        """Return split-K partial sums of x W^T, [parts, rows, N] float32, to add in order; None: call `multiply`."""

    @abstractmethod
    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        """Return silu(first half of x W^T) * second half: [rows, N / 2], in the FP8 format `wanted`; None: the layer's
        dtype."""


def build_product(weight: Fp8Matrix, options: GEMMOptions, dtype: torch.dtype) -> Fp8Product:
    """Return the product with a final weight.

    options: with `fp8`.
    dtype: dtype of results, and of rows that are not in FP8; 16 bits.
    """
    assert options.workspace is not None, "options.fp8 implies a workspace"
    build = load("aerie.kernels.fp8.product_triton:TritonFp8Product")
    made: Fp8Product = build(weight, options.workspace, options.deterministic, dtype)
    return made


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Fp8Rows) -> None:
    assert x.dim() == 2 and x.is_contiguous() and x.shape == out.values.shape and out.values.is_contiguous()
    assert weight.shape == x.shape[1:] and weight.is_contiguous() and weight.dtype in (x.dtype, torch.float32)
    for tensor in (residual, out.plain):
        assert tensor is None or (tensor.is_contiguous() and tensor.shape == x.shape and tensor.dtype == x.dtype)


@operation(Implementation("triton", "aerie.kernels.fp8.rows_triton:fp8_rms_norm", on_gpu), contract=_check)
def fp8_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Fp8Rows) -> Fp8Rows:
    """Return x / rms(x) * weight in FP8. With a residual, add x to it first, and return the norm of the sum.

    x         [rows, size], contiguous, 16 or 32 bits
    residual  as x, written; or None
    weight    [size], x's dtype or float32
    out       written: from `Fp8Inputs.empty`; `plain`, if not None, receives the norm before rounding to FP8
    ->        out

    The kernel's results are bitwise those of `aerie.kernels.norm.norm` and `quantize_rows`.
    """
    normed = (
        rms_norm.reference(x, weight, eps) if residual is None else add_rms_norm.reference(x, residual, weight, eps)
    )
    rounded = quantize_rows.reference(normed, out.scales.shape[1] > 1 or normed.shape[1] == 128)
    out.values.copy_(rounded.values)
    out.scales.copy_(rounded.scales)
    if out.plain is not None:
        out.plain.copy_(normed)
    return out
