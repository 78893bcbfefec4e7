# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""y = x W^T, or silu(x G^T) * (x U^T), for FP8 rows and an FP8 weight W. Called by `product_triton`.

Like `skinny_gemm`: W's tile is the tensor core's first operand, tensor maps load tiles, and the last program of a tile
adds its splits in order. The sum of every 128 columns is scaled and added in float32: W has a scale per 128 columns,
and the tensor core adds FP8 products with less precision (arXiv 2412.19437, section 3.3.2).

A separate launch to quantise rows would take as long as a norm. So the operation that computes rows also quantises them
(`norm`, `aerie.kernels.latent`, a gated product). For one row, each program of this kernel quantises the columns
that it reads; several programs write the same bits.

A row's result depends on the other rows only through the splits of K and the order of groups that the table chooses;
`fp8_ordered_tiles` has the same ones for any number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.fp8.rows import GROUP, Fp8Rows
from aerie.kernels.fp8.rows_triton import round_columns, scale_of
from aerie.kernels.fp8.tiles import Fp8GemmTiles, Fp8Matrix, rounding_columns
from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.stored_values_triton import to_fp8
from aerie.kernels.pdl import pdl_wait


@triton.jit
def _used_here(x, INTERPRETED: tl.constexpr):
    """Return FP8 x, which was loaded earlier, and keep it in registers until here. Otherwise the compiler would move it
    to shared memory right after the load, and wait for it there."""
    if not INTERPRETED:
        bits = x.to(tl.int8, bitcast=True)
        bits = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], tl.int8, False, 4)
        x = bits.to(tl.float8e4nv, bitcast=True)
    return x


@triton.jit(do_not_specialize=["rows"])
def _fp8_gemm(
    x_desc,
    w_desc,
    x_ptr,
    values_ptr,
    w_ptr,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    out_ptr,
    out_scales_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    x_stride,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    AHEAD: tl.constexpr,
    LAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    BY_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESULT: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Multiply one tile of BLOCK_N outputs (GATED: of gate and up each) with all rows in one of SPLITS parts of K.

    x_ptr: [1, K] in 16 bits, which each program quantises to values_ptr and x_scales_ptr; used if COLUMNS > 0.
    out_scales_ptr: with FP8 outputs, one scale per row and 128 outputs; else None.
    part_ptr: sums of the splits, which the last program of a tile adds.
    N: outputs, in a gated product half the rows of W.
    GROUPS: groups of 128 columns in K.
    SPAN: groups of a program.
    AHEAD: groups of W read before the wait, and multiplied last.
    LAST: groups multiplied last without being read ahead, for the same order of sums as with AHEAD.
    COLUMNS: columns that a program quantises at a time; 0 if rows are in FP8.
    BY_GROUP: scales per group; else per row and per output.
    RESULT: dtype of results; FP8 outputs are computed from results rounded to it.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    first = split * SPAN
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    k = tl.arange(0, 128)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w_ahead = ()
    up_ahead = ()
    for group in tl.static_range(AHEAD):
        w_rows = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * (GROUPS * 128)
        w_tile = w_rows + ((first + group) * 128 + k)[None, :]
        w_ahead = w_ahead + (tl.load(w_tile),)
        if GATED:
            up_ahead = up_ahead + (tl.load(w_tile + N * (GROUPS * 128)),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if COLUMNS > 0:
        round_columns(
            x_ptr,
            values_ptr,
            x_scales_ptr,
            rows,
            x_stride,
            first,
            GROUPS,
            SPAN,
            COLUMNS,
            PDL,
            INTERPRETED,
        )
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GATED:
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_scales = x_scales_ptr + m * GROUPS + first
    w_scales = w_scales_ptr + tl.minimum(n, N - 1) // 64 * GROUPS + first
    up_scales = w_scales_ptr + (N + tl.minimum(n, N - 1)) // 64 * GROUPS + first
    # in flight while the loop's first tiles load; multiplied last
    x_ahead = ()
    for group in tl.static_range(AHEAD):
        x_tile = values_ptr + m.to(tl.int64)[:, None] * (GROUPS * 128) + (first + group) * 128 + k[None, :]
        x_ahead = x_ahead + (tl.load(x_tile, mask=(m < rows)[:, None]),)
    if BY_GROUP:
        # read one step ahead
        x_scale = tl.load(x_scales + AHEAD + LAST, mask=m < rows, other=0.0)
        w_scale = tl.load(w_scales + AHEAD + LAST)
        if GATED:
            up_scale = tl.load(up_scales + AHEAD + LAST)
    for step in range(AHEAD, SPAN):
        current, following = step, step + 1
        if LAST > 0:  # the same order of groups as with AHEAD
            current = tl.where(step + LAST < SPAN, step + LAST, step + LAST - SPAN)
            following = tl.where(current + 1 < SPAN, current + 1, 0)
        weights = w_desc.load([tile * BLOCK_N, (first + current) * 128])
        inputs = x_desc.load([0, (first + current) * 128])
        if GATED:
            weights_up = w_desc.load([N + tile * BLOCK_N, (first + current) * 128])
        part = tl.dot(weights, tl.trans(inputs))
        if GATED:
            part_up = tl.dot(weights_up, tl.trans(inputs))
        if BY_GROUP:
            more = step + 1 < SPAN
            next_x_scale = tl.load(x_scales + following, mask=(m < rows) & more, other=0.0)
            next_w_scale = tl.load(w_scales + following, mask=more, other=0.0)
            acc += part * (w_scale[:, None] * x_scale[None, :])
            if GATED:
                acc_up += part_up * (up_scale[:, None] * x_scale[None, :])
                up_scale = tl.load(up_scales + following, mask=more, other=0.0)
            x_scale, w_scale = next_x_scale, next_w_scale
        else:
            acc += part
            if GATED:
                acc_up += part_up
    for group in tl.static_range(AHEAD):
        inputs = tl.trans(_used_here(x_ahead[group], INTERPRETED))
        part = tl.dot(_used_here(w_ahead[group], INTERPRETED), inputs)
        if GATED:
            part_up = tl.dot(_used_here(up_ahead[group], INTERPRETED), inputs)
        if BY_GROUP:
            x_scale = tl.load(x_scales + group, mask=m < rows, other=0.0)
            acc += part * (tl.load(w_scales + group)[:, None] * x_scale[None, :])
            if GATED:
                acc_up += part_up * (tl.load(up_scales + group)[:, None] * x_scale[None, :])
        else:
            acc += part
            if GATED:
                acc_up += part_up
    if SPLITS > 1:
        # outputs of a row are adjacent; rows from `rows` on are neither written nor read
        there = (m < rows)[None, :]
        cells = part_ptr + tile * (SPLITS * BLOCK_N * BLOCK_M) + tl.arange(0, BLOCK_N)[:, None] + m[None, :] * BLOCK_N
        tl.store(cells + split * (BLOCK_N * BLOCK_M), acc, mask=there)
        if not comes_last(ticket_ptr + tile, SPLITS):
            return
        acc = sum_of_splits(cells, there, BLOCK_N * BLOCK_M, SPLITS)
    if not BY_GROUP:
        x_scale = tl.load(x_scales_ptr + m, mask=m < rows, other=0.0)
        acc *= tl.load(w_scales_ptr + n, mask=n < N, other=0.0)[:, None] * x_scale[None, :]
        if GATED:
            acc_up *= tl.load(w_scales_ptr + N + n, mask=n < N, other=0.0)[:, None] * x_scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        # rounded like a product followed by `silu_mul`
        acc = acc.to(RESULT).to(tl.float32)
        acc = (acc / (1.0 + tl.exp(-acc))).to(RESULT).to(tl.float32)
        acc *= acc_up.to(RESULT).to(tl.float32)
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    live = (n < N)[:, None] & (m < rows)[None, :]
    if out_scales_ptr is not None:
        # a program's 128 outputs share a scale
        tl.static_assert(BLOCK_N == 128)
        acc = acc.to(RESULT).to(tl.float32)
        scale = scale_of(acc, 0)
        tl.store(out_scales_ptr + m * (N // 128) + tile, scale, mask=m < rows)
        tl.store(out, to_fp8(acc / scale[None, :], INTERPRETED), mask=live)
    else:
        tl.store(out, acc.to(RESULT), mask=live)


TL_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def fp8_gemm(
    x: Fp8Rows | Tensor,
    weight: Fp8Matrix,
    bias: Tensor | None,
    workspace: Workspace,
    tiles: Fp8GemmTiles,
    out: Tensor | Fp8Rows,
    gated: bool = False,
    result: torch.dtype | None = None,
) -> None:
    """Write x W^T + b to `out`; gated: silu(x G^T) * (x U^T), where W [2 N, K] is G above U.

    x: from `quantize_rows`, with scales per group if W has them, else per row. Or one row, not quantised, if
        `rounding_columns` is not 0.
    tiles: from `fp8_gemm_tiles` or `fp8_gated_tiles`, for at least as many rows.
    workspace: at least `fp8_workspace_size` for this shape.
    out: [rows, N] of 16 or 32 bits, contiguous. Or `Fp8Rows.empty` with scales per group, if the tiles are `for_fp8`.
    result: dtype to which the product is rounded, before FP8; None: out's.

    Reference: `torch.nn.functional.linear` of the dequantised operands.
    """
    values = out if isinstance(out, Tensor) else out.values
    (rows, n), k = values.shape, weight.values.shape[1]
    assert rows <= tiles.block_m and values.is_contiguous()
    assert weight.values.shape[0] == (2 * n if gated else n)
    if rows == 0:
        return
    raw, columns = None, 0
    if isinstance(x, Tensor):
        raw, x, columns = x, Fp8Rows.empty(rows, k, True, False, x.device), rounding_columns(weight, tiles)
        assert columns > 0 and raw.shape == (1, k) and raw.stride(1) == 1
    assert x.values.shape == (rows, k) and x.values.is_contiguous() and x.scales.is_contiguous()
    assert weight.by_group == (x.scales.shape[1] == k // GROUP) or k == GROUP
    out_scales = None if isinstance(out, Tensor) else out.scales
    assert out_scales is None or (gated and out_scales.is_contiguous() and out_scales.shape == (rows, n // GROUP))
    _fp8_gemm[(triton.cdiv(n, tiles.block_n), tiles.splits)](
        TensorDescriptor.from_tensor(x.values, [tiles.block_m, GROUP]),
        TensorDescriptor.from_tensor(weight.values, [tiles.block_n, GROUP]),
        *(raw, x.values, weight.values, x.scales, weight.scales),
        *(bias, values, out_scales, workspace.part, workspace.tickets),
        rows,
        0 if raw is None else raw.stride(0),
        N=n,
        GROUPS=k // GROUP,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SPLITS=tiles.splits,
        SPAN=tiles.span(k),
        AHEAD=tiles.ahead,
        LAST=tiles.last,
        COLUMNS=columns,
        GATED=gated,
        BY_GROUP=weight.by_group,
        HAS_BIAS=bias is not None,
        RESULT=TL_TYPES[result or values.dtype],
        INTERPRETED=INTERPRETED,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_wait(x.values.device),
    )
