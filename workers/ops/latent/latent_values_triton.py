# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Values of multi-head latent attention for few rows, in FP8: `head_products` where one copy of a tensor map brings a
head's matrix into shared memory before the wait. Through registers, as there, it moves a second time after the wait.
Called by `workers.layers.latent_attention` on GPUs."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.ops.interpreter_triton import INTERPRETED
from attention.ops.pdl import pdl_wait
from workers.ops.fp8.rows import GROUP, Fp8Rows
from workers.ops.fp8.rows_triton import scale_of, to_fp8

MAX_ROWS = 16
_MAX_BYTES = 128 << 10  # of a head's matrix


@triton.jit(do_not_specialize=["rows"])
def _latent_values(
    w_desc,
    x_ptr,
    out_ptr,
    scales_ptr,
    rows,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    head = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weights = w_desc.load([head * STEP + FIRST, 0])
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, 128), tl.arange(0, LATENT)
    live = m < rows
    row = m.to(tl.int64) * HEADS + head
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row[:, None] * LATENT + k[None, :], mask=live[:, None], other=0.0)
    kept = x_ptr.dtype.element_ty
    if INTERPRETED:
        weights, x = weights.to(tl.float32), x.to(tl.float32)
    y = tl.dot(weights, tl.trans(x), input_precision="ieee").to(kept).to(tl.float32)
    scale = scale_of(y, 0)
    tl.store(scales_ptr + row, scale, mask=live)
    out = out_ptr + row[None, :] * 128 + n[:, None]
    tl.store(out, to_fp8(y / scale[None, :], INTERPRETED), mask=live[None, :])


def fits_values(rows: int, weight: Tensor) -> bool:
    """Whether `latent_values` multiplies so many rows by a weight as it takes it: of 16 bits, of a latent that one copy
    brings."""
    latent = weight.shape[1]
    fits = latent & (latent - 1) == 0 and latent * GROUP * weight.itemsize <= _MAX_BYTES
    return 0 < rows <= MAX_ROWS and weight.itemsize == 2 and fits


def latent_values(x: Tensor, weight: Tensor, key_dim: int) -> Fp8Rows:
    """[rows, heads * GROUP] with scales of groups, of weighted sums of latent rows x [rows, heads, latent], contiguous,
    where it fits (`fits_values`): what `quantize_rows` makes of the heads' products side by side, in x's type.

    weight: [heads * (key_dim + GROUP), latent], contiguous, of x's type; of each head the rows that make keys, then
    those that make values.

    Reference: `workers.ops.latent.head_products_triton.head_products_reference`.
    """
    rows, heads, latent = x.shape
    step = key_dim + GROUP
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape == (heads * step, latent)
    assert weight.dtype == x.dtype and fits_values(rows, weight)
    out = Fp8Rows.empty(rows, heads * GROUP, True, False, x.device)
    _latent_values[(heads,)](
        TensorDescriptor.from_tensor(weight, [GROUP, latent]),
        x,
        out.values,
        out.scales,
        rows,
        HEADS=heads,
        LATENT=latent,
        STEP=step,
        FIRST=key_dim,
        BLOCK_M=MAX_ROWS,
        INTERPRETED=INTERPRETED,
        num_warps=8,
        num_stages=1,
        **pdl_wait(x.device),
    )
    return out
