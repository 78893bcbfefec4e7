# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `aerie.kernels.rope.rotate_heads`: a program rotates some heads of a block of rows, whose angles it
reads once. It is bound by the bytes of x."""

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _HEADS = 16, 8  # rows and heads per program


@triton.jit(do_not_specialize=["rows"])
def _rotate_heads(
    x_ptr,
    cos_ptr,
    sin_ptr,
    rows,
    row_step,
    head_step,
    angle_stride,
    heads,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate HEADS heads of ROWS rows in place, in half-split order. HALF: numbers of a half."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    half = tl.arange(0, HALF_PADDED)[None, :]
    inside = (row < rows) & (half < HALF)
    angle = row * angle_stride + half
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    first = tl.program_id(1) * HEADS
    for i in tl.static_range(HEADS):
        here = inside & (first + i < heads)
        x = x_ptr + row * row_step + (first + i) * head_step + half
        low = tl.load(x, mask=here, other=0.0).to(tl.float32)
        high = tl.load(x + HALF, mask=here, other=0.0).to(tl.float32)
        tl.store(x, low * cos - high * sin, mask=here)
        tl.store(x + HALF, high * cos + low * sin, mask=here)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Implement `aerie.kernels.rope.rotate_heads.rotate_heads`: rotate each head of x by the angles of its row, in
    place."""
    rows, heads, head_dim = x.shape
    half = head_dim // 2
    if rows:
        _rotate_heads[(triton.cdiv(rows, _ROWS), triton.cdiv(heads, _HEADS))](
            x,
            cos,
            sin,
            rows,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            heads,
            HALF=half,
            HALF_PADDED=triton.next_power_of_2(half),
            ROWS=_ROWS,
            HEADS=_HEADS,
            num_warps=4,
        )
