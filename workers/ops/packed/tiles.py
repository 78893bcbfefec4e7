"""Tile sizes of products with weights of few bits."""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.ops.blocks import cdiv, next_power_of_2
from workers.ops.gemm.tiles import MULTIPROCESSORS

MAX_STREAM_ROWS = 32
MAX_BLOCK_ROWS = 512  # dequantising and the library are faster beyond
FIXED_ROWS = 32  # per launch of deterministic products
_MAX_CELLS = 16 << 20  # of 16 bits: outputs that are dequantised at once stay in L2
_TILE = 64  # outputs, and inputs of a chunk


@dataclass(frozen=True)
class StreamTiles:
    """Tiles of `workers.ops.packed.stream_triton`.

    row_tiles: tiles of 8 rows.
    warps_n: warps with different outputs, 64 each; for a gated product 2, gate and up projection.
    warps_k: warps that share a sum.
    splits: programs that share a sum (split K).
    chunks: of 64 inputs, loaded at once by a warp.
    """

    row_tiles: int
    warps_n: int
    warps_k: int
    splits: int
    chunks: int

    def steps(self, k: int) -> int:
        """Loads of a warp, one after another."""
        return -(-k // (64 * self.chunks * self.warps_k * self.splits))

    def part_cells(self, n: int) -> int:
        """Floats of partial sums."""
        parts = cdiv(n, _TILE * self.warps_n) * self.splits if self.splits > 1 else 0
        return parts * _TILE * self.warps_n * 8 * self.row_tiles


@dataclass(frozen=True)
class BlockTiles:
    """Tiles of `workers.ops.packed.blocks_triton`: 64 outputs by `block_m` rows.

    paired: 128 outputs; for a gated product 64 gate and 64 up projections.
    splits: programs that share a sum (split K).
    stages: of the pipeline.
    """

    block_m: int
    paired: bool
    splits: int
    stages: int

    def span(self, k: int) -> int:
        """Chunks per program."""
        return cdiv(cdiv(k, _TILE), self.splits)

    def part_cells(self, rows: int, n: int) -> int:
        """Floats of partial sums."""
        outputs = _TILE * (1 + self.paired)
        return cdiv(n, outputs) * cdiv(rows, self.block_m) * self.splits * outputs * self.block_m


# By tiles of 8 rows: warps that share a sum, chunks that a warp loads at once, and programs to have at least; set by
# sweeps on an H200 and an H100 (`tests.bench linear` measures the choice).
_STREAM = {1: (8, 2, 240), 2: (4, 1, 240), 4: (4, 2, 240)}
_GATED = {1: (2, 2, 380), 2: (4, 1, 380), 4: (2, 2, 380)}


def stream_tiles(rows: int, n: int, k: int) -> StreamTiles | None:
    """Return tiles for a weight [n, k]; None for too many rows."""
    if rows > MAX_STREAM_ROWS:
        return None
    row_tiles = _row_tiles(rows)
    warps, chunks, programs = _STREAM[row_tiles]
    splits = _splits(cdiv(n, _TILE), cdiv(k, _TILE * warps * chunks), programs)
    return StreamTiles(row_tiles, 1, warps, splits, chunks)


def gated_tiles(rows: int, n: int, k: int) -> StreamTiles | None:
    """Return tiles for a gated product with weight [n, k]; None if it does not fit."""
    if rows > MAX_STREAM_ROWS or n % (2 * _TILE):
        return None
    row_tiles = _row_tiles(rows)
    warps, chunks, programs = _GATED[row_tiles]
    splits = _splits(n // 2 // _TILE, cdiv(k, _TILE * warps * chunks), programs)
    return StreamTiles(row_tiles, 2, warps, splits, chunks)


def _row_tiles(rows: int) -> int:
    return max(1, next_power_of_2(rows) // 8)


def fixed_tiles(n: int, k: int) -> StreamTiles:
    """Return the tiles of deterministic products, for FIXED_ROWS rows."""
    tiles = stream_tiles(FIXED_ROWS, n, k)
    assert tiles is not None
    return tiles


def block_tiles(rows: int, n: int, k: int) -> BlockTiles | None:
    """Return tiles for a weight [n, k]; None for too many rows."""
    if rows > MAX_BLOCK_ROWS:
        return None
    block_m = min(128, next_power_of_2(rows))
    blocks = cdiv(rows, block_m) * cdiv(n, _TILE)
    return BlockTiles(block_m, False, _splits(blocks, cdiv(k, _TILE * 8), MULTIPROCESSORS), stages=4)


def gated_block_tiles(rows: int, n: int, k: int) -> BlockTiles | None:
    """Return tiles for a gated product with weight [n, k]; None if it does not fit."""
    if rows > MAX_BLOCK_ROWS or n % (2 * _TILE):
        return None
    return BlockTiles(min(128, next_power_of_2(rows)), True, 1, stages=3)


def _splits(tiles: int, steps: int, programs: int) -> int:
    """Programs that share a sum: the smallest power of two with so many programs, a step each at least."""
    splits = 1
    while splits * tiles < programs and 2 * splits <= steps:
        splits *= 2
    return splits


def outputs_at_once(n: int, k: int) -> int:
    """Outputs of a weight [n, k] that are dequantised at once."""
    return min(cdiv(n, _TILE) * _TILE, max(_TILE, _MAX_CELLS // k // _TILE * _TILE))


def packed_workspace_size(shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return cells and tickets for weights of these shapes [N, K]."""
    cells = num_tickets = 0
    for n, k in shapes:
        cells = max(cells, cdiv(min(n, outputs_at_once(n, k)) * k, 2))
        num_tickets = max(num_tickets, cdiv(n, _TILE))
        for rows in (8, 16, 32, FIXED_ROWS):
            for tiles in (stream_tiles(rows, n, k), gated_tiles(rows, n, k), fixed_tiles(n, k)):
                if tiles is not None:
                    cells = max(cells, tiles.part_cells(n))
        for rows in (*range(32, 129, 32), *range(256, MAX_BLOCK_ROWS + 1, 128)):
            for blocks in (block_tiles(rows, n, k), gated_block_tiles(rows, n, k)):
                if blocks is not None and blocks.splits > 1:
                    cells = max(cells, blocks.part_cells(rows, n))
                    num_tickets = max(num_tickets, cdiv(n, _TILE) * cdiv(rows, blocks.block_m))
    return cells, num_tickets
