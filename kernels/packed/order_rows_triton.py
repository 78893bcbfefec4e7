# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Reorders rows for `blocks_triton`, which loads wgmma's operands with tensor maps."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.pdl import pdl_wait


@triton.jit
def _order_rows(
    x_ptr, out_ptr, row_stride, K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Move words of two inputs: index (r, u, t) of a half reads index (t, r, u)."""
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = word // 16 * 16 + word % 4 * 4 + word // 4 % 4
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + row * row_stride + place, mask=2 * place < K, other=0)
    tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + row * (COLUMNS // 2) + word, pairs, mask=2 * word < COLUMNS)


def order_rows(x: Tensor) -> Tensor:
    """Return rows in the order of operands, padded with zeros to whole chunks: [rows, K'].

    x: [rows, K] of 16 bits, last stride 1, rows at multiples of 16 bytes, K a multiple of 8.
    """
    rows, k = x.shape
    columns = triton.cdiv(k, 64) * 64
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = 1024
    _order_rows[(rows, triton.cdiv(columns // 2, block))](
        x, out, x.stride(0) // 2, K=k, COLUMNS=columns, BLOCK=block, num_warps=4, **pdl_wait(x.device)
    )
    return out
