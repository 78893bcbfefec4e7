# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`aerie.kernels.experts.adapted.product` on GPUs: a launch for A x, split over the inputs, and one for B of its sums.

A program computes one block of cells, which have one expert, for one adapter of these cells after another, with the
other cells zeroed. Blocks without adapters end at once. The second launch adds the first one's partial sums in order,
so equal inputs give equal bits.

What follows the number of rows or adapters is a runtime argument, or one of three sizes of tiles by `ROW_LIMITS` and
`ExpertBlocks.block_m`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.experts.adapted.product import ExpertBlocks, ExpertLoraTables
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.lora.product import ROW_LIMITS
from aerie.kernels.lora.product_triton import (
    EXPAND_STAGES,
    NONE,
    SHRINK_STAGES,
    add_up_products,
    down_products,
    next_index,
)
from aerie.kernels.pdl import pdl_wait

_SPLITS = (4, 2, 1)  # of the inputs, by the class of rows


@triton.jit
def _cells_of(pair_ptr, index_ptr, block, is_used, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a block's pairs, 0 for unused cells, and the index of each cell's adapter, -1 without one."""
    pair = tl.load(pair_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    inside = (pair >= 0) & is_used
    pair = tl.where(inside, pair, 0)
    return pair, tl.load(index_ptr + pair // SLOTS, mask=inside, other=-1)


@triton.jit(do_not_specialize=["cells"])
def _expert_lora_shrink(
    x_ptr,
    down_ptr,
    index_ptr,
    pair_ptr,
    expert_ptr,
    part_ptr,
    cells,
    x_stride,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    INNER: tl.constexpr,
    SPAN: tl.constexpr,
    SLOTS: tl.constexpr,
    BY_CELL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute A x for a block of cells, BLOCK_N ranks and SPAN inputs: one adapter of these cells after another.

    down_ptr: [max_loras, EXPERTS, INNER, K], A of each adapter and expert.
    index_ptr: each row's index, -1 without an adapter.
    pair_ptr, expert_ptr: of `ExpertBlocks`.
    part_ptr: [splits of K, cells, INNER] float32.
    BY_CELL: x has a row for each cell; else for each row of the pass.
    """
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(expert_ptr + block)
    is_used = (expert >= 0) & (expert < EXPERTS)
    pair, indices = _cells_of(pair_ptr, index_ptr, block, is_used, SLOTS, BLOCK_M)
    cell = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = cell if BY_CELL else pair // SLOTS
    part = part_ptr + (split * cells + cell).to(tl.int64)[:, None] * INNER + n[None, :]
    index = next_index(indices, -1)
    while index < NONE:
        ours = (indices == index)[:, None]
        matrix = down_ptr + (index * EXPERTS + expert).to(tl.int64) * (INNER * K)
        acc = down_products(
            x_ptr + row.to(tl.int64)[:, None] * x_stride, matrix, ours, n, split * SPAN,
            K, SPAN, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST,
        )  # fmt: skip
        tl.store(part, acc, mask=ours)
        index = next_index(indices, index)


@triton.jit(do_not_specialize=["cells"])
def _expert_lora_expand(
    part_ptr,
    up_ptr,
    index_ptr,
    pair_ptr,
    expert_ptr,
    weight_ptr,
    y_ptr,
    cells,
    y_stride,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add B (A x) to a block of cells and BLOCK_N outputs: one adapter of these cells after another.

    part_ptr: [SPLITS, cells, INNER] float32, from `_expert_lora_shrink`.
    up_ptr: [max_loras, EXPERTS, N, RANK], B of each adapter and expert.
    weight_ptr: [pairs] float32; then y_ptr is by pair; None: y_ptr is by cell.
    PARTS: first outputs of the joined matrices, and N; each matrix has its own A.
    BLOCK_R: ranks per product.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    INNER: tl.constexpr = (len(PARTS) - 1) * RANK
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(expert_ptr + block)
    is_used = (expert >= 0) & (expert < EXPERTS)
    pair, indices = _cells_of(pair_ptr, index_ptr, block, is_used, SLOTS, BLOCK_M)
    cell = block * BLOCK_M + tl.arange(0, BLOCK_M)
    to = cell if weight_ptr is None else pair
    out = y_ptr + to.to(tl.int64)[:, None] * y_stride + n[None, :]
    index = next_index(indices, -1)
    while index < NONE:
        ours = (indices == index)[:, None]
        matrix = up_ptr + (index * EXPERTS + expert).to(tl.int64) * (N * RANK)
        acc = add_up_products(
            tl.zeros([BLOCK_M, BLOCK_N], tl.float32), part_ptr + cell.to(tl.int64)[:, None] * INNER, cells * INNER,
            matrix, ours, n, tile * BLOCK_N,
            y_ptr.dtype.element_ty, RANK, PARTS, SPLITS, BLOCK_M, BLOCK_N, BLOCK_R, UPCAST,
        )  # fmt: skip
        if weight_ptr is not None:
            acc *= tl.load(weight_ptr + pair, mask=indices == index, other=0.0)[:, None]
        mask = ours & (n < N)[None, :]
        tl.store(out, (acc + tl.load(out, mask=mask, other=0.0).to(tl.float32)).to(y_ptr.dtype.element_ty), mask=mask)
        index = next_index(indices, index)


@dataclass(frozen=True)
class ExpertLoraTiles:
    """Tiles of both launches.

    block_r: ranks.
    block_k: inputs at once.
    block_n: outputs.
    splits: programs over the inputs; span: inputs of each.
    """

    block_r: int
    block_k: int
    block_n: int
    splits: int
    span: int


def expert_lora_tiles(rows: int, inputs: int, rank: int) -> ExpertLoraTiles:
    """Return the tiles, the same for all numbers of rows between two of ROW_LIMITS."""
    size = sum(rows > limit for limit in ROW_LIMITS)
    block_r = next(size for size in (64, 32, 16) if rank % size == 0)
    block_k = 64 if size else 128
    span = triton.cdiv(triton.cdiv(inputs, block_k), _SPLITS[size]) * block_k
    return ExpertLoraTiles(block_r, block_k, 128 if size else 64, triton.cdiv(inputs, span), span)


def add_expert_lora(
    y: Tensor,
    x: Tensor,
    tables: ExpertLoraTables,
    blocks: ExpertBlocks,
    lora_indices: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """Implement `aerie.kernels.experts.adapted.product.add_expert_lora`."""
    (cells,), num_blocks = blocks.pairs.shape, blocks.experts.shape[0]
    _, experts, inner, inputs = tables.down.shape
    outputs, rank = tables.up.shape[2:]
    if not cells:
        return y
    tiles = expert_lora_tiles(lora_indices.shape[0], inputs, rank)
    part = torch.empty((tiles.splits, cells, inner), dtype=torch.float32, device=x.device)
    common = {"EXPERTS": experts, "SLOTS": blocks.slots, "BLOCK_M": blocks.block_m, "UPCAST": INTERPRETED}
    _expert_lora_shrink[(inner // tiles.block_r, tiles.splits, num_blocks)](
        x,
        tables.down,
        lora_indices,
        blocks.pairs,
        blocks.experts,
        part,
        cells,
        x.stride(0),
        K=inputs,
        INNER=inner,
        SPAN=tiles.span,
        BY_CELL=weight is not None,
        BLOCK_N=tiles.block_r,
        BLOCK_K=tiles.block_k,
        num_warps=4,
        num_stages=SHRINK_STAGES,
        **common,
        **pdl_wait(x.device),
    )
    _expert_lora_expand[(triton.cdiv(outputs, tiles.block_n), num_blocks)](
        part,
        tables.up,
        lora_indices,
        blocks.pairs,
        blocks.experts,
        weight,
        y,
        cells,
        y.stride(0),
        N=outputs,
        RANK=rank,
        PARTS=tuple(tables.parts),
        SPLITS=tiles.splits,
        BLOCK_N=tiles.block_n,
        BLOCK_R=tiles.block_r,
        num_warps=4,
        num_stages=EXPAND_STAGES,
        **common,
        **pdl_wait(x.device),
    )
    return y
