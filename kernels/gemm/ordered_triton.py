# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""y = x W^T for any number of rows, with the same bits for a row whatever the number of rows: the GEMM of deterministic
engines. Chosen by `aerie.kernels.gemm.choice`.

A row's result depends on the slices of K, the order of columns in a slice, and the order in which slices are added.
These are fixed for each weight (`aerie.kernels.gemm.tiles.sum_order`). Rows and outputs of a tile may differ: the
tensor core computes an output from its own row and column, 16 inputs at a time.

Few rows use `skinny_gemm`, with a program per slice. Many rows use large tiles here: a program computes the slices one
after another, each from zero, and adds their sums in the same order. If tiles do not fill the device, slices have
programs of their own here, too. W's tile is the tensor core's first operand in both kernels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.gemm.choice import TorchGEMM
from aerie.kernels.gemm.skinny_triton import skinny_gemm, skinny_gemm_gated
from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.gemm.tiles import (
    OrderedTiles,
    gated_tiles,
    many_ordered_tiles,
    ordered_tiles,
    sum_order,
)
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.norm.norm import silu_mul
from aerie.kernels.pdl import pdl_wait

_TOGETHER = 8  # tiles of rows that run at the same time, to reuse W's tiles from L2


@triton.jit
def _slice_sum(
    x_desc,
    w_desc,
    first_m,
    first_n,
    first,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    LAST: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return the sums [BLOCK_N, BLOCK_M] of the slice of K that starts at column `first`.

    x_desc, w_desc: tensor maps of x [rows, K] and W [N, K]; first_m, first_n: the tile's first row and output.
    SPAN: columns of the slice, BLOCK_K at a time.
    LAST: columns at the start of the slice that are multiplied last.
    UPCAST: multiply in float32, for the interpreter.
    """
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(0, SPAN, BLOCK_K):
        start = first + step
        if LAST > 0:
            start = first + tl.where(step + LAST < SPAN, step + LAST, step + LAST - SPAN)
        weights = w_desc.load([first_n, start])
        inputs = x_desc.load([first_m, start])
        if UPCAST:
            weights, inputs = weights.to(tl.float32), inputs.to(tl.float32)
        acc = tl.dot(weights, tl.trans(inputs), acc)
    return acc


@triton.jit(do_not_specialize=["rows"])
def _ordered_gemm(
    x_desc,
    w_desc,
    bias_ptr,
    out_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    LAST: tl.constexpr,
    PARALLEL: tl.constexpr,
    TOGETHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Multiply a tile of BLOCK_M rows and BLOCK_N outputs. Sums over SPLITS slices of SPAN columns are added in order:
    PARALLEL by the last of SPLITS programs, else by one program.

    x_desc, w_desc: tensor maps of x [rows, K] and W [N, K].
    bias_ptr: [N], with HAS_BIAS. out_ptr: [rows, N], written.
    part_ptr, ticket_ptr: float32 sums of the slices, and counters of programs, with PARALLEL.
    TOGETHER: tiles of rows whose programs are adjacent, because they read the same tile of W.
    BLOCK_K, LAST, UPCAST: see `_slice_sum`.
    """
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program, split = tl.program_id(0), tl.program_id(1)
    band = program // (TOGETHER * tiles_n)
    inside = program - band * (TOGETHER * tiles_n)
    height = tl.minimum(tl.cdiv(rows, BLOCK_M) - band * TOGETHER, TOGETHER)
    first_m, first_n = (band * TOGETHER + inside % height) * BLOCK_M, inside // height * BLOCK_N
    n, m = first_n + tl.arange(0, BLOCK_N), first_m + tl.arange(0, BLOCK_M)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = _slice_sum(x_desc, w_desc, first_m, first_n, split * SPAN, BLOCK_M, BLOCK_N, BLOCK_K, SPAN, LAST, UPCAST)
    if PARALLEL:
        cells = part_ptr + program.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M)
        cells += tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(cells + split * (BLOCK_N * BLOCK_M), acc)
        if not comes_last(ticket_ptr + program, SPLITS):
            return
        acc = sum_of_splits(cells, None, BLOCK_N * BLOCK_M, SPLITS)
    else:
        for later in range(1, SPLITS):
            acc += _slice_sum(
                x_desc, w_desc, first_m, first_n, later * SPAN, BLOCK_M, BLOCK_N, BLOCK_K, SPAN, LAST, UPCAST
            )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < rows)[None, :])


def many_ordered_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace, tiles: OrderedTiles, out: Tensor
) -> None:
    """Write x W^T + b to out [rows, N], contiguous, of 16 or 32 bits.

    x: [rows, K] of a 16-bit dtype, last stride 1; rows are aligned to 16 bytes.
    weight: [N, K], contiguous, same dtype.
    workspace: at least `aerie.kernels.gemm.tiles.ordered_workspace_size`.
    tiles: from `many_ordered_tiles`.

    Reference: `torch.nn.functional.linear`.
    """
    (rows, n), order = out.shape, sum_order(*weight.shape)
    assert x.shape == (rows, weight.shape[1]) and weight.shape[0] == n and out.is_contiguous()
    assert weight.is_contiguous() and x.dtype == weight.dtype
    _ordered_gemm[(tiles.count(rows, n), order.splits if tiles.parallel else 1)](
        TensorDescriptor.from_tensor(x, [tiles.block_m, tiles.block_k]),
        TensorDescriptor.from_tensor(weight, [tiles.block_n, tiles.block_k]),
        bias,
        out,
        workspace.part,
        workspace.tickets,
        rows,
        N=n,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SPLITS=order.splits,
        SPAN=order.span,
        LAST=order.last,
        PARALLEL=tiles.parallel,
        TOGETHER=_TOGETHER,
        HAS_BIAS=bias is not None,
        UPCAST=INTERPRETED,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_wait(x.device),
    )


def ordered_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace, out: Tensor | None = None
) -> Tensor:
    """Return x W^T + b in the order of `sum_order`, in `out` if given; arguments as of `many_ordered_rows`."""
    rows, (n, k) = x.shape[0], weight.shape
    tiles = ordered_tiles(rows, n, k)
    if tiles is not None:
        return skinny_gemm(x, weight, bias, workspace, tiles, out)
    if out is None:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    many_ordered_rows(x, weight, bias, workspace, many_ordered_tiles(rows, n, k), out)
    return out


@dataclass(frozen=True)
class OrderedGEMM(TorchGEMM):
    """The GEMM of deterministic engines."""

    workspace: Workspace

    @classmethod
    def of(cls, weight: Tensor, options: GEMMOptions) -> "OrderedGEMM":
        """Implement `aerie.kernels.gemm.choice.choose_gemm`: return the GEMM of a final weight [out, in]."""
        assert options.workspace is not None, "served"
        return cls(weight, options.workspace)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        return ordered_rows(x, self.weight, bias, self.workspace, out)

    def multiply_gated(self, x: Tensor) -> Tensor:
        tiles = gated_tiles(x.shape[0], *self.weight.shape)  # in one slice, as `sum_order` for so many outputs
        if tiles is None:
            return silu_mul(self.multiply(x, None, None))
        return skinny_gemm_gated(x, self.weight, self.workspace, tiles)
