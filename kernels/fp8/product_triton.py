# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton implementation of `aerie.kernels.fp8.product`: chooses kernels by the number of rows and the kind of
scales, and has the kernel for more than 64 rows (prompts), `fp8_gemm_wide`.

That kernel is limited by tensor cores. Rows are their first operand, so a tile of W serves 64 or 128 rows and a thread
holds the scales of few rows. 2112 x 7168 with 256 rows takes 15.7 us (H200, `307542c2`). See `gemm_triton` for the
scaling of sums."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.fp8.gemm_ahead_triton import fp8_gemm_ahead
from aerie.kernels.fp8.gemm_triton import fp8_gemm
from aerie.kernels.fp8.product import Fp8Product
from aerie.kernels.fp8.rows import GROUP, Fp8Inputs, Fp8Rows
from aerie.kernels.fp8.rows_triton import quantize_rows
from aerie.kernels.fp8.tiles import (
    MAX_ROWS,
    MIN_WIDE_ROWS,
    Fp8AheadTiles,
    Fp8Matrix,
    Fp8SumOrder,
    Fp8WideTiles,
    fp8_ahead_tiles,
    fp8_gated_tiles,
    fp8_gemm_tiles,
    fp8_ordered_ahead_tiles,
    fp8_ordered_gated_tiles,
    fp8_ordered_tiles,
    fp8_ordered_wide_tiles,
    fp8_sum_order,
    fp8_wide_tiles,
    rounding_columns,
)
from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.norm.norm import silu_mul
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
    """Return the sums [BLOCK_M, BLOCK_N] of SPAN groups of columns from `first_group` on.

    x_scales: addresses of the rows' scales of group 0; group_step: from group to group.
    upper, lower: addresses of the scales, by group, of the first 64 outputs and of the others.
    there: whether the rows exist.
    LAST: number of first groups that are multiplied last.
    """
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
    """Multiply one tile of BLOCK_M rows and BLOCK_N outputs in one of SPLITS parts of K.

    x_desc, w_desc: tensor maps of x [rows, K] and W [N, K], FP8.
    x_scales_ptr, w_scales_ptr: their scales; row_step, group_step: strides of x's scales.
    bias_ptr: [N], with HAS_BIAS. out_ptr: [rows, N], written.
    part_ptr, ticket_ptr: sums of the splits, which the last program of a tile adds, and counters of programs.
    GROUPS: groups of 128 columns in K.
    SLICES: parts of K that a program sums one after another, each from zero.
    LAST: groups at the start of a slice that are multiplied last.
    TOGETHER: blocks of rows whose programs are adjacent, so that they share tiles of W in L2.
    BY_GROUP: scales per group; else per row and per output.
    """
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


@dataclass(frozen=True)
class TritonFp8Product(Fp8Product):
    """The product of an FP8 weight in Triton, for any number of rows."""

    weight: Fp8Matrix
    workspace: Workspace
    deterministic: bool
    dtype: torch.dtype

    @cached_property
    def inputs(self) -> Fp8Inputs:
        return Fp8Inputs(self.weight.by_group, MAX_ROWS)

    @cached_property
    def _order(self) -> Fp8SumOrder | None:
        n, k = self.weight.values.shape
        return fp8_sum_order(n, k, self.weight.by_group) if self.deterministic else None

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        weight = self.weight
        values = x if isinstance(x, Tensor) else x.values
        rows, n = values.shape[0], weight.values.shape[0]
        if out is None:
            out = torch.empty((rows, n), dtype=self.dtype, device=values.device)
        is_wide = weight.by_group and rows >= MIN_WIDE_ROWS
        if self.deterministic:
            return self._multiply_in_order(x, bias, out, is_wide)
        tiles = None if is_wide else fp8_gemm_tiles(rows, *weight.values.shape)
        if tiles is not None:
            # for more rows, a separate launch is faster: 3.97 instead of 4.03 ms per round of four rows (Llama-3.1-8B)
            rounds = isinstance(x, Tensor) and rows == 1 and rounding_columns(weight, tiles) > 0
            ahead = None if rounds else self._ahead_tiles(rows)
            if ahead is not None:
                fp8_gemm_ahead(self._rounded(x), weight, bias, self.workspace, ahead, out)
            else:
                fp8_gemm(x if rounds else self._rounded(x), weight, bias, self.workspace, tiles, out)
            return out
        if weight.by_group or n % 16 or self.dtype != torch.bfloat16:
            wide = fp8_wide_tiles(rows, *weight.values.shape)
            return fp8_gemm_wide(self._rounded(x), weight, bias, self.workspace, wide, out)
        return _scaled_mm(self._rounded(x), weight, bias, out)

    def _multiply_in_order(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor, is_wide: bool) -> Tensor:
        """Multiply so that a row's bits do not depend on the number of rows."""
        weight, rows = self.weight, out.shape[0]
        (n, k), by_group = weight.values.shape, weight.by_group
        tiles = None if is_wide else fp8_ordered_tiles(rows, n, k, by_group)
        if tiles is None:
            wide = fp8_ordered_wide_tiles(rows, n, k, by_group)
            return fp8_gemm_wide(self._rounded(x), weight, bias, self.workspace, wide, out)
        rounds = isinstance(x, Tensor) and rows == 1 and rounding_columns(weight, tiles) > 0
        ahead = None if rounds else self._ahead_tiles(rows)
        if ahead is not None:
            fp8_gemm_ahead(self._rounded(x), weight, bias, self.workspace, ahead, out, self._order)
        else:
            fp8_gemm(x if rounds else self._rounded(x), weight, bias, self.workspace, tiles, out)
        return out

    def multiply_apart(self, x: Tensor | Fp8Rows) -> Tensor | None:
        """Return the sums of each split of K, if the tiles for these rows split it; see `Fp8Product.multiply_apart`."""
        values, rows = self.weight.values, (x if isinstance(x, Tensor) else x.values).shape[0]
        tiles = self._ahead_tiles(rows)
        if tiles is None or tiles.splits == 1:
            return None
        out = torch.empty((tiles.splits, rows, values.shape[0]), dtype=torch.float32, device=values.device)
        fp8_gemm_ahead(self._rounded(x), self.weight, None, self.workspace, tiles, out, self._order)
        return out

    def _ahead_tiles(self, rows: int) -> Fp8AheadTiles | None:
        """Return tiles of the kernel that reads all of W before the wait; None if W does not fit."""
        if not self.weight.by_group:
            return None
        choose = fp8_ordered_ahead_tiles if self.deterministic else fp8_ahead_tiles
        return choose(rows, *self.weight.values.shape)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        """Use a fused kernel with FP8 output if it fits, else one with 16-bit output, else two launches.

        wanted: the FP8 format that the next layer accepts; the fused kernel writes only scales per group.
        """
        (n, k), rows = self.weight.values.shape, (x if isinstance(x, Tensor) else x.values).shape[0]
        out: Tensor | Fp8Rows
        choose_tiles = fp8_gated_tiles
        if self.deterministic:
            choose_tiles = partial(fp8_ordered_gated_tiles, by_group=self.weight.by_group)
        can_write_fp8 = wanted is not None and wanted.by_group
        tiles = choose_tiles(rows, n, k, for_fp8=True) if can_write_fp8 else None
        if tiles is not None:
            out = Fp8Rows.empty(rows, n // 2, True, False, self.weight.values.device)
        else:
            tiles = choose_tiles(rows, n, k, for_fp8=False)
            out = torch.empty((rows, n // 2), dtype=self.dtype, device=self.weight.values.device)
        if tiles is not None:
            fp8_gemm(self._rounded(x), self.weight, None, self.workspace, tiles, out, gated=True, result=self.dtype)
            return out
        gate_up = self.multiply(x, None)
        if wanted is None:
            return silu_mul(gate_up)
        return quantize_rows(gate_up, wanted.by_group, rows_together=rows > wanted.many, gated=True)

    def _rounded(self, x: Tensor | Fp8Rows) -> Fp8Rows:
        if not isinstance(x, Tensor):
            return x
        return quantize_rows(x, self.inputs.by_group, rows_together=x.shape[0] > self.inputs.many)


def _scaled_mm(x: Fp8Rows, weight: Fp8Matrix, bias: Tensor | None, out: Tensor) -> Tensor:
    """Multiply with torch, with scales per row and per output and bfloat16 results."""
    torch._scaled_mm(
        x.values, weight.values.t(), scale_a=x.scales, scale_b=weight.scales.t(), out_dtype=out.dtype, out=out
    )
    return out if bias is None else out.add_(bias)
