"""Values of MLA, in FP8 for the output projection."""

from torch import Tensor

from aerie.kernels.fp8.rows import GROUP, Fp8Rows
from aerie.kernels.latent.head_products import head_products
from aerie.kernels.operation import Implementation, on_gpu, operation

MAX_ROWS = 16
_MAX_BYTES = 128 << 10  # maximum size of a head's matrix, which one copy loads to shared memory


def fits_values(rows: int, weight: Tensor) -> bool:
    """Whether the small-batch kernel supports a weight: 16 bits, and a latent that is a power of two and fits."""
    latent = weight.shape[1]
    fits = latent & (latent - 1) == 0 and latent * GROUP * weight.itemsize <= _MAX_BYTES
    return 0 < rows <= MAX_ROWS and weight.itemsize == 2 and fits


def _check(x: Tensor, weight: Tensor, key_dim: int, rows_together: bool, fixed: bool) -> None:
    assert x.dim() == 3 and x.is_contiguous() and weight.is_contiguous() and weight.dtype == x.dtype
    assert weight.shape == (x.shape[1] * (key_dim + GROUP), x.shape[2])


@operation(
    Implementation(
        "triton",
        "aerie.kernels.latent.latent_values_triton:latent_values",
        on_gpu,
        serves=lambda x, weight, key_dim, rows_together, fixed: (
            not fixed and not rows_together and fits_values(x.shape[0], weight)
        ),
        limits=f"up to {MAX_ROWS} rows, 16 bits, a latent that is a power of two",
    ),
    Implementation("triton", "aerie.kernels.latent.head_products_triton:rounded_values", on_gpu),
    contract=_check,
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
