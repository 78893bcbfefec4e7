# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `aerie.kernels.collectives.sum_in_order`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.pdl import pdl_wait

_BLOCK = 2048


@triton.jit(do_not_specialize=["n"])
def _sum_in_order(
    parts_ptr, out_ptr, n, RANKS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    total = tl.load(parts_ptr + column, mask=inside, other=0.0).to(WIDE)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(parts_ptr + rank * n.to(tl.int64) + column, mask=inside, other=0.0).to(WIDE)
    tl.store(out_ptr + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_in_order(parts: Tensor) -> Tensor:
    """`aerie.kernels.collectives.sum_in_order.sum_in_order`."""
    ranks, n = parts.shape
    out = torch.empty(n, dtype=parts.dtype, device=parts.device)
    if n:
        wide = tl.float64 if parts.dtype == torch.float64 else tl.float32
        _sum_in_order[(triton.cdiv(n, _BLOCK),)](
            parts, out, n, RANKS=ranks, BLOCK=_BLOCK, WIDE=wide, num_warps=8, **pdl_wait(parts.device)
        )
    return out
