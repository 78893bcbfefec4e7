# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Experts for more than 16 rows: verified batches and prompts. Rows are sorted by expert into blocks (`order_triton`);
a program multiplies one block by some columns of its expert. From 17 rows on, this is faster than `few_rows_triton`:
for a layer of a DeepSeek-V3 rank, 209 instead of 226 us with 24 rows, 321 instead of 357 us with 64 (H200, `307542c2`).

Four launches: the order; gate and up projections of gathered rows; weighted down projections, one result per row and
expert; their sum. With very many rows the last two run over spans of columns, which bounds memory.

There are two kinds of blocks, because the tensor core's first operand has at least 64 rows. Blocks of 64 rows are the
first operand; shorter blocks are the second operand, and the weights the first. With a block as the first operand, a
thread holds the scales of two rows of the block instead of 16, a step takes 210 instructions per warp instead of 360,
and three programs fit on a multiprocessor instead of one (`ba50aa9`).

For one `gate_up.block_n`, a row's result depends on that row alone, because sums are not split. On an H200 an output
has the same bits for any number of rows beside it, under these conditions. In 16 bits the weights must be the first
operand (`tests.kernels.gemm.test_ordered_cuda`), so deterministic engines multiply all blocks in that way. In FP8
either operand may be first (`tests.kernels.products.test_fp8_gemm`).
"""

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.experts.gated import SWIGLU
from aerie.kernels.experts.order_triton import ExpertOrder, bins_of, order_by_expert
from aerie.kernels.experts.route import Routed
from aerie.kernels.experts.sorted_rows_triton import down_of_sorted_rows, gate_up_of_sorted_rows
from aerie.kernels.experts.weights import (
    ExpertSizes,
    ExpertTiles,
    ExpertWeights,
    InnerRows,
    ProductTiles,
    block_of,
)
from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.gemm.tiles import SHARED_BYTES
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.pdl import pdl_wait

MAX_PARTIAL_BYTES = 1 << 28  # bound on scratch for the results per row and expert
_MIN_FIRST_ROWS = 64  # rows of a block as the tensor core's first operand
_MAX_HELD = 4  # steps of a down projection for which a program keeps its rows in registers
_MIN_BLOCKS, _MAX_BLOCKS = 8, 28  # blocks of columns per program, for short blocks of rows
_START_COST = 2.5  # cost of starting a program, in blocks
_MAX_RESIDENT = 5  # programs per multiprocessor, limited by registers
_SUM_COLUMNS = 1024  # columns per program of the sum over a row's experts


@triton.jit(do_not_specialize=["span_index"])
def _sum_choices(
    part_ptr,
    chosen_ptr,
    out_ptr,
    span_index,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    SPAN: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME_ABSENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum a row's weighted results of its CHOICES experts, in SPAN columns from span_index * STEP on.

    part_ptr: [rows, CHOICES, SPAN].
    chosen_ptr: [rows, CHOICES], negative without a result.
    out_ptr: [rows, SIZE].
    STEP: columns of each span but the last.
    BLOCK: columns of a program.
    SOME_ABSENT: a row may have results of only some experts; otherwise of all or none.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, parts = column < SPAN, part_ptr + row * CHOICES * SPAN + column
    acc = tl.zeros([BLOCK], tl.float32)
    if SOME_ABSENT:
        for choice in tl.static_range(CHOICES):
            is_there = inside & (tl.load(chosen_ptr + row * CHOICES + choice) >= 0)
            acc += tl.load(parts + choice * SPAN, mask=is_there, other=0.0).to(tl.float32)
    else:
        # Padding rows have no experts; they load uninitialised memory and discard it, so that the loads need not wait
        # for `chosen`. Parts are read once, so evict_first keeps newer data cached.
        is_live = tl.load(chosen_ptr + row * CHOICES) >= 0
        for choice in tl.static_range(CHOICES):
            part = tl.load(parts + choice * SPAN, mask=inside, other=0.0, eviction_policy="evict_first")
            acc += tl.where(is_live, part.to(tl.float32), 0.0)
    tl.store(out_ptr + row * SIZE + span_index * STEP + column, acc.to(out_ptr.dtype.element_ty), mask=inside)


def many_row_tiles(rows: int, sizes: ExpertSizes, deterministic: bool = False) -> ExpertTiles:
    """Return tiles whose blocks have about as many rows as an expert has under even routing, up to 64.

    Measured on an H200 (`tests.bench experts`). deterministic: whether a row must have the same result for any number
    of rows.
    """
    rows_per_expert, in_fp8 = rows * sizes.share, sizes.step == 128
    block_m = min(_MIN_FIRST_ROWS, block_of(int(rows_per_expert * 1.25)))
    weights_first = block_m < _MIN_FIRST_ROWS or (deterministic and not in_fp8)
    holds = cdiv(sizes.width, 64) <= _MAX_HELD
    product = ProductTiles(64, 1, stages=3, warps=4)
    if weights_first:
        gate_up = replace(product, stages=5) if block_m == 16 else product
        if not holds:
            down = ProductTiles(128, 1, stages=3, warps=8) if sizes.size % 128 == 0 else product
            return ExpertTiles(block_m, gate_up, down, True)
        blocks = _blocks_in_whole_waves(rows, block_m, sizes, product)
        return ExpertTiles(block_m, gate_up, replace(product, blocks=blocks), True)
    blocks = next(n for n in range(8, 0, -1) if sizes.size // product.block_n % n == 0) if holds else 1
    return ExpertTiles(block_m, product, replace(product, blocks=blocks))


def _blocks_in_whole_waves(rows: int, block_m: int, sizes: ExpertSizes, down: ProductTiles) -> int:
    """Return the blocks of columns per down-projection program with which the last program ends soonest.

    Model: a program takes one unit per block plus `_START_COST`, and shared memory limits how many run at once. It
    ranks tiles like measurements with 24 to 512 rows (DeepSeek-V3, one of eight ranks).
    """
    columns, weight_bytes = sizes.size // down.block_n, 128 // sizes.step
    shared = (down.stages * down.block_n + block_m) * sizes.width * weight_bytes + (2 << 10)
    at_once = MULTIPROCESSORS * min(_MAX_RESIDENT, SHARED_BYTES // shared)
    row_blocks = sizes.used(rows) + sizes.num_shared * (-(-rows // block_m) - 1)

    def time(blocks: int) -> float:
        return math.ceil(row_blocks * columns / blocks / at_once) * (blocks + _START_COST)

    numbers = [n for n in range(1, _MAX_BLOCKS + 1) if columns % n == 0]
    # fewer blocks were never faster, and each number compiles another kernel
    return min([n for n in numbers if n >= _MIN_BLOCKS] or numbers[-1:], key=time)


def many_row_experts(
    x: Tensor | Fp8Rows, routed: Routed, weights: ExpertWeights, tiles: ExpertTiles, out: Tensor
) -> Tensor:
    """Write the weighted sum of each row's experts to `out`; zeros for rows without experts, such as padding.

    x: as in `aerie.kernels.experts.few_rows_triton.few_row_experts`; scales may have any strides.
    routed: from `aerie.kernels.experts.route_triton`.
    tiles: any from `many_row_tiles`.
    out: [rows, size], contiguous.

    Scratch: rows * slots results in out's dtype, or as many of their columns as fit in 256 MB; rows * slots inner
    activations, and those of unused rows of blocks.

    Reference: `aerie.kernels.experts.grouped.experts_one_by_one`.
    """
    rows, slots = routed.chosen.shape
    if rows == 0:
        return out
    assert out.shape == (rows, weights.size) and out.is_contiguous()
    try:
        order = order_by_expert(routed, weights.num_experts, tiles.block_m, weights.num_shared)
        inner = inner_rows(x, order, weights, tiles, slots)
    except BaseException:  # usually out of memory, after which the engine continues
        routed.reset_count()
        raise
    return down_projected(inner, routed, order, weights, tiles, out)


def down_projected(
    inner: InnerRows,
    routed: Routed,
    order: ExpertOrder,
    weights: ExpertWeights,
    tiles: ExpertTiles,
    out: Tensor,
) -> Tensor:
    """Write the weighted sum of the down projections to out [rows, size]."""
    rows, slots = routed.chosen.shape
    span = columns_at_once(rows * slots * out.element_size(), weights.size, tiles)
    for first in range(0, weights.size, span):
        parts = torch.empty((rows * slots, span), dtype=out.dtype, device=out.device)
        down_projections(inner, routed.weight, order, weights, tiles, first, parts)
        sum_choices(parts, routed.chosen, out, first // span, span, weights.held is not None)
    return out


def sum_choices(parts: Tensor, chosen: Tensor, out: Tensor, span_index: int, step: int, some_absent: bool) -> None:
    """Write the sum over each row's chosen experts to columns span_index * step and following of out [rows, size].

    parts: [rows * choices, columns]; results of pairs without an expert are not read.
    chosen: [rows, choices] int32.
    some_absent: whether a row may lack the experts of some choices.
    """
    rows, choices = chosen.shape
    span = parts.shape[1]
    _sum_choices[(rows, triton.cdiv(span, _SUM_COLUMNS))](
        parts,
        chosen,
        out,
        span_index,
        SIZE=out.shape[1],
        STEP=step,
        SPAN=span,
        CHOICES=choices,
        BLOCK=_SUM_COLUMNS,
        SOME_ABSENT=some_absent,
        num_warps=4,
        **pdl_wait(out.device),
    )


def columns_at_once(bytes_of_column: int, size: int, tiles: ExpertTiles) -> int:
    """Return the maximum number of columns whose results fit in `MAX_PARTIAL_BYTES`; at least one program's."""
    programs = size // (tiles.down.block_n * tiles.down.blocks)
    fitting = (
        n for n in range(1, programs + 1) if programs % n == 0 and bytes_of_column * size // n <= MAX_PARTIAL_BYTES
    )
    return size // next(fitting, programs)


def inner_rows(
    x: Tensor | Fp8Rows, order: ExpertOrder, weights: ExpertWeights, tiles: ExpertTiles, slots: int
) -> InnerRows:
    """Return the inner activations of each expert's rows."""
    values, x_scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    assert values.dtype == weights.gate_up.dtype and values.shape[1] == weights.size and values.is_contiguous()
    assert tiles.gate_up.splits == 1
    width, block_m, gate_up, activation = weights.width, tiles.block_m, tiles.gate_up, weights.activation
    num_blocks, blocks = order.experts.shape[0], cdiv(width, gate_up.block_n)
    hidden = torch.empty((num_blocks * block_m, width), dtype=values.dtype, device=values.device)
    factors = torch.empty((num_blocks, blocks, block_m), dtype=torch.float32, device=values.device)
    gate_up_of_sorted_rows[(blocks, num_blocks)](
        values,
        TensorDescriptor.from_tensor(weights.gate_up.flatten(0, 1), [gate_up.block_n, weights.step]),
        x_scales,
        weights.gate_up_scales,
        weights.gate_up_bias,
        hidden,
        factors,
        order.pairs,
        order.experts,
        order.count,
        order.shared,
        order.stride,
        0 if x_scales is None else x_scales.stride(0),
        0 if x_scales is None else x_scales.stride(1),
        activation.alpha,
        activation.limit or 0.0,
        activation.shift,
        activation.cubic,
        EXPERTS=weights.num_experts,
        BINS=bins_of(weights.num_experts),
        WIDTH=width,
        SIZE=weights.size,
        SLOTS=slots,
        BLOCK_M=block_m,
        BLOCK_N=gate_up.block_n,
        STEP=weights.step,
        IN_FP8=weights.in_fp8,
        BY_GROUP=weights.by_group,
        PLAIN=activation == SWIGLU,
        CLAMPED=activation.limit is not None,
        CUBED=activation.cubic != 0.0,
        WEIGHTS_FIRST=_weights_first(tiles),
        INTERPRETED=INTERPRETED,
        num_warps=gate_up.warps,
        num_stages=gate_up.stages,
        **pdl_wait(values.device),
    )
    return InnerRows(hidden, factors)


def down_projections(
    inner: InnerRows,
    weight: Tensor,
    order: ExpertOrder,
    weights: ExpertWeights,
    tiles: ExpertTiles,
    first: int,
    parts: Tensor,
) -> None:
    """Write the weighted down projections of some columns.

    inner: from the gate and up projections, in the blocks of `order`.
    weight: [rows, slots] routing weights.
    weights, tiles: the layer's weights and tiles.
    first: first column.
    parts: [rows * slots, span], written: a result for each row and expert.
    """
    size, width, block_m, down, span = weights.size, weights.width, tiles.block_m, tiles.down, parts.shape[1]
    step = tiles.inner_step(weights.in_fp8)
    common = {
        "WIDTH": width,
        "SIZE": size,
        "BLOCK_M": block_m,
        "BLOCK_N": down.block_n,
        "BLOCKS": down.blocks,
        "HOLDS": cdiv(width, step) <= _MAX_HELD,
        "STEP": step,
        "IN_FP8": weights.in_fp8,
        "BY_GROUP": weights.by_group,
        "WEIGHTS_FIRST": _weights_first(tiles),
        "INTERPRETED": INTERPRETED,
        "num_warps": down.warps,
        "num_stages": down.stages,
        **pdl_wait(parts.device),
    }
    tensors = (
        TensorDescriptor.from_tensor(inner.values, [block_m, step]),
        TensorDescriptor.from_tensor(weights.down.flatten(0, 1), [down.block_n, step]),
        inner.factors,
        weights.down_scales,
        weights.down_bias,
        parts,
        weight,
        order.pairs,
        order.experts,
        order.shared,
        order.stride,
    )
    assert down.splits == 1 and span % (down.block_n * down.blocks) == 0
    grid = (span // (down.block_n * down.blocks), order.experts.shape[0])
    down_of_sorted_rows[grid](*tensors, first, SPAN=span, **common)


def _weights_first(tiles: ExpertTiles) -> bool:
    return tiles.weights_first or tiles.block_m < _MIN_FIRST_ROWS
