# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""y = x W^T for more than 64 rows (prompts) and an FP8 weight W, limited by tensor cores. Rows are their first operand,
so a tile of W serves 64 or 128 rows and a thread holds the scales of few rows. 2112 x 7168 with 256 rows takes 15.7 us
(H200, `307542c2`). See `gemm_triton` for the scaling of sums."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.fp8.rows import GROUP, Fp8Rows
from aerie.kernels.fp8.tiles import Fp8Matrix, Fp8WideTiles
from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.pdl import pdl_wait

_TOGETHER = 8  # tiles of rows that run at the same time, to reuse W's tiles from L2


@triton.jit
def _slice_sum(
    x_desc,
    w_desc,
    x_scales,
    upper,
    lower,
    group_step,
    first_m,
    first_n,
    first_group,
    there,
    SPAN: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BY_GROUP: tl.constexpr,
):
    """Return the sums [BLOCK_M, BLOCK_N] of SPAN groups of columns from `first_group` on; LAST: of which so many first
    ones are multiplied last. x_scales, upper, lower: of group 0. there: rows of x."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    in_upper = tl.arange(0, BLOCK_N) < 64
    if BY_GROUP:
        x_scale = tl.load(x_scales + (first_group + LAST) * group_step, mask=there, other=0.0)
    for step in range(SPAN):
        group = first_group + step
        if LAST > 0:
            group = first_group + tl.where(step + LAST < SPAN, step + LAST, step + LAST - SPAN)
        inputs = x_desc.load([first_m, group * 128])
        weights = w_desc.load([first_n, group * 128])
        part = tl.dot(inputs, tl.trans(weights))
        if BY_GROUP:
            more = step + 1 < SPAN
            following = group + 1
            if LAST > 0:
                following = tl.where(following < first_group + SPAN, following, first_group)
            next_x_scale = tl.load(x_scales + following * group_step, mask=there & more, other=0.0)
            if BLOCK_N == 64:
                acc += part * (x_scale * tl.load(upper + group))[:, None]
            else:
                w_scale = tl.where(in_upper, tl.load(upper + group), tl.load(lower + group))
                acc += part * (x_scale[:, None] * w_scale[None, :])
            x_scale = next_x_scale
        else:
            acc += part
    return acc


@triton.jit(do_not_specialize=["rows"])
def _fp8_gemm_wide(
    x_desc,
    w_desc,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    row_step,
    group_step,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICES: tl.constexpr,
    LAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    BY_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    span: tl.constexpr = GROUPS // (SPLITS * SLICES)
    program, split = tl.program_id(0), tl.program_id(1)
    first_group = split * span
    band = program // (TOGETHER * tiles_n)
    inside = program - band * (TOGETHER * tiles_n)
    height = tl.minimum(tl.cdiv(rows, BLOCK_M) - band * TOGETHER, TOGETHER)
    first_m, first_n = (band * TOGETHER + inside % height) * BLOCK_M, inside // height * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # a tile of 128 outputs has two scales; a vector of them would need a register per column
    upper = w_scales_ptr + first_n // 64 * GROUPS
    lower = w_scales_ptr + tl.minimum(first_n + 64, N - 1) // 64 * GROUPS
    x_scales, there_m = x_scales_ptr + m * row_step, m < rows
    acc = _slice_sum(
        x_desc,
        w_desc,
        x_scales,
        upper,
        lower,
        group_step,
        first_m,
        first_n,
        first_group,
        there_m,
        span,
        LAST,
        BLOCK_M,
        BLOCK_N,
        BY_GROUP,
    )
    for later in range(1, SLICES):
        acc += _slice_sum(
            x_desc,
            w_desc,
            x_scales,
            upper,
            lower,
            group_step,
            first_m,
            first_n,
            later * span,
            there_m,
            span,
            LAST,
            BLOCK_M,
            BLOCK_N,
            BY_GROUP,
        )
    if SPLITS > 1:
        tile = first_m // BLOCK_M * tiles_n + first_n // BLOCK_N
        there = (m < rows)[:, None]
        cells = part_ptr + tile * (SPLITS * BLOCK_M * BLOCK_N)
        cells += tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(cells + split * (BLOCK_M * BLOCK_N), acc, mask=there)
        if not comes_last(ticket_ptr + tile, SPLITS):
            return
        acc = sum_of_splits(cells, there, BLOCK_M * BLOCK_N, SPLITS)
    if not BY_GROUP:
        x_scale = tl.load(x_scales, mask=m < rows, other=0.0)
        acc *= tl.load(w_scales_ptr + n, mask=n < N, other=0.0)[None, :] * x_scale[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


def fp8_gemm_wide(
    x: Fp8Rows, weight: Fp8Matrix, bias: Tensor | None, workspace: Workspace, tiles: Fp8WideTiles, out: Tensor
) -> Tensor:
    """Write x W^T + b to out [rows, N], contiguous. Scales of x may have any strides.

    tiles: from `fp8_wide_tiles`.
    workspace: at least `fp8_workspace_size`.

    Reference: `torch.nn.functional.linear` of the dequantised operands.
    """
    (rows, n), k = out.shape, weight.values.shape[1]
    assert x.values.shape == (rows, k) and weight.values.shape[0] == n and out.is_contiguous()
    if rows == 0:
        return out
    _fp8_gemm_wide[(tiles.count(rows, n), tiles.splits)](
        TensorDescriptor.from_tensor(x.values, [tiles.block_m, GROUP]),
        TensorDescriptor.from_tensor(weight.values, [tiles.block_n, GROUP]),
        x.scales,
        weight.scales,
        bias,
        out,
        workspace.part,
        workspace.tickets,
        rows,
        x.scales.stride(0),
        x.scales.stride(1),
        N=n,
        GROUPS=k // GROUP,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SPLITS=tiles.splits,
        SLICES=tiles.slices,
        LAST=tiles.last,
        TOGETHER=_TOGETHER,
        BY_GROUP=weight.by_group,
        HAS_BIAS=bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_wait(x.values.device),
    )
    return out
