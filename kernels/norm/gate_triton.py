# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `aerie.kernels.norm.activation.sigmoid_mul`. A program computes one head of a row, or part of one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.pdl import pdl_wait

_BLOCK = 1024


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
    """`aerie.kernels.norm.activation.sigmoid_mul`."""
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
