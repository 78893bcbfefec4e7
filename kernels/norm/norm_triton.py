# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Row-wise kernels of `norm` and `activation`: one program per row.

With the few rows of a round, a kernel takes as long as its launch, 1 to 2 us in a graph; torch needs six launches for a
norm, and two for an activation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.norm.rms_norm_triton import inverse_rms, scaled_by
from aerie.kernels.pdl import pdl_wait


@triton.jit
def normed(x, weight, size, eps, DTYPE: tl.constexpr):
    """Return x / rms(x) * weight of a row x: `size` float32 numbers, then zeros. Rounded to DTYPE before a
    weight of DTYPE."""
    return scaled_by(x, inverse_rms(tl.sum(x * x, 0), size, eps), weight, DTYPE)


@triton.jit
def normed_row(x_ptr, residual_ptr, weight, row, column, size, eps, HAS_RESIDUAL: tl.constexpr):
    """Return the RMSNorm of a row of x, in float32. With a residual, add x to it first, in place."""
    inside = column < size
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        # rounded like the torch reference, for the same residual stream
        x = (x + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * size + column, x, mask=inside)
        x = x.to(tl.float32)
    return normed(x, weight, size, eps, x_ptr.dtype.element_ty)


@triton.jit
def _add_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    out = normed_row(x_ptr, residual_ptr, weight, row, column, size, eps, HAS_RESIDUAL)
    tl.store(out_ptr + row * size + column, out, mask=inside)


@triton.jit
def _gated_mul(gate_up_ptr, out_ptr, size, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    exponent = gate
    if GELU:  # 0.5 (1 + tanh z) = sigmoid(2 z)
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-exponent))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * size + column, activated * up, mask=inside)


def num_warps(block: int) -> int:
    """Return the warps of a program that holds a row of `block` numbers."""
    return max(1, min(16, block // 256))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`aerie.kernels.norm.norm.rms_norm`, for rows of up to 65,536."""
    x = x.contiguous()
    return _launch(x, x, weight, eps, has_residual=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`aerie.kernels.norm.norm.add_rms_norm`."""
    return _launch(x, residual, weight, eps, has_residual=True)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, has_residual: bool) -> Tensor:
    size, out = x.shape[-1], torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_norm[(x.numel() // size,)](
        x,
        residual,
        weight,
        out,
        size,
        eps,
        HAS_RESIDUAL=has_residual,
        BLOCK=block,
        num_warps=num_warps(block),
        **pdl_wait(x.device),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """`aerie.kernels.norm.activation.silu_mul`."""
    return _gated(gate_up, gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`aerie.kernels.norm.activation.gelu_mul`."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    _gated_mul[(rows, triton.cdiv(size, block))](
        gate_up, out, size, GELU=gelu, BLOCK=block, num_warps=4, **pdl_wait(out.device)
    )
    return out
