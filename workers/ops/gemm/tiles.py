"""How products of few rows and weights of 16 bits are cut into programs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workers.ops.blocks import cdiv, next_power_of_2

MAX_ROWS = 128  # beyond them the library's products are faster, see tests/bench/RESULTS.md
MAX_GATED_ROWS = 256  # of a gated product, which saves a kernel
FIXED_ROWS = 64  # in a launch of `fixed_rows`
MULTIPROCESSORS = 132  # of an H200
SHARED_BYTES = 227 << 10  # memory of one, for all programs on it
MAX_SPLITS = 16


@dataclass(frozen=True)
class SkinnyGemmTiles:
    """How up to block_m rows are multiplied.

    block_n: rows of W of a program; of a gated product rows of gates, and as many that they gate.
    block_k: columns of a step.
    splits: programs that share the columns of a tile.
    ahead: whether the first step's columns of W are read before the wait.
    stages, warps: Triton's.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    ahead: bool
    stages: int
    warps: int

    def span(self, k: int) -> int:
        """Columns of a program."""
        return k // self.splits

    @property
    def columns_ahead(self) -> int:
        return self.block_k if self.ahead else 0


def skinny_gemm_tiles(rows: int, n: int, k: int) -> SkinnyGemmTiles | None:
    """The table, measured on an H200 (tests/bench/RESULTS.md), for a weight [n, k]; None if it does not fit."""
    if rows > MAX_ROWS or k % 128:
        return None
    block_m = max(16, next_power_of_2(rows))
    tiles = cdiv(n, 64)
    if tiles > MULTIPROCESSORS:
        # A long W hides the wait for its first columns by itself.
        if block_m == 128:
            stages = 3 if cdiv(n, 128) > MULTIPROCESSORS else 5  # two programs to a multiprocessor, or one
            return SkinnyGemmTiles(block_m, 128, 64, 1, False, stages, warps=4)
        return SkinnyGemmTiles(block_m, 128, 128, 1, False, stages=4, warps=8 if block_m == 64 else 4)
    # A program to a multiprocessor, with all of its shared memory.
    block_k = 256 if block_m <= 32 and k % 256 == 0 else 128
    splits = 1
    while 2 * splits * tiles <= MULTIPROCESSORS and k % (2 * splits * block_k) == 0 and splits < MAX_SPLITS:
        splits *= 2
    if block_m == 128 and splits * tiles < 0.9 * MULTIPROCESSORS:
        return None  # here multiplying counts, and each multiprocessor that has nothing to do
    ahead = block_m == 16 and k // splits > block_k
    return SkinnyGemmTiles(block_m, 64, block_k, splits, ahead, stages=5 if block_m == 64 else 4, warps=4)


def gated_tiles(rows: int, n: int, k: int) -> SkinnyGemmTiles | None:
    """The same for the gates and what they gate in one weight [n, k], up to MAX_GATED_ROWS: a program has 64 rows of
    each; None where it would have fewer, since the matrix unit takes so many."""
    tiles = skinny_gemm_tiles(min(rows, MAX_ROWS), n, k)
    if rows > MAX_GATED_ROWS or tiles is None or tiles.block_n < 128:
        return None
    if rows > MAX_ROWS:
        return SkinnyGemmTiles(MAX_GATED_ROWS, 64, 64, 1, False, stages=4, warps=8)
    return replace(tiles, block_n=64, warps=4)


def workspace_size(shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Cells and tickets for weights of these shapes [N, K]."""
    cells = num_tiles = 0
    for n, k in shapes:
        for tiles in (skinny_gemm_tiles(rows, n, k) for rows in (16, 32, 64, MAX_ROWS)):
            if tiles is not None and tiles.splits > 1:
                tiles_of_w = cdiv(n, tiles.block_n)
                num_tiles = max(num_tiles, tiles_of_w)
                cells = max(cells, tiles_of_w * tiles.splits * tiles.block_n * tiles.block_m)
    return cells, num_tiles
