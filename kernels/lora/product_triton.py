# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`aerie.kernels.lora.product` on GPUs: a launch for A x, split over the inputs, and one for B of its sums.

A program computes a block of rows for one or several of the adapters that these rows have, with the other rows zeroed.
Rows of a request are neighbours, so most blocks have one adapter. Blocks without adapters end at once. The second
launch adds the first one's partial sums in order, so equal inputs give equal bits.

What follows the number of rows or adapters is a runtime argument, or one of three sizes of tiles. So a layer has three
variants of each kernel, and `VARIANT_ROWS` launches all.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.lora.product import ROW_LIMITS, LoraTables
from aerie.kernels.pdl import pdl_wait

NONE = tl.constexpr(1 << 30)  # beyond all indices
_MAX_SPLITS = (16, 8, 1)  # by the class of rows: partial sums of many rows take memory and time
_FIXED_SPLITS = 8  # of all numbers of rows, for a fixed order of sums
_SPLIT_INPUTS = 1024  # least inputs of a split, except with few rows
_SPLIT_STEP = 128  # the largest block_k
_MAX_PROGRAMS = 16 * MULTIPROCESSORS  # a launch gets more lanes up to this number of programs
SHRINK_STAGES = 3  # Triton's num_stages of the product with `down`
EXPAND_STAGES = 1  # more would copy partial sums to shared memory


@triton.jit
def next_index(indices, index):
    """The smallest index after `index` that a row has; `NONE` if there is none."""
    return tl.min(tl.where(indices > index, indices, NONE))


@triton.jit
def down_products(
    rows_at,
    matrix,
    ours,
    n,
    first,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return [BLOCK_M, BLOCK_N] products of SPAN inputs with rows n of A, in float32; zeros for rows not `ours`.

    rows_at: [BLOCK_M, 1] addresses of the rows of x, of K inputs.
    matrix: address of an adapter's A, [.., K].
    ours: [BLOCK_M, 1] whether a row has the adapter.
    first: first input.
    UPCAST: multiply in float32, for the interpreter.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, SPAN, BLOCK_K):
        k = first + start + tl.arange(0, BLOCK_K)
        inside = k < K
        inputs = tl.load(rows_at + k[None, :], mask=ours & inside[None, :], other=0.0)
        weights = tl.load(matrix + n[None, :] * K + k[:, None], mask=inside[:, None], other=0.0)
        if UPCAST:
            inputs, weights = inputs.to(tl.float32), weights.to(tl.float32)
        acc = tl.dot(inputs, weights, acc, input_precision="ieee")
    return acc


@triton.jit
def add_up_products(
    acc,
    parts_at,
    split_stride,
    matrix,
    ours,
    n,
    begin,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return acc [BLOCK_M, BLOCK_N] plus the products of A x with rows n of B.

    parts_at: [BLOCK_M, 1] addresses of the rows' partial sums of A x, of which SPLITS are added, split_stride apart.
    matrix: address of an adapter's B, [.., RANK].
    ours: [BLOCK_M, 1] whether a row has the adapter.
    begin: first of the outputs n.
    DTYPE: to which A x is rounded.
    PARTS: first outputs of the joined matrices, and their end; each matrix has its own A.
    BLOCK_R: ranks per product.
    """
    r = tl.arange(0, BLOCK_R)
    for p in tl.static_range(len(PARTS) - 1):
        if (begin < PARTS[p + 1]) & (begin + BLOCK_N > PARTS[p]):
            inside = ((n >= PARTS[p]) & (n < PARTS[p + 1]))[None, :]
            for first in range(0, RANK, BLOCK_R):
                weights = tl.load(matrix + n[None, :] * RANK + (first + r)[:, None], mask=inside, other=0.0)
                inner = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                column = parts_at + (p * RANK + first + r)[None, :]
                for split in tl.static_range(SPLITS):
                    inner += tl.load(column + split * split_stride, mask=ours, other=0.0)
                inner = inner.to(DTYPE)
                if UPCAST:
                    weights, inner = weights.to(tl.float32), inner.to(tl.float32)
                acc = tl.dot(inner, weights, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows", "lanes"])
def _lora_shrink(
    x_ptr,
    down_ptr,
    index_ptr,
    part_ptr,
    rows,
    lanes,
    x_stride,
    K: tl.constexpr,
    INNER: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute A x for a block of rows, BLOCK_N ranks and SPAN inputs: one after another for each adapter of these rows.

    down_ptr: [max_loras, INNER, K], A of each adapter.
    index_ptr: each row's index, -1 without an adapter.
    part_ptr: [splits of K, rows, INNER] float32.
    lanes: programs that share the adapters of a block; an adapter belongs to the lane index % lanes.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    block, lane = tl.program_id(2) // lanes, tl.program_id(2) % lanes
    m, n = block * BLOCK_M + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    indices = tl.load(index_ptr + m, mask=m < rows, other=-1)
    indices = tl.where(indices % lanes == lane, indices, -1)  # -1 too if it has none
    part = part_ptr + (split * rows + m).to(tl.int64)[:, None] * INNER + n[None, :]
    index = next_index(indices, -1)
    while index < NONE:
        ours = (indices == index)[:, None]
        matrix = down_ptr + index.to(tl.int64) * (INNER * K)
        acc = down_products(
            x_ptr + m.to(tl.int64)[:, None] * x_stride, matrix, ours, n, split * SPAN,
            K, SPAN, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST,
        )  # fmt: skip
        tl.store(part, acc, mask=ours)
        index = next_index(indices, index)


@triton.jit(do_not_specialize=["rows", "lanes"])
def _lora_expand(
    part_ptr,
    up_ptr,
    index_ptr,
    y_ptr,
    rows,
    lanes,
    y_stride,
    N: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add B (A x) to a block of rows and BLOCK_N outputs: one after another for each adapter of these rows.

    part_ptr: [SPLITS, rows, INNER] float32, from `_lora_shrink`.
    up_ptr: [max_loras, N, RANK], B of each adapter.
    lanes: programs that share the adapters of a block; an adapter belongs to the lane index % lanes.
    PARTS: first outputs of the joined matrices, and N; each matrix has its own A.
    BLOCK_R: ranks per product.
    """
    tile, block, lane = tl.program_id(0), tl.program_id(1) // lanes, tl.program_id(1) % lanes
    m, n = block * BLOCK_M + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    INNER: tl.constexpr = (len(PARTS) - 1) * RANK
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    indices = tl.load(index_ptr + m, mask=m < rows, other=-1)
    indices = tl.where(indices % lanes == lane, indices, -1)  # -1 too if it has none
    out = y_ptr + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    index = next_index(indices, -1)
    while index < NONE:
        ours = (indices == index)[:, None]
        matrix = up_ptr + index.to(tl.int64) * (N * RANK)
        acc = tl.load(out, mask=ours & (n < N)[None, :], other=0.0).to(tl.float32)
        acc = add_up_products(
            acc, part_ptr + m.to(tl.int64)[:, None] * INNER, rows * INNER, matrix, ours, n, tile * BLOCK_N,
            y_ptr.dtype.element_ty, RANK, PARTS, SPLITS, BLOCK_M, BLOCK_N, BLOCK_R, UPCAST,
        )  # fmt: skip
        tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=ours & (n < N)[None, :])
        index = next_index(indices, index)


@dataclass(frozen=True)
class LoraTiles:
    """Tiles of both launches for a layer, with a class of rows.

    warps: warps of the second launch.
    block_m: rows.
    block_r: ranks.
    block_k: inputs at once.
    block_n: outputs.
    splits: programs over the inputs; span: inputs of each.
    """

    block_m: int
    block_r: int
    block_k: int
    block_n: int
    splits: int
    span: int
    warps: int


def lora_tiles(rows: int, inputs: int, outputs: int, num_parts: int, rank: int, fixed: bool = False) -> LoraTiles:
    """Return the tiles, the same for all numbers of rows between two of ROW_LIMITS. fixed: as in `LoraTables`: the
    inputs are split alike for all numbers of rows. Tiles of any number of rows add them in order within a split."""
    size = sum(rows > limit for limit in ROW_LIMITS)
    block_r = next(size for size in (64, 32, 16) if rank % size == 0)
    chunks = num_parts * rank // block_r
    block_m, block_k = ((16, 128), (64, 128), (64, 64))[size]
    wide = size > 0 or 2 * triton.cdiv(outputs, 128) >= MULTIPROCESSORS
    most, copies = (_FIXED_SPLITS, 1) if fixed else (_MAX_SPLITS[size], 4 if size else 1)
    if fixed or size > 0:
        most = min(most, triton.cdiv(inputs, _SPLIT_INPUTS))
    splits, step = max(1, min(most, MULTIPROCESSORS // (chunks * copies))), _SPLIT_STEP if fixed else block_k
    span = triton.cdiv(triton.cdiv(inputs, step), splits) * step
    return LoraTiles(
        block_m,
        block_r,
        block_k,
        128 if wide else 64,
        triton.cdiv(inputs, span),
        span,
        warps=8 if size == 2 or (size == 1 and rank > 64) else 4,
    )


def _lanes(tables: LoraTables, rows: int, block_m: int, programs: int) -> int:
    """Return the lanes: programs of each block of rows, of which number i computes every lanes-th adapter from index i
    on. Programs without an adapter end at once, but many of them take time to start.

    programs: number of programs of a launch with one lane.
    """
    most = min(tables.max_loras, block_m if block_m == 16 else 4, rows)
    return min(most, max(1, _MAX_PROGRAMS // programs))


def shrink(x: Tensor, tables: LoraTables, lora_indices: Tensor) -> Tensor:
    """Return partial sums of each row's A x: [splits, rows, num_parts * max_rank] float32; rows without an adapter are
    uninitialised."""
    (rows, inputs), inner, tiles = x.shape, tables.down.shape[1], _tiles(x.shape[0], tables)
    part = torch.empty((tiles.splits, rows, inner), dtype=torch.float32, device=x.device)
    blocks, chunks = triton.cdiv(rows, tiles.block_m), inner // tiles.block_r
    lanes = _lanes(tables, rows, tiles.block_m, blocks * chunks * tiles.splits)
    _lora_shrink[(chunks, tiles.splits, blocks * lanes)](
        x,
        tables.down,
        lora_indices,
        part,
        rows,
        lanes,
        x.stride(0),
        K=inputs,
        INNER=inner,
        SPAN=tiles.span,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_r,
        BLOCK_K=tiles.block_k,
        UPCAST=INTERPRETED,
        num_warps=4,
        num_stages=SHRINK_STAGES,
        **pdl_wait(x.device),
    )
    return part


def expand(y: Tensor, part: Tensor, tables: LoraTables, lora_indices: Tensor) -> Tensor:
    """Add B of the sums of `shrink`'s parts to y; return y."""
    (rows, outputs), tiles = y.shape, _tiles(y.shape[0], tables)
    blocks, columns = triton.cdiv(rows, tiles.block_m), triton.cdiv(outputs, tiles.block_n)
    lanes = _lanes(tables, rows, tiles.block_m, blocks * columns)
    _lora_expand[(columns, blocks * lanes)](
        part,
        tables.up,
        lora_indices,
        y,
        rows,
        lanes,
        y.stride(0),
        N=outputs,
        RANK=tables.max_rank,
        PARTS=tuple(tables.parts),
        SPLITS=part.shape[0],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_R=tiles.block_r,
        UPCAST=INTERPRETED,
        num_warps=tiles.warps,
        num_stages=EXPAND_STAGES,
        **pdl_wait(y.device),
    )
    return y


def _tiles(rows: int, tables: LoraTables) -> LoraTiles:
    _, outputs, rank = tables.up.shape
    return lora_tiles(rows, tables.down.shape[2], outputs, len(tables.parts) - 1, rank, tables.fixed)


def add_lora(y: Tensor, x: Tensor, tables: LoraTables, lora_indices: Tensor) -> Tensor:
    """Implement `aerie.kernels.lora.product.add_lora`."""
    if not x.shape[0]:
        return y
    return expand(y, shrink(x, tables, lora_indices), tables, lora_indices)
