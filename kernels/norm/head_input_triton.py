# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `head_input`: one launch instead of four."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.norm.norm_triton import normed, num_warps
from aerie.kernels.pdl import pdl_wait


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
    """`aerie.kernels.norm.head_input.head_input`."""
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
