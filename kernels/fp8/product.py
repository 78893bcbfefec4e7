"""y = x W^T + b for an FP8 weight. Rows are quantised to FP8; sums are float32.

A layer calls `build_product` once. There is nothing to choose: `GEMMOptions.fp8` decides before, because without it the
layer dequantises its weight. The reference is the product of the dequantised rows (`dequantized_rows`) and the
dequantised weight.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.fp8.tiles import Fp8Matrix
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.lazy_import import load


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
