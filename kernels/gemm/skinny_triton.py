# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""y = x W^T, or silu(x G^T) * (x U^T), for the few rows of a round, which are bound by reading W. Chosen by
`aerie.kernels.gemm.choice`.

Between two cuBLAS GEMMs memory is idle, because the next one starts to read only when the previous kernel has ended.
These programs start while earlier kernels run (`aerie.kernels.pdl`). With up to 16 rows, they load the first
columns of W to shared memory before they wait for x. Tensor maps need no registers, so a multiprocessor's whole shared
memory can be in flight.

W's tile [BLOCK_N, BLOCK_K] is the tensor core's first operand and fills its 64 rows; x^T of at least 16 rows is the
second. K is split until programs fill the device. The last program of a tile adds its splits in order, so equal inputs
give equal bits. A row's result depends on the other rows only through the splits of K and the order of columns that
the table chooses; `aerie.kernels.gemm.ordered_triton` uses the same ones for any number of rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.gemm.choice import TorchGEMM
from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.gemm.tiles import (
    MAX_ADAPTED_ROWS,
    SkinnyGemmTiles,
    fills_tile,
    gated_tiles,
    skinny_gemm_tiles,
    summing_programs,
    up_columns,
)
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.lora.few_rows_triton import (
    SLICES,
    add_down,
    await_down,
    four_indices,
    up_of_adapters,
    up_of_rows,
    with_up,
)
from aerie.kernels.lora.product import RowAdapters
from aerie.kernels.pdl import pdl_wait


@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm(
    x_desc,
    x_ptr,
    x_row_stride,
    w_desc,
    bias_ptr,
    out_ptr,
    part_ptr,
    ticket_ptr,
    down_ptr,
    up_ptr,
    index_ptr,
    inner_ptr,
    counter_ptr,
    rows,
    part_step,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    SPAN: tl.constexpr,
    AHEAD: tl.constexpr,
    LAST: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    SUMMING: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Multiply one tile of BLOCK_N outputs (GATED: of gate and up each) with up to BLOCK_M rows in one of SPLITS parts
    of K.

    part_ptr: sums of the splits, which the last program of a tile adds.
    part_step: stride of the splits in out_ptr.
    N: outputs, in a gated product half the rows of W.
    SPAN: columns of a program.
    APART: store each split's sums to out_ptr, with the bias in the first; blocks of rows have programs of their own.
    AHEAD: columns of W read before the wait, and multiplied last: 0 or BLOCK_K.
    LAST: columns multiplied last without being read ahead, for the same order of sums as with AHEAD.
    K: columns of x if x is read by pointers; 0 if it is read through a tensor map.
    UPCAST: multiply in float32, for the interpreter.

    Adapters, if RANK > 0 (`aerie.kernels.lora.few_rows_triton`): the first SUMMING programs compute A x of IN columns,
    RANKS ranks at a time; a tile adds B (A x), CHUNK ranks at a time. down_ptr, up_ptr: tables of A and B. index_ptr:
    row's index in them, negative without an adapter. PARTS: first outputs of the joined matrices, each with its own A.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    if RANK > 0:
        INNER: tl.constexpr = (len(PARTS) - 1) * RANK
        OUT: tl.constexpr = 2 * N if GATED else N
        TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
        if tile < SUMMING:
            if PDL:
                tl.extra.cuda.gdc_launch_dependents()
            add_down(
                tile,
                x_ptr,
                x_row_stride,
                down_ptr,
                index_ptr,
                inner_ptr,
                counter_ptr,
                rows,
                IN,
                INNER,
                RANKS,
                SUMMING,
                BLOCK_M,
                PDL,
                UPCAST,
            )
            return
        tile, split = (tile - SUMMING) % TILES, (tile - SUMMING) // TILES
    first, first_row = split * SPAN, 0
    if APART:
        first_row = tl.program_id(2) * BLOCK_M
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if AHEAD > 0:
        w_ahead = w_desc.load([tile * BLOCK_N, first])
    if RANK > 0:
        n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
        indices = tl.load(index_ptr + m, mask=m < rows, other=-1)
        up, up_of_up, first_index, second_index, third_index, fourth_index = None, None, None, None, None, None
        if CHUNK == 0:
            first_index, second_index, third_index, fourth_index = four_indices(indices, -1)
            up = up_of_adapters(up_ptr, first_index, second_index, third_index, fourth_index, n, 0, OUT, RANK, RANKS)
            if GATED:
                up_of_up = up_of_adapters(
                    up_ptr, first_index, second_index, third_index, fourth_index, N + n, 0, OUT, RANK, RANKS
                )
        elif RANK == CHUNK:
            up = up_of_rows(up_ptr, indices, n, 0, OUT, RANK, CHUNK)
            if GATED:
                up_of_up = up_of_rows(up_ptr, indices, N + n, 0, OUT, RANK, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GATED:
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if K > 0:
        row_of_x = first_row + tl.arange(0, BLOCK_M)
        x_rows = x_ptr + row_of_x.to(tl.int64)[:, None] * x_row_stride
    # tensor maps read zeros outside x and W
    for start in range(first + AHEAD, first + SPAN, BLOCK_K):
        if LAST > 0:  # the same order of columns as with AHEAD
            start = tl.where(start + LAST < first + SPAN, start + LAST, start + LAST - SPAN)
        weights = w_desc.load([tile * BLOCK_N, start])
        if K > 0:
            columns = start + tl.arange(0, BLOCK_K)
            there = (row_of_x < rows)[:, None] & (columns < K)[None, :]
            inputs = tl.load(x_rows + columns[None, :], mask=there, other=0.0)
        else:
            inputs = x_desc.load([first_row, start])
        if UPCAST:
            weights, inputs = weights.to(tl.float32), inputs.to(tl.float32)
        acc = tl.dot(weights, tl.trans(inputs), acc)
        if GATED:
            weights = w_desc.load([N + tile * BLOCK_N, start])
            acc_up = tl.dot(weights.to(tl.float32) if UPCAST else weights, tl.trans(inputs), acc_up)
    if AHEAD > 0:
        # multiplied last, so that the loop's reads start earlier
        inputs = x_desc.load([first_row, first])
        if UPCAST:
            w_ahead, inputs = w_ahead.to(tl.float32), inputs.to(tl.float32)
        acc = tl.dot(w_ahead, tl.trans(inputs), acc)
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), first_row + tl.arange(0, BLOCK_M)
    if APART:
        out_ptr += split.to(tl.int64) * part_step
    elif SPLITS > 1:
        part = part_ptr + tile * (SPLITS * BLOCK_N * BLOCK_M) + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(part + split * (BLOCK_N * BLOCK_M), acc)
        if not comes_last(ticket_ptr + tile, SPLITS):
            return
        acc = sum_of_splits(part, None, BLOCK_N * BLOCK_M, SPLITS)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if APART:
            bias = tl.where(split == 0, bias, 0.0)
        acc += bias[:, None]
    if RANK > 0:
        await_down(counter_ptr, SUMMING)
        column = 0
        if not GATED:
            for i in tl.static_range(1, len(PARTS) - 1):
                column += tl.where(tile * BLOCK_N >= PARTS[i], RANK, 0)
        acc = with_up(
            acc, up, up_ptr, inner_ptr, indices, first_index, second_index, third_index, fourth_index, n, column, rows,
            OUT, RANK, INNER, BLOCK_M, RANKS, CHUNK, UPCAST,
        )  # fmt: skip
        if GATED:
            acc_up = with_up(
                acc_up, up_of_up, up_ptr, inner_ptr, indices, first_index, second_index, third_index, fourth_index,
                N + n, RANK, rows, OUT, RANK, INNER, BLOCK_M, RANKS, CHUNK, UPCAST,
            )  # fmt: skip
    if GATED:
        # rounded like a product followed by `silu_mul`
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = (acc / (1.0 + tl.exp(-acc))).to(out_ptr.dtype.element_ty).to(tl.float32)
        acc *= acc_up.to(out_ptr.dtype.element_ty).to(tl.float32)
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < rows)[None, :])


NO_ADAPTERS: dict[str, Any] = dict.fromkeys(("down_ptr", "up_ptr", "index_ptr", "inner_ptr", "counter_ptr")) | {
    "IN": 0,
    "RANK": 0,
    "PARTS": (),
    "SUMMING": 0,
    "RANKS": 0,
    "CHUNK": 0,
}


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    workspace: Workspace,
    out: Tensor,
    tiles: SkinnyGemmTiles,
    gated: bool,
    adapters: RowAdapters | None = None,
) -> None:
    """Launch `_skinny_gemm` for x [rows, K] and W [N, K] (gated: gate rows, then up rows).

    out: [rows, N], or [splits, rows, N] float32 for sums that the caller adds.
    adapters: added to the result in the same launch.
    """
    (rows, n), k, apart = out.shape[-2:], weight.shape[1], out.dim() == 3
    assert (apart or rows <= tiles.block_m) and x.shape == (rows, k)
    assert weight.is_contiguous() and x.dtype == weight.dtype
    assert out.dtype in (x.dtype, torch.float32) and (out[0] if apart else out).is_contiguous()
    assert not apart or (out.shape[0] == tiles.splits and not gated)
    if rows == 0:
        return  # no prompt ends in this step, and tensor maps cannot be empty
    inputs = TensorDescriptor.from_tensor(x, [tiles.block_m, tiles.block_k])
    weights = TensorDescriptor.from_tensor(weight, [tiles.block_n, tiles.block_k])
    grid, lora = (triton.cdiv(n, tiles.block_n), tiles.splits, triton.cdiv(rows, tiles.block_m)), NO_ADAPTERS
    if adapters is not None:
        lora = _adapter_arguments(x, adapters, tiles, grid[0] * grid[1])
        grid = (lora["SUMMING"] + grid[0] * grid[1], 1, 1)
    _skinny_gemm[grid](
        inputs,
        x,
        x.stride(0),
        weights,
        bias,
        out,
        workspace.part,
        workspace.tickets,
        rows=rows,
        part_step=out.stride(0) if apart else 0,
        N=n,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SPLITS=tiles.splits,
        APART=apart,
        SPAN=tiles.span(k),
        AHEAD=tiles.columns_ahead,
        LAST=tiles.last,
        K=0 if tiles.maps_x else k,
        GATED=gated,
        HAS_BIAS=bias is not None,
        UPCAST=INTERPRETED,
        **lora,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_wait(x.device),
    )


def _adapter_arguments(x: Tensor, adapters: RowAdapters, tiles: SkinnyGemmTiles, programs: int) -> dict[str, Any]:
    """Return the kernel's arguments for adapters. Only the tiles follow the number of rows. programs: of the product
    alone."""
    tables, inner = adapters.tables, adapters.tables.down.shape[1]
    assert tables.down.shape[2] == x.shape[1] and tables.down.is_contiguous() and tables.up.is_contiguous()
    assert x.dtype == tables.down.dtype == tables.up.dtype and adapters.lora_indices.shape == (x.shape[0],)
    return {
        "down_ptr": tables.down,
        "up_ptr": tables.up,
        "index_ptr": adapters.lora_indices,
        "inner_ptr": torch.empty(SLICES.value * x.shape[0] * inner, dtype=torch.float32, device=x.device),
        "counter_ptr": adapters.counter,
        "IN": x.shape[1],
        "RANK": tables.max_rank,
        "PARTS": tables.parts,
        "SUMMING": summing_programs(programs, tables.max_loras),
        "RANKS": next(size for size in (64, 32, 16) if tables.max_rank % size == 0),
        "CHUNK": up_columns(tiles, tables.max_rank, tables.max_loras),
    }


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    workspace: Workspace,
    tiles: SkinnyGemmTiles,
    out: Tensor | None = None,
) -> Tensor:
    """Return x W^T + b: [rows, N] in x's dtype.

    x: [rows, K] of a 16-bit dtype, last stride 1; rows are aligned to 16 bytes.
    weight: [N, K], contiguous, same dtype.
    workspace: workspace that is large enough for this shape.
    tiles: from `skinny_gemm_tiles` for this shape and at least as many rows.
    out: contiguous memory for the result, may be float32. Or [splits, rows, N] for partial sums of any number of rows;
        the first includes the bias.

    Reference: `torch.nn.functional.linear`.
    """
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _multiply(x, weight, bias, workspace, out, tiles, gated=False)
    return out


def skinny_gemm_gated(x: Tensor, weight: Tensor, workspace: Workspace, tiles: SkinnyGemmTiles) -> Tensor:
    """Return silu(x G^T) * (x U^T): [rows, N], for x as in `skinny_gemm` and W [2 N, K], G above U.

    tiles: from `gated_tiles`.

    Reference: `aerie.kernels.norm.norm.silu_mul` of `torch.nn.functional.linear`.
    """
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _multiply(x, weight, None, workspace, out, tiles, gated=True)
    return out


@dataclass(frozen=True)
class SkinnyGEMM(TorchGEMM):
    """The small-batch GEMM; torch multiplies rows for which the table has no tiles, or that would leave much of a tile
    empty."""

    workspace: Workspace

    @classmethod
    def of(cls, weight: Tensor, options: GEMMOptions) -> "SkinnyGEMM":
        """Implement `aerie.kernels.gemm.choice.choose_gemm`: return the GEMM of a final weight [out, in]."""
        assert options.workspace is not None, "served"
        return cls(weight, options.workspace)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        tiles = skinny_gemm_tiles(x.shape[0], *self.weight.shape)
        if tiles is None or not fills_tile(x.shape[0]):
            return super().multiply(x, bias, out)
        return skinny_gemm(x, self.weight, bias, self.workspace, tiles, out)

    def multiply_adapted(
        self, x: Tensor, bias: Tensor | None, out: Tensor | None, adapters: RowAdapters, gated: bool
    ) -> Tensor | None:
        rows, (n, k), parts = x.shape[0], self.weight.shape, adapters.tables.parts
        tiles = (gated_tiles if gated else skinny_gemm_tiles)(rows, n, k)
        if tiles is None or not fills_tile(rows) or rows > MAX_ADAPTED_ROWS:
            return None
        if any(border % tiles.block_n for border in parts[:-1]) or (gated and parts != (0, n // 2, n)):
            return None
        if out is None:
            out = torch.empty((rows, n // 2 if gated else n), dtype=x.dtype, device=x.device)
        _multiply(x, self.weight, bias, self.workspace, out, tiles, gated, adapters)
        return out

    def multiply_gated(self, x: Tensor) -> Tensor:
        tiles = gated_tiles(x.shape[0], *self.weight.shape)
        if tiles is None or not fills_tile(x.shape[0]):
            return super().multiply_gated(x)
        return skinny_gemm_gated(x, self.weight, self.workspace, tiles)
