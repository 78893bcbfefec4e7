# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""y = x W^T for up to 8 rows and an FP8 weight W that fits in the shared memory of all multiprocessors. W is loaded
before the wait of the early launch (`aerie.kernels.pdl`).

`fp8_gemm` reads most of W after its wait, although memory is idle during the short kernels before it; for one row and a
W of 15 MB it takes twice as long as reading W. Here only x is read after the wait: QKV of one row takes 2.8 us instead
of 7.6. With `latent_values`, which also reads ahead, a layer of a DeepSeek-V3 rank takes 56.0 us instead of 68.2 for
one row, and 129 instead of 142 for eight (H200, `e35b429`).

Loads before the wait complete one after another, so they are few and large. Scales per 128 columns need one sum per
group. The tensor core multiplies at least 16 operand columns, of which one row would use only one. So x gets one
operand column per row and group, with zeros outside that group, and one product returns the sums of many groups.
Zeros leave the tensor core's sum bitwise unchanged, so a group's sum is that of `fp8_gemm`. Results equal those of
`fp8_gemm` up to the order of groups; IN_ORDER also adds the groups as it does.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.fp8.rows import GROUP, Fp8Rows
from aerie.kernels.fp8.tiles import SCALE_ROWS, Fp8AheadTiles, Fp8Matrix, Fp8SumOrder
from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.pdl import pdl_wait


@triton.jit
def _add_group(acc, part, x_scale_ptrs, w_scale_ptr, live, AT: tl.constexpr):
    """Add column AT of part [BLOCK_N, groups, ROWS], scaled, to acc [BLOCK_N, ROWS]."""
    is_own = (tl.arange(0, part.shape[1]) == AT)[None, :, None]
    x_scale = tl.load(x_scale_ptrs, mask=live, other=0.0)
    return acc + tl.sum(tl.where(is_own, part, 0.0), 1) * (tl.load(w_scale_ptr) * x_scale)[None, :]


@triton.jit(do_not_specialize=["rows"])
def _fp8_gemm_ahead(
    w_desc,
    x_ptr,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    LAST: tl.constexpr,
    IN_ORDER: tl.constexpr,
    APART: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one tile of BLOCK_N outputs in one of SPLITS parts of K.

    part_ptr: sums of the splits, which the last program of a tile adds.
    N: outputs.
    GROUPS: groups of SIZE columns in K.
    ROWS: `rows`, padded to a power of two.
    SIZE: columns that share a scale.
    SPAN: groups of a program.
    TOGETHER: groups per load and per product.
    IN_ORDER: add a program's groups one after another, the first LAST groups last.
    APART: store each split's sums to out_ptr, [SPLITS, rows, N]; else their total.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    first = split * SPAN
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w_ahead = ()
    for start in tl.static_range(0, SPAN, TOGETHER):
        w_ahead = w_ahead + (w_desc.load([tile * BLOCK_N, (first + start) * SIZE]),)
    column, k = tl.arange(0, TOGETHER * ROWS), tl.arange(0, TOGETHER * SIZE)
    group_offset, row = column // ROWS, column % ROWS
    live = row < rows
    own = (k // SIZE)[None, :] == group_offset[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    parts = ()
    acc = tl.zeros([BLOCK_N, TOGETHER * ROWS], tl.float32)
    for start in tl.static_range(0, SPAN, TOGETHER):
        group = first + start
        x = x_ptr + row.to(tl.int64)[:, None] * (GROUPS * SIZE) + group * SIZE + k[None, :]
        inputs = tl.load(x, mask=own & live[:, None], other=0.0)
        part = tl.dot(w_ahead[start // TOGETHER], tl.trans(inputs))
        if IN_ORDER:
            parts = parts + (tl.reshape(part, [BLOCK_N, TOGETHER, ROWS]),)
        else:
            scale = tl.load(x_scales_ptr + row * GROUPS + group + group_offset, mask=live, other=0.0)
            scale *= tl.load(w_scales_ptr + tile * GROUPS + group + group_offset)
            acc += part * scale[None, :]
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    if IN_ORDER:
        acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
        x_scales, w_scales = x_scales_ptr + m * GROUPS + first, w_scales_ptr + tile * GROUPS + first
        for at in tl.static_range(LAST, SPAN):
            acc = _add_group(acc, parts[at // TOGETHER], x_scales + at, w_scales + at, m < rows, at % TOGETHER)
        for at in tl.static_range(LAST):
            acc = _add_group(acc, parts[at // TOGETHER], x_scales + at, w_scales + at, m < rows, at % TOGETHER)
    else:
        acc = tl.sum(tl.reshape(acc, [BLOCK_N, TOGETHER, ROWS]), 1)
    there = (m < rows)[None, :]
    if APART:
        out_ptr += split.to(tl.int64) * rows * N
    elif SPLITS > 1:
        # outputs of a row are adjacent; rows from `rows` on are neither written nor read
        cells = part_ptr + tile * (SPLITS * BLOCK_N * ROWS) + tl.arange(0, BLOCK_N)[:, None] + m[None, :] * BLOCK_N
        tl.store(cells + split * (BLOCK_N * ROWS), acc, mask=there)
        if not comes_last(ticket_ptr + tile, SPLITS):
            return
        acc = sum_of_splits(cells, there, BLOCK_N * ROWS, SPLITS)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & there)


def fp8_gemm_ahead(
    x: Fp8Rows,
    weight: Fp8Matrix,
    bias: Tensor | None,
    workspace: Workspace,
    tiles: Fp8AheadTiles,
    out: Tensor,
    order: Fp8SumOrder | None = None,
) -> None:
    """Write x W^T + b to `out`, or the partial sums of each split.

    x: from `quantize_rows`, with scales per group.
    tiles: from `fp8_ahead_tiles` for at least as many rows.
    workspace: at least `fp8_workspace_size` for this shape.
    out: [rows, N] of 16 or 32 bits, contiguous; or float32 [splits, rows, N] without bias.
    order: fixed order of additions, with the tiles' splits; None: any order.

    Reference: `torch.nn.functional.linear` of the dequantised operands.
    """
    (rows, n), k, apart = out.shape[-2:], weight.values.shape[1], out.dim() == 3
    assert order is None or order.splits == tiles.splits
    assert not apart or (out.shape[0] == tiles.splits and bias is None)
    assert weight.by_group and rows <= tiles.rows and weight.values.shape[0] == n and out.is_contiguous()
    assert x.values.shape == (rows, k) and x.values.is_contiguous() and x.scales.is_contiguous()
    if rows == 0:
        return
    _fp8_gemm_ahead[(triton.cdiv(n, SCALE_ROWS), tiles.splits)](
        TensorDescriptor.from_tensor(weight.values, [SCALE_ROWS, tiles.together * GROUP]),
        x.values,
        x.scales,
        weight.scales,
        bias,
        out,
        workspace.part,
        workspace.tickets,
        rows,
        N=n,
        GROUPS=k // GROUP,
        SIZE=GROUP,
        ROWS=tiles.rows,
        TOGETHER=tiles.together,
        BLOCK_N=SCALE_ROWS,
        SPLITS=tiles.splits,
        SPAN=tiles.span(k),
        LAST=0 if order is None else order.last,
        IN_ORDER=order is not None,
        APART=apart,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=1,
        **pdl_wait(out.device),
    )
