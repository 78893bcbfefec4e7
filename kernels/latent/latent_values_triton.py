# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel of `aerie.kernels.latent.latent_values` for few rows. A tensor map loads a head's matrix to shared
memory before the wait. From registers, as in `head_products_triton`, it would have to be moved after the wait."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.fp8.rows import GROUP, Fp8Rows
from aerie.kernels.fp8.rows_triton import scale_of
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.fp8_triton import to_fp8
from aerie.kernels.latent.latent_values import MAX_ROWS, fits_values
from aerie.kernels.pdl import pdl_wait


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


def latent_values(x: Tensor, weight: Tensor, key_dim: int, rows_together: bool = False, fixed: bool = False) -> Fp8Rows:
    """`aerie.kernels.latent.latent_values.latent_values`."""
    rows, heads, latent = x.shape
    step = key_dim + GROUP
    assert not rows_together and not fixed
    assert fits_values(rows, weight)
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
