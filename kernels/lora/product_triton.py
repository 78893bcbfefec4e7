# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`aerie.kernels.lora.product` on GPUs: a launch for A x, split over the inputs, and one for B of its sums.

A program computes a block of rows. It visits the adapters that these rows have, one after another, with the other rows
zeroed. Rows of a request are neighbours, so most blocks have one adapter. Blocks without adapters end at once. The
second launch adds the first one's partial sums in order, so equal inputs give equal bits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.lora.product import LoraTables
from aerie.kernels.pdl import pdl_wait

_NONE = tl.constexpr(1 << 30)  # beyond all places
_FEW_ROWS = 64  # up to here, blocks of 16 rows
_MAX_SPLITS = 16
STAGES = 3


@triton.jit
def _next_place(places, place):
    """The smallest place after `place` that a row has; `_NONE` if there is none."""
    return tl.min(tl.where(places > place, places, _NONE))


@triton.jit(do_not_specialize=["rows"])
def _lora_shrink(
    x_ptr,
    down_ptr,
    place_ptr,
    part_ptr,
    rows,
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
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n = block * BLOCK_M + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    places = tl.load(place_ptr + m, mask=m < rows, other=-1)
    place = _next_place(places, -1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    while place < _NONE:
        chosen = places == place
        matrix = down_ptr + place.to(tl.int64) * (INNER * K)
        for start in range(0, SPAN, BLOCK_K):
            k = split * SPAN + start + tl.arange(0, BLOCK_K)
            inputs = tl.load(
                x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :],
                mask=chosen[:, None] & (k < K)[None, :],
                other=0.0,
            )
            weights = tl.load(
                matrix + n[None, :] * K + k[:, None], mask=(n < INNER)[None, :] & (k < K)[:, None], other=0.0
            )
            if UPCAST:
                inputs, weights = inputs.to(tl.float32), weights.to(tl.float32)
            acc = tl.dot(inputs, weights, acc, input_precision="ieee")
        place = _next_place(places, place)
    part = part_ptr + (split * rows + m).to(tl.int64)[:, None] * INNER + n[None, :]
    tl.store(part, acc, mask=(places >= 0)[:, None] & (n < INNER)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _lora_expand(
    part_ptr,
    up_ptr,
    place_ptr,
    y_ptr,
    rows,
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
    tile, block = tl.program_id(0), tl.program_id(1)
    m, n, r = block * BLOCK_M + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    INNER: tl.constexpr = (len(PARTS) - 1) * RANK
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    places = tl.load(place_ptr + m, mask=m < rows, other=-1)
    place = _next_place(places, -1)
    if place == _NONE:
        return
    out = y_ptr + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    within = (places >= 0)[:, None] & (n < N)[None, :]
    acc = tl.load(out, mask=within, other=0.0).to(tl.float32)
    for p in tl.static_range(len(PARTS) - 1):
        inside = (n >= PARTS[p]) & (n < PARTS[p + 1])
        if (tile * BLOCK_N < PARTS[p + 1]) & (tile * BLOCK_N + BLOCK_N > PARTS[p]):
            for first in range(0, RANK, BLOCK_R):
                column = p * RANK + first + r
                inner = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                for split in tl.static_range(SPLITS):
                    part = part_ptr + (split * rows + m).to(tl.int64)[:, None] * INNER + column[None, :]
                    inner += tl.load(part, mask=(places >= 0)[:, None], other=0.0)
                inner = inner.to(y_ptr.dtype.element_ty)
                place = _next_place(places, -1)
                while place < _NONE:
                    matrix = up_ptr + place.to(tl.int64) * (N * RANK)
                    weights = tl.load(
                        matrix + n[None, :] * RANK + (first + r)[:, None], mask=inside[None, :], other=0.0
                    )
                    ours = tl.where((places == place)[:, None], inner, 0.0)
                    if UPCAST:
                        weights, ours = weights.to(tl.float32), ours.to(tl.float32)
                    acc = tl.dot(ours, weights, acc, input_precision="ieee")
                    place = _next_place(places, place)
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=within)


@dataclass(frozen=True)
class LoraTiles:
    """Tiles of both launches: `block_m` rows; `block_r` ranks; `block_k` inputs, of which each of `splits` programs
    adds `span`; `block_n` outputs."""

    block_m: int
    block_r: int
    block_k: int
    block_n: int
    splits: int
    span: int


def lora_tiles(rows: int, inputs: int, outputs: int, num_parts: int, rank: int) -> LoraTiles:
    block_m, block_k = (16, 128) if rows <= _FEW_ROWS else (64, 64)
    block_r = next(size for size in (64, 32, 16) if rank % size == 0)
    blocks, steps = triton.cdiv(rows, block_m), triton.cdiv(inputs, block_k)
    splits = max(1, min(_MAX_SPLITS, MULTIPROCESSORS // (blocks * (num_parts * rank // block_r))))
    span = triton.cdiv(steps, splits) * block_k
    block_n = 128 if blocks * triton.cdiv(outputs, 128) >= MULTIPROCESSORS // 2 else 64
    return LoraTiles(block_m, block_r, block_k, block_n, triton.cdiv(inputs, span), span)


def add_lora(y: Tensor, x: Tensor, tables: LoraTables, row_places: Tensor) -> Tensor:
    """`aerie.kernels.lora.product.add_lora`."""
    (rows, outputs), inputs, rank = y.shape, x.shape[1], tables.max_rank
    if not rows:
        return y
    inner = tables.down.shape[1]
    tiles = lora_tiles(rows, inputs, outputs, inner // rank, rank)
    blocks = triton.cdiv(rows, tiles.block_m)
    part = torch.empty((tiles.splits, rows, inner), dtype=torch.float32, device=x.device)
    options = {"BLOCK_M": tiles.block_m, "UPCAST": INTERPRETED, "num_warps": 4, **pdl_wait(x.device)}
    _lora_shrink[(inner // tiles.block_r, tiles.splits, blocks)](
        x,
        tables.down,
        row_places,
        part,
        rows,
        x.stride(0),
        K=inputs,
        INNER=inner,
        SPAN=tiles.span,
        BLOCK_N=tiles.block_r,
        BLOCK_K=tiles.block_k,
        num_stages=STAGES,
        **options,
    )
    _lora_expand[(triton.cdiv(outputs, tiles.block_n), blocks)](
        part,
        tables.up,
        row_places,
        y,
        rows,
        y.stride(0),
        N=outputs,
        RANK=rank,
        PARTS=tuple(tables.parts),
        SPLITS=tiles.splits,
        BLOCK_N=tiles.block_n,
        BLOCK_R=tiles.block_r,
        **options,
    )
    return y
