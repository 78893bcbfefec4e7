# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`aerie.kernels.lora.product` on GPUs: a launch for A x, split over the inputs, and one for B of its sums.

A program computes a block of rows for one or several of the adapters that these rows have, with the other rows zeroed.
Rows of a request are neighbours, so most blocks have one adapter. Blocks without adapters end at once. The second
launch adds the first one's partial sums in order, so equal inputs give equal bits.
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
_MAX_PROGRAMS = 16 * MULTIPROCESSORS  # of a launch, where lanes are added
SHRINK_STAGES = 3
EXPAND_STAGES = 1  # more would copy partial sums to shared memory


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
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    block, lane = tl.program_id(2) // LANES, tl.program_id(2) % LANES
    m, n = block * BLOCK_M + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    places = tl.load(place_ptr + m, mask=m < rows, other=-1)
    places = tl.where(places % LANES == lane, places, -1)  # -1 too if it has none
    part = part_ptr + (split * rows + m).to(tl.int64)[:, None] * INNER + n[None, :]
    place = _next_place(places, -1)
    while place < _NONE:
        ours = (places == place)[:, None]
        matrix = down_ptr + place.to(tl.int64) * (INNER * K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, SPAN, BLOCK_K):
            k = split * SPAN + start + tl.arange(0, BLOCK_K)
            inside = k < K
            inputs = tl.load(
                x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :], mask=ours & inside[None, :], other=0.0
            )
            weights = tl.load(matrix + n[None, :] * K + k[:, None], mask=inside[:, None], other=0.0)
            if UPCAST:
                inputs, weights = inputs.to(tl.float32), weights.to(tl.float32)
            acc = tl.dot(inputs, weights, acc, input_precision="ieee")
        tl.store(part, acc, mask=ours)
        place = _next_place(places, place)


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
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile, block, lane = tl.program_id(0), tl.program_id(1) // LANES, tl.program_id(1) % LANES
    m, n, r = block * BLOCK_M + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    INNER: tl.constexpr = (len(PARTS) - 1) * RANK
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    places = tl.load(place_ptr + m, mask=m < rows, other=-1)
    places = tl.where(places % LANES == lane, places, -1)  # -1 too if it has none
    out = y_ptr + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    place = _next_place(places, -1)
    while place < _NONE:
        ours = (places == place)[:, None]
        matrix = up_ptr + place.to(tl.int64) * (N * RANK)
        acc = tl.load(out, mask=ours & (n < N)[None, :], other=0.0).to(tl.float32)
        for p in tl.static_range(len(PARTS) - 1):
            if (tile * BLOCK_N < PARTS[p + 1]) & (tile * BLOCK_N + BLOCK_N > PARTS[p]):
                inside = ((n >= PARTS[p]) & (n < PARTS[p + 1]))[None, :]
                for first in range(0, RANK, BLOCK_R):
                    weights = tl.load(matrix + n[None, :] * RANK + (first + r)[:, None], mask=inside, other=0.0)
                    inner = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                    column = part_ptr + m.to(tl.int64)[:, None] * INNER + (p * RANK + first + r)[None, :]
                    for split in tl.static_range(SPLITS):
                        inner += tl.load(column + split * rows * INNER, mask=ours, other=0.0)
                    inner = inner.to(y_ptr.dtype.element_ty)
                    if UPCAST:
                        weights, inner = weights.to(tl.float32), inner.to(tl.float32)
                    acc = tl.dot(inner, weights, acc, input_precision="ieee")
        tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=ours & (n < N)[None, :])
        place = _next_place(places, place)


@dataclass(frozen=True)
class LoraTiles:
    """Tiles of both launches.

    block_m: rows. block_r: ranks. block_k: inputs at once. block_n: outputs.
    splits: programs over the inputs; span: inputs of each.
    shrink_lanes, expand_lanes: programs of a block of rows, each for every LANES-th place.
    """

    block_m: int
    block_r: int
    block_k: int
    block_n: int
    splits: int
    span: int
    shrink_lanes: int
    expand_lanes: int


def lora_tiles(rows: int, inputs: int, outputs: int, num_parts: int, rank: int, places: int) -> LoraTiles:
    """Return the tiles. Programs whose lane has no adapter end at once, but many of them take time to start."""
    few = rows <= _FEW_ROWS
    block_m, block_k = (16, 128) if few else (64, 64)
    block_r = next(size for size in (64, 32, 16) if rank % size == 0)
    blocks, steps = triton.cdiv(rows, block_m), triton.cdiv(inputs, block_k)
    tiles = blocks * (num_parts * rank // block_r)
    splits = max(1, min(_MAX_SPLITS, MULTIPROCESSORS // tiles))
    span = triton.cdiv(steps, splits) * block_k
    block_n = 128 if blocks * triton.cdiv(outputs, 128) >= MULTIPROCESSORS // 2 else 64
    splits = triton.cdiv(inputs, span)
    lanes = min(places, block_m if few else 4, rows)
    return LoraTiles(
        block_m,
        block_r,
        block_k,
        block_n,
        splits,
        span,
        min(lanes, max(1, _MAX_PROGRAMS // (tiles * splits))),
        min(lanes, max(1, _MAX_PROGRAMS // (blocks * triton.cdiv(outputs, block_n)))),
    )


def shrink(x: Tensor, tables: LoraTables, row_places: Tensor) -> Tensor:
    """Return partial sums of each row's A x: [splits, rows, num_parts * max_rank] float32; rows without an adapter are
    uninitialised."""
    (rows, inputs), inner, tiles = x.shape, tables.down.shape[1], _tiles(x, tables)
    part = torch.empty((tiles.splits, rows, inner), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(rows, tiles.block_m)
    _lora_shrink[(inner // tiles.block_r, tiles.splits, blocks * tiles.shrink_lanes)](
        x,
        tables.down,
        row_places,
        part,
        rows,
        x.stride(0),
        K=inputs,
        INNER=inner,
        SPAN=tiles.span,
        LANES=tiles.shrink_lanes,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_r,
        BLOCK_K=tiles.block_k,
        UPCAST=INTERPRETED,
        num_warps=4,
        num_stages=SHRINK_STAGES,
        **pdl_wait(x.device),
    )
    return part


def expand(y: Tensor, x: Tensor, part: Tensor, tables: LoraTables, row_places: Tensor) -> Tensor:
    """Add B of the sums of `shrink`'s parts to y; return y."""
    (rows, outputs), tiles = y.shape, _tiles(x, tables)
    blocks = triton.cdiv(rows, tiles.block_m)
    _lora_expand[(triton.cdiv(outputs, tiles.block_n), blocks * tiles.expand_lanes)](
        part,
        tables.up,
        row_places,
        y,
        rows,
        y.stride(0),
        N=outputs,
        RANK=tables.max_rank,
        PARTS=tuple(tables.parts),
        SPLITS=tiles.splits,
        LANES=tiles.expand_lanes,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_R=tiles.block_r,
        UPCAST=INTERPRETED,
        num_warps=4,
        num_stages=EXPAND_STAGES,
        **pdl_wait(x.device),
    )
    return y


def _tiles(x: Tensor, tables: LoraTables) -> LoraTiles:
    (rows, inputs), (places, outputs, rank) = x.shape, tables.up.shape
    return lora_tiles(rows, inputs, outputs, len(tables.parts) - 1, rank, places)


def add_lora(y: Tensor, x: Tensor, tables: LoraTables, row_places: Tensor) -> Tensor:
    """`aerie.kernels.lora.product.add_lora`."""
    if not x.shape[0]:
        return y
    return expand(y, x, shrink(x, tables, row_places), tables, row_places)
