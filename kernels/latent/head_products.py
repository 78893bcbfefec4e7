"""Multiplies each head's rows by that head's matrix, for absorbed keys and for values of MLA; values may be FP8, for
the output projection."""

import torch
from torch import Tensor

from aerie.kernels.fp8.rows import GROUP, Fp8Rows, quantize_rows
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.rope.rope_store import Angles, rotate_pairs


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
        out[..., n:] = rotate_pairs(x[..., k:], *angles.by_row())


MAX_ROWS = 16  # maximum rows of the kernel
_MAX_BYTES = 128 << 10  # maximum size of a head's matrix, which one copy loads to shared memory


def fits_values(rows: int, weight: Tensor) -> bool:
    """Whether the small-batch kernel supports a weight: 16 bits, and a latent that is a power of two and fits."""
    latent = weight.shape[1]
    fits = latent & (latent - 1) == 0 and latent * GROUP * weight.itemsize <= _MAX_BYTES
    return 0 < rows <= MAX_ROWS and weight.itemsize == 2 and fits


def _check_latent_values(x: Tensor, weight: Tensor, key_dim: int, rows_together: bool, fixed: bool) -> None:
    assert x.dim() == 3 and x.is_contiguous() and weight.is_contiguous() and weight.dtype == x.dtype
    assert weight.shape == (x.shape[1] * (key_dim + GROUP), x.shape[2])


@operation(
    Implementation(
        "triton",
        "aerie.kernels.latent.head_products_triton:latent_values",
        on_gpu,
        serves=lambda x, weight, key_dim, rows_together, fixed: not rows_together and fits_values(x.shape[0], weight),
        limits=f"up to {MAX_ROWS} rows, 16 bits, a latent that is a power of two",
    ),
    Implementation("triton", "aerie.kernels.latent.head_products_triton:rounded_values", on_gpu),
    contract=_check_latent_values,
)
def latent_values(x: Tensor, weight: Tensor, key_dim: int, rows_together: bool, fixed: bool) -> Fp8Rows:
    """Return x, the attention output, times each head's value matrix, in FP8 with scales per group.

    x              [rows, heads, latent], contiguous
    weight         [heads * (key_dim + 128), latent], contiguous, x's dtype: per head rows for keys, then for values
    rows_together  see `Fp8Rows.empty`
    fixed          a row's result must not depend on the number of rows
    ->             [rows, heads * 128]
    """
    rows, heads, latent = x.shape
    out = Fp8Rows.empty(rows, heads * GROUP, True, rows_together, x.device)
    head_products.reference(x, weight.view(heads, -1, latent)[:, key_dim:].transpose(1, 2), out)
    return out
