"""Tile sizes for small-batch GEMMs with 16-bit weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.gemm.blocks import cdiv, largest, next_power_of_2

MAX_ROWS = 128  # with more rows cuBLAS is faster, see tests/bench/RESULTS.md
MAX_WGMMA_ROWS = 256  # maximum rows of `gated_rows_cuda` and `split_k_cuda`
MIN_GATED_ROWS = 241  # minimum rows of `gated_rows_cuda`; with fewer, cuBLAS and a kernel for silu are faster
MAX_GATED_OUTPUTS = 14336  # maximum outputs of `gated_rows_cuda`; with 17,408, cuBLAS is faster: 134 instead of 146 us
INPUT_STEP = 64  # divisor of K of all weights with tiles
MAX_GATED_WIDTH = 192  # rows of W in a tile of `gated_rows_cuda`; limited by registers for sums
MIN_GATED_WIDTH = 96  # narrower tiles would read x from L2 for longer than they multiply
MIN_SPLIT_WIDTH, MAX_SPLIT_WIDTH = 96, 192  # outputs of a tile of `split_k_cuda`; with 256, cuBLAS is faster
MIN_SPLIT_INPUTS = 8192  # measured with 4,096 and 12,288
SPLIT_FLAGS = 16  # per tile: two programs of eight warps
MIN_SPLIT_ROWS = 209  # with fewer, `split_k_cuda` takes as long as with 256: 192 rows 54.7 instead of 46.6 us
MAX_ADAPTED_ROWS = 64  # rows whose adapters' part is added in the product's launch
FIXED_ROWS = 64  # maximum rows of the tiles of deterministic routers
SHARED_BYTES = 227 << 10  # shared memory of a multiprocessor
MAX_SPLITS = 16  # maximum programs that share a sum (split K)
# Rows and outputs of tiles for many rows, and the share of the tensor cores' speed that they reach: small tiles are
# bound by reads from L2.
ORDERED_BLOCKS = ((128, 128, 0.96), (256, 128, 1.0), (64, 128, 0.66), (64, 64, 0.47))
CUDA_ROWS = {192: 0.99, 256: 1.03}  # rows of a tile of `ordered_cuda`, and the same share
# Columns of a tile of 128 x 256 that take as long as adding a second slice, and as adding slices of other programs.
SERIAL_COLUMNS, PARALLEL_COLUMNS = 500, 500


@dataclass(frozen=True)
class SkinnyGemmTiles:
    """Tiles for up to `block_m` rows.

    block_n: rows of W per program; in a gated product, of gate and up each.
    block_k: columns per step.
    splits: programs that share a sum (split K).
    ahead: whether the first step of W is read before the wait.
    stages, warps: Triton's num_stages and num_warps.
    last: columns at the start of each split that are multiplied last, without reading them before the wait.
    maps_x: whether x is read through a tensor map, which is slow for rows beyond the end of x; else by pointers.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    ahead: bool
    stages: int
    warps: int
    last: int = 0
    maps_x: bool = True

    def span(self, k: int) -> int:
        """Return the columns per program, including zeros after the last."""
        return cdiv(k, self.splits * self.block_k) * self.block_k

    @property
    def columns_ahead(self) -> int:
        return self.block_k if self.ahead else 0


def skinny_gemm_tiles(rows: int, n: int, k: int) -> SkinnyGemmTiles | None:
    """Return tiles for a weight [n, k], measured on an H200 (tests/bench/RESULTS.md); None if it does not fit."""
    if rows > MAX_ROWS or k % INPUT_STEP:
        return None
    block_m = max(16, next_power_of_2(rows))
    tiles = cdiv(n, 64)
    if tiles > MULTIPROCESSORS:
        # With many rows of W, the wait for the first columns is negligible.
        if block_m == 128:
            stages = 3 if cdiv(n, 128) > MULTIPROCESSORS else 5  # two programs per multiprocessor, or one
            return SkinnyGemmTiles(block_m, 128, 64, splits=1, ahead=False, stages=stages, warps=4)
        return SkinnyGemmTiles(block_m, 128, 128, splits=1, ahead=False, stages=4, warps=8 if block_m == 64 else 4)
    # One program per multiprocessor, with all of its shared memory.
    block_k = 256 if block_m <= 32 and (k % 256 == 0 or k % 128) else 128
    splits = 1
    while 2 * splits * tiles <= MULTIPROCESSORS and k % (2 * splits * block_k) == 0 and splits < MAX_SPLITS:
        splits *= 2
    if block_m == 128 and splits * tiles < 0.9 * MULTIPROCESSORS:
        return None  # bound by tensor cores, so idle multiprocessors would cost time
    ahead = block_m == 16 and k // splits > block_k
    return SkinnyGemmTiles(block_m, 64, block_k, splits, ahead, stages=5 if block_m == 64 else 4, warps=4)


def summing_programs(programs: int, max_loras: int) -> int:
    """Return the programs that compute A x of adapters, in a launch of `programs` others: those for which the last wave
    has room, at least 4. If the tables hold more than 8 adapters, at least 32, although the product then starts later
    on some multiprocessors."""
    return max(4 if max_loras <= 8 else 32, min(32, -programs % MULTIPROCESSORS))


def up_columns(tiles: SkinnyGemmTiles, rank: int, max_loras: int) -> int:
    """Return the columns of B that a program reads at once for each row; 0: the tensor core multiplies by the matrices
    of all adapters that the rows have.

    The tensor core is faster for more than 16 rows or columns, unless the rows may have many adapters: with one or four
    adapters of rank 16, the four products of a layer of Llama-8B take 130 us for 32 rows instead of 136 (H200).

    rank: maximum rank of the tables.
    max_loras: number of adapters that the tables hold.
    """
    if tiles.block_m > 32 or (max_loras <= 8 and max(rank, tiles.block_m) > 16):
        return 0
    return min(16, (1 << 14) // (tiles.block_m * tiles.block_n))


@dataclass(frozen=True)
class SumOrder:
    """The order of additions of a weight's products in deterministic engines, for any number of rows. The tensor core
    adds 16 columns at a time to a sum, in the order of columns, for every size of tile.

    splits: slices of K. Each is summed apart; the sums are added in order of slices.
    span: columns per slice, including zeros after the last.
    last: columns at the start of a slice that are multiplied last.
    """

    splits: int
    span: int
    last: int


def sum_order(n: int, k: int) -> SumOrder:
    """Return the order for a weight [n, k]: that of its fastest tiles for up to 16 rows."""
    tiles = skinny_gemm_tiles(1, n, k)
    assert tiles is not None, "k is a multiple of INPUT_STEP"
    return SumOrder(tiles.splits, tiles.span(k), tiles.columns_ahead)


def ordered_tiles(rows: int, n: int, k: int) -> SkinnyGemmTiles | None:
    """Return tiles for `rows` rows that add in the order `sum_order(n, k)`; None for more rows than fit a tile."""
    if rows > MAX_ROWS:
        return None
    order = sum_order(n, k)
    tiles = skinny_gemm_tiles(rows, n, k) or SkinnyGemmTiles(MAX_ROWS, 64, 128, 1, False, stages=4, warps=4)
    last = 0 if tiles.ahead else order.last
    return replace(tiles, splits=order.splits, last=last, maps_x=fills_tile(rows))


@dataclass(frozen=True)
class OrderedTiles:
    """Tiles for many rows: `block_m` rows by `block_n` rows of W, `block_k` columns per step.

    parallel: one program per slice of K and tile, if tiles alone do not fill the device. Else a program computes the
        slices one after another.
    stages, warps: Triton's num_stages and num_warps.
    """

    block_m: int
    block_n: int
    block_k: int
    parallel: bool
    stages: int
    warps: int

    def count(self, rows: int, n: int) -> int:
        """Return the number of tiles of a product."""
        return cdiv(rows, self.block_m) * cdiv(n, self.block_n)


def many_ordered_tiles(rows: int, n: int, k: int) -> OrderedTiles:
    """Return tiles for more rows than `ordered_tiles` has tiles for, by their time."""
    return min(_ordered_choices(rows, n, k), key=lambda choice: choice[0])[1]


def _ordered_choices(rows: int, n: int, k: int) -> list[tuple[float, OrderedTiles]]:
    """Return the possible tiles, each with its time: waves times numbers in a tile times columns over the share of the
    tensor cores' speed."""
    splits, choices = sum_order(n, k).splits, []
    for block_m, block_n, share in ORDERED_BLOCKS:
        for parallel in (False, True) if splits > 1 else (False,):
            tiles = OrderedTiles(block_m, block_n, INPUT_STEP, parallel, 4, 8 if block_m * block_n > 1 << 13 else 4)
            programs = tiles.count(rows, n) * (splits if parallel else 1)
            if parallel and programs > MULTIPROCESSORS:
                continue  # partial sums would take memory for no gain
            if not parallel and splits > 1 and block_m > 128:
                continue  # two sums do not fit in registers
            columns = k / splits / share if parallel else k / share + SERIAL_COLUMNS * (splits - 1)
            time = cdiv(programs, MULTIPROCESSORS) * block_m * block_n * columns
            choices.append((time + (256 * 128 * PARALLEL_COLUMNS if parallel else 0), tiles))
    return choices


@cache
def ordered_cuda_rows(rows: int, n: int, k: int) -> int | None:
    """Return the rows of a tile of `ordered_cuda`; None if Triton's kernels are faster."""
    if rows <= MAX_ROWS:
        return None
    clusters, splits = MULTIPROCESSORS // 2, sum_order(n, k).splits  # clusters of two programs, of 128 outputs each

    def time(tile_rows: int) -> float:
        columns = k / CUDA_ROWS[tile_rows] + SERIAL_COLUMNS * (splits - 1)
        return cdiv(cdiv(rows, tile_rows) * cdiv(n, 256), clusters) * tile_rows * 128 * columns

    best = min(CUDA_ROWS, key=time)
    return best if time(best) < min(choice[0] for choice in _ordered_choices(rows, n, k)) else None


def ordered_cuda_stages(rows: int) -> int:
    """Return the stages of `ordered_cuda` that fit in shared memory, beside 8 KB for results and barriers."""
    return min(8, (SHARED_BYTES - 8192 - 256) // ((rows + 128) * INPUT_STEP * 2))


def fills_tile(rows: int) -> bool:
    """Return whether `rows` rows fill Triton's tile enough to be as fast as cuBLAS. The TMA unit fills rows beyond the
    end of x with zeros more slowly than it loads rows: 72 rows take 1.3 times as long as 128, and 1.3 to 1.6 times as
    long as with cuBLAS (H200, EXPERIMENTS.md)."""
    block_m = next_power_of_2(rows)
    return block_m <= 32 or (4 * rows >= 3 * block_m if block_m == 64 else 8 * rows >= 7 * block_m)


def gated_tiles(rows: int, n: int, k: int) -> SkinnyGemmTiles | None:
    """Return tiles for a gated product with weight [n, k] and up to MAX_ROWS rows; None if it does not fit. A program
    has 64 gate rows and 64 up rows, the size of the tensor core's first operand."""
    tiles = skinny_gemm_tiles(rows, n, k)
    return None if tiles is None or tiles.block_n < 128 else replace(tiles, block_n=64, warps=4)


@cache
def gated_width(n: int) -> int | None:
    """Return the rows of W in a tile of `gated_rows_cuda` for a gated product with N outputs; None if it is not
    supported, or no faster than with tiles of 128. Time is proportional to the waves of tiles times their width. Tiles
    come in pairs; among equal times the widest tile wins, because it reads x least often."""
    if n % 8 or n > MAX_GATED_OUTPUTS:
        return None

    def cost(width: int) -> int:
        return cdiv(cdiv(2 * n, width), MULTIPROCESSORS // 2 * 2) * width

    best = min(range(MAX_GATED_WIDTH, MIN_GATED_WIDTH - 1, -16), key=cost)
    return best if cost(best) < cost(2 * 64) else None


@cache
def split_width(n: int, k: int) -> int | None:
    """Return the number of outputs per tile of `split_k_cuda` for a weight [n, k]; None if it is not supported. Four
    programs share a tile, and all tiles are in one wave. With few inputs, the exchange of sums makes it slower than
    cuBLAS."""
    width = cdiv(cdiv(n, MULTIPROCESSORS // 4), 16) * 16
    served = n % 8 == 0 and k >= MIN_SPLIT_INPUTS and k % INPUT_STEP == 0
    return width if served and MIN_SPLIT_WIDTH <= width <= MAX_SPLIT_WIDTH else None


def wgmma_stages(rows: int, width: int) -> int:
    """Return the number of stages of `wgmma_cuda` that fit in shared memory. A stage has 64 inputs of `rows` rows of x
    and `width` rows of W."""
    return min(8, SHARED_BYTES // stage_bytes(rows, width))


def stage_bytes(rows: int, width: int) -> int:
    """Return the shared memory of one stage: inputs of 2 bytes, and two barriers."""
    return (rows + width) * INPUT_STEP * 2 + 16


def one_row_bytes(n: int, k: int, blocks: int) -> int | None:
    """Return the shared memory of each of `blocks` thread blocks of `one_row_cuda` for a weight [n, k]: its rows of W
    with 16 bytes of padding each, x, and barriers. None if it does not fit."""
    rows = cdiv(n, blocks)
    needed = rows * (2 * k + 16) + 2 * k + 8 * cdiv(rows, 16)
    return needed if blocks <= n and k > 0 and k % 32 == 0 and needed <= SHARED_BYTES else None


def workspace_size(shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return cells and tickets for weights of these shapes [N, K]."""
    needed: list[tuple[int, int]] = []
    for n, k in shapes:
        if (width := split_width(n, k)) is not None:
            tiles_of_w = cdiv(n, width)
            needed.append((tiles_of_w * width * MAX_WGMMA_ROWS, tiles_of_w * SPLIT_FLAGS))
        for tiles in (skinny_gemm_tiles(rows, n, k) for rows in (16, 32, 64, MAX_ROWS)):
            if tiles is not None and tiles.splits > 1:
                tiles_of_w = cdiv(n, tiles.block_n)
                needed.append((tiles_of_w * tiles.splits * tiles.block_n * tiles.block_m, tiles_of_w))
    return largest(needed)


def ordered_workspace_size(shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return cells and tickets for deterministic products with weights of these shapes [N, K], any number of rows."""
    biggest = max(block_m * block_n for block_m, block_n, _ in ORDERED_BLOCKS)
    needed = [(MULTIPROCESSORS * biggest, MULTIPROCESSORS)]  # of `many_ordered_tiles`: programs of at most one wave
    for n, k in shapes:
        for rows in (16, 32, 64, MAX_ROWS) if k % INPUT_STEP == 0 else ():
            if (tiles := ordered_tiles(rows, n, k)) is not None and tiles.splits > 1:
                tiles_of_w = cdiv(n, tiles.block_n)
                needed.append((tiles_of_w * tiles.splits * tiles.block_n * tiles.block_m, tiles_of_w))
    return largest(needed)
