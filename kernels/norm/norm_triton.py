# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `aerie.kernels.norm.norm`: norms and activations with one program per row, `sigmoid_mul` with one per head
of a row or part of one; and the formula of `aerie.kernels.norm.head_norms.rms_norm`, for other kernels that norm rows
or heads. With the few rows of a round, a kernel takes as long as its launch, 1 to 2 us in a graph; torch needs six
launches for a norm, and two for an activation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.pdl import pdl_wait


@triton.jit
def inverse_rms(squares, size, eps):
    """Return 1 / rms of rows of `size` numbers, from the sums of their squares."""
    return tl.rsqrt(squares / size + eps)


@triton.jit
def scaled_by(x, inverse, weight, DTYPE: tl.constexpr):
    """Return x * inverse * weight in float32. Rounded to DTYPE before a weight of DTYPE."""
    scaled = x * inverse
    if weight.dtype != tl.float32:
        scaled = scaled.to(DTYPE).to(tl.float32)
    return scaled * weight.to(tl.float32)


@triton.jit
def normed(x, weight, size, eps, DTYPE: tl.constexpr):
    """Return x / rms(x) * weight of a row x: `size` float32 numbers, then zeros. Rounded to DTYPE before a
    weight of DTYPE."""
    return scaled_by(x, inverse_rms(tl.sum(x * x, 0), size, eps), weight, DTYPE)


@triton.jit
def normed_row(x_ptr, residual_ptr, weight, row, column, size, eps, HAS_RESIDUAL: tl.constexpr):
    """Return the RMSNorm of row `row` of x_ptr [rows, size], in float32, at columns `column`. With HAS_RESIDUAL, add
    the row to residual_ptr first, in place.

    weight: the norm's weights at these columns, eps: its epsilon.
    """
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
    """Norm one row to out_ptr [rows, size]. With HAS_RESIDUAL x_ptr is added to residual_ptr first, in place.

    weight_ptr, eps: [size] weights and epsilon of the norm. BLOCK: size, padded.
    """
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
    """Write BLOCK columns of act(gate) * up to out_ptr [rows, size], of gate_up_ptr [rows, 2 * size]. GELU: act is
    GELU; else SiLU."""
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
    """Implement `aerie.kernels.norm.norm.rms_norm`: return x / rms(x) * weight over the last dimension, of up to
    65,536."""
    x = x.contiguous()
    return _launch(x, x, weight, eps, has_residual=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `aerie.kernels.norm.norm.add_rms_norm`: return the RMSNorm of x + residual, and write the sum to
    residual."""
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
    """Implement `aerie.kernels.norm.norm.silu_mul`: return silu(gate) * up of gate_up [rows, 2 * size]."""
    return _gated(gate_up, gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Implement `aerie.kernels.norm.norm.gelu_mul`: return gelu(gate) * up of gate_up [rows, 2 * size]."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    _gated_mul[(rows, triton.cdiv(size, block))](
        gate_up, out, size, GELU=gelu, BLOCK=block, num_warps=4, **pdl_wait(out.device)
    )
    return out


@triton.jit
def _head_input(
    id_ptr,
    table_ptr,
    hidden_ptr,
    table_weight_ptr,
    hidden_weight_ptr,
    out_ptr,
    size,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the norm of a token's embedding, or (second) of its hidden state.

    id_ptr: [rows] int64 tokens.
    table_ptr: [vocabulary, size] embeddings.
    hidden_ptr: [rows, size].
    table_weight_ptr, hidden_weight_ptr: [size] weights of the two norms.
    out_ptr: [rows, 2, size], written.
    BLOCK: size, padded.
    """
    row, second = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight_ptr = table_weight_ptr if second == 0 else hidden_weight_ptr
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if PDL:
        # only constants are read before the wait: see `aerie.kernels.pdl`

        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = table_ptr + tl.load(id_ptr + row) * size
    if second == 1:
        source = hidden_ptr + row * size
    x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    out = normed(x, weight, size, eps, out_ptr.dtype.element_ty)
    tl.store(out_ptr + (2 * row + second) * size + column, out, mask=inside)


def head_input(
    ids: Tensor, table: Tensor, hidden: Tensor, table_weight: Tensor, hidden_weight: Tensor, eps: float
) -> Tensor:
    """Implement `aerie.kernels.norm.norm.head_input`: return RMSNorm(table[ids]) and RMSNorm(hidden), concatenated."""
    rows, size = hidden.shape
    out = torch.empty((rows, 2 * size), dtype=hidden.dtype, device=hidden.device)
    block = triton.next_power_of_2(size)
    _head_input[(rows, 2)](
        ids,
        table,
        hidden,
        table_weight,
        hidden_weight,
        out,
        size,
        eps,
        BLOCK=block,
        num_warps=num_warps(block),
        **pdl_wait(hidden.device),
    )
    return out


_BLOCK = 1024  # maximum numbers of a head per program of `sigmoid_mul`


@triton.jit
def _sigmoid_mul(
    x_ptr,
    gate_ptr,
    added_ptr,
    out_ptr,
    heads,
    size,
    gate_row_stride,
    gate_head_stride,
    GATE_STEP: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write sigmoid(gate) * x, plus `added` with HAS_ADDED.

    x_ptr, added_ptr, out_ptr: [rows, heads, size], contiguous.
    gate_ptr: [rows, heads, size], or one number per head.
    GATE_STEP: 1 for a gate per number, 0 for one per head.
    BLOCK: numbers of a head per program.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = gate_ptr + (pair // heads) * gate_row_stride + (pair % heads) * gate_head_stride
    logit = tl.load(gate + column * GATE_STEP, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    factor = (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)
    x = tl.load(x_ptr + pair * size + column, mask=inside, other=0.0).to(tl.float32)
    gated = (x * factor).to(dtype)
    if HAS_ADDED:
        gated = gated.to(tl.float32) + tl.load(added_ptr + pair * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + pair * size + column, gated, mask=inside)


def sigmoid_mul(x: Tensor, gate: Tensor, added: Tensor | None = None) -> Tensor:
    """Implement `aerie.kernels.norm.norm.sigmoid_mul`: return x * sigmoid(gate) + added."""
    rows, heads, size = x.shape
    out, block = torch.empty_like(x), min(_BLOCK, triton.next_power_of_2(size))
    if rows:
        _sigmoid_mul[(rows * heads, triton.cdiv(size, block))](
            x,
            gate,
            x if added is None else added,
            out,
            heads,
            size,
            gate.stride(0),
            gate.stride(1),
            GATE_STEP=int(gate.shape[2] > 1),
            HAS_ADDED=added is not None,
            BLOCK=block,
            num_warps=max(1, min(4, block // 256)),
            **pdl_wait(x.device),
        )
    return out
