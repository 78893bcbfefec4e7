"""y = x W^T + b for a weight that stays in FP8. Rows are rounded to FP8 too; sums are float32.

Chosen once for each layer by `choose_product`; the reference is the product of what rows and weight stand for
(`dequantized_rows`, and values times scales).
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from attention.ops.operation import Implementation
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.ops.fp8.tiles import Fp8Matrix
from workers.ops.gemm.workspace import GEMMOptions


class Fp8Product(ABC):
    """Products by one weight [N, K]. x: [rows, K], of 16 bits, or in FP8 as `inputs` says."""

    @property
    @abstractmethod
    def inputs(self) -> Fp8Inputs:
        """The form of FP8 in which rows cost no launch of their own."""

    @abstractmethod
    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[rows, N] of the layer's type; in the memory `out` if it is given."""

    @abstractmethod
    def multiply_apart(self, x: Tensor | Fp8Rows) -> Tensor | None:
        """Float32 [parts, rows, N], whose sum in their order is x W^T; None where `multiply` is to be called."""

    @abstractmethod
    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        """[rows, N / 2]: silu of the first half of x W^T times the second; in the form that is wanted, if any is."""


PRODUCT = Implementation("triton", "workers.ops.fp8.product_triton:TritonFp8Product", lambda here: here.multiplies_fp8)


def choose_product(weight: Fp8Matrix, options: GEMMOptions, dtype: torch.dtype) -> Fp8Product:
    """weight: final. options: with `fp8`. dtype: of results, and of rows that are not in FP8; 16 bits."""
    assert options.workspace is not None, "comes with fp8"
    made: Fp8Product = PRODUCT.function(weight, options.workspace, options.deterministic, dtype)
    return made
