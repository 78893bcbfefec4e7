"""Multiplies each head's rows by that head's matrix, for absorbed keys and for values of MLA."""

import torch
from torch import Tensor

from aerie.kernels.fp8.rows import GROUP, Fp8Rows, quantize_rows
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.rope.rotation import Angles, rotate_pairs


def _check(x: Tensor, weight: Tensor, out: Tensor | Fp8Rows, angles: Angles | None = None, fixed: bool = False) -> None:
    (rows, heads, width), (_, k, n) = x.shape, weight.shape
    assert weight.shape[0] == heads and x.stride(2) == 1 and weight.dtype == x.dtype
    assert (width > k) == (angles is not None)
    if isinstance(out, Fp8Rows):
        assert n == GROUP and width == k and out.scales.shape == (rows, heads) and out.values.is_contiguous()
    else:
        assert out.shape == (rows, heads, n + width - k) and out.stride(2) == 1 and out.dtype == x.dtype


@operation(Implementation("triton", "aerie.kernels.latent.head_products_triton:head_products", on_gpu), contract=_check)
def head_products(
    x: Tensor, weight: Tensor, out: Tensor | Fp8Rows, angles: Angles | None = None, fixed: bool = False
) -> None:
    """Write out[r, h, :n] = x[r, h, :k] @ weight[h], and x[r, h, k:] after RoPE to out[r, h, n:].

    x       [rows, heads, k + rotated], last stride 1
    weight  [heads, k, n], any strides
    out     [rows, heads, n + rotated], last stride 1, written; or, for n = 128 without a rotated part, Fp8Rows
            [rows, heads * n] with scales per group, bitwise equal to `quantize_rows` of the result
    angles  of the rows, if there is a rotated part
    fixed   a row's result must not depend on the number of rows
    """
    k, n = weight.shape[1:]
    products = torch.bmm(x[..., :k].transpose(0, 1), weight).transpose(0, 1)
    if isinstance(out, Fp8Rows):
        rounded = quantize_rows.reference(products.flatten(1), True)
        out.values.copy_(rounded.values)
        out.scales.copy_(rounded.scales)
        return
    out[..., :n] = products
    if angles is not None:
        out[..., n:] = rotate_pairs(x[..., k:], *angles.of_rows())
