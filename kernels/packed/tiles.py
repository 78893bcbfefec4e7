"""Tile sizes of products with low-bit weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.gemm.blocks import cdiv, next_power_of_2
from aerie.kernels.packed.cuda.tiles import SHARED_SUMS
from aerie.kernels.packed.weight import TILE

MAX_STREAM_ROWS = 32  # maximum rows of `stream_triton`
MAX_BLOCK_ROWS = 512  # with more, dequantising and cuBLAS are faster
FIXED_ROWS = 32  # maximum rows of a program of deterministic products
FIXED_BLOCKS = 16  # maximum blocks of as many rows per launch
_MAX_CELLS = 16 << 20  # 16-bit numbers dequantised at once; they stay in L2


@dataclass(frozen=True)
class StreamTiles:
    """Tiles of `aerie.kernels.packed.stream_triton`.

    row_tiles: tiles of 8 rows.
    warps_n: warps with different outputs, 64 each; 2 for a gated product (gate and up).
    warps_k: warps that share a sum.
    splits: programs that share a sum (split K).
    chunks: chunks of 64 inputs that a warp loads at once.
    """

    row_tiles: int
    warps_n: int
    warps_k: int
    splits: int
    chunks: int

    def steps(self, k: int) -> int:
        """Return the number of sequential loads of a warp."""
        return -(-k // (64 * self.chunks * self.warps_k * self.splits))

    def part_cells(self, n: int) -> int:
        """Floats of partial sums."""
        parts = cdiv(n, TILE * self.warps_n) * self.splits if self.splits > 1 else 0
        return parts * TILE * self.warps_n * 8 * self.row_tiles

    def workspace_size(self, n: int, blocks: int) -> tuple[int, int]:
        """Return floats of partial sums, and tickets, of blocks of rows that run side by side."""
        return blocks * self.part_cells(n), blocks * cdiv(n, TILE * self.warps_n) if self.splits > 1 else 0


@dataclass(frozen=True)
class BlockTiles:
    """Tiles of `aerie.kernels.packed.blocks_triton`: 64 outputs by `block_m` rows.

    paired: twice as many outputs, for gate and up projections.
    splits: programs that share a sum (split K).
    stages: stages of the load pipeline.
    chunks: chunks of 64 inputs multiplied at once: 1 or 2.
    scaled_sums: multiply the sum of `chunks` by its scales in float32; else weights are rounded with their scale.
    direct: read unordered rows, 4 bytes at a time; else rows are from `order_rows`.
    """

    block_m: int
    paired: bool
    splits: int
    stages: int
    chunks: int = 1
    scaled_sums: bool = False
    direct: bool = False

    def span(self, k: int) -> int:
        """Return the number of chunks per program."""
        return cdiv(cdiv(k, TILE * self.chunks), self.splits) * self.chunks

    def scales_sums(self, k: int, group: int) -> bool:
        """Return whether sums are scaled instead of weights. This needs `scaled_sums`, and one scale for inputs that
        are multiplied at once."""
        return self.scaled_sums and (group == k or group % (TILE * self.chunks) == 0)

    def part_cells(self, rows: int, n: int) -> int:
        """Floats of partial sums."""
        outputs = TILE * (1 + self.paired)
        return cdiv(n, outputs) * cdiv(rows, self.block_m) * self.splits * outputs * self.block_m


@dataclass(frozen=True)
class BlockPlan:
    """A rule for the `BlockTiles` of up to 64 rows: steps of 128 inputs, with `scaled_sums`.

    paired: as in `BlockTiles`.
    programs: minimum programs, for which sums are split.
    max_direct_rows: maximum rows with `direct`.
    """

    paired: bool
    programs: int
    max_direct_rows: int = 32

    def tiles(self, rows: int, n: int, k: int, gated: bool) -> BlockTiles | None:
        """Return tiles for a weight [n, k]; None for a gated product that does not fit."""
        if gated and (not self.paired or n % (2 * TILE)):
            return None
        outputs = TILE * (1 + self.paired)
        splits = _splits(cdiv(n, outputs), cdiv(k, 4 * TILE), self.programs)
        block_m, direct = max(16, next_power_of_2(rows)), rows <= self.max_direct_rows
        return BlockTiles(block_m, self.paired, splits, stages=4, chunks=2, scaled_sums=True, direct=direct)


# By rows, rounded up to a power of two, and kind of product, for int4 in groups of 128 on an H200; others use the rules
# below. A layer of Llama-3.1-8B takes 67, 86 and 117 us at 12, 24 and 48 rows; with the rules below 86, 98 and 223 us
# (`tests.bench packed`).
_PLANS: dict[tuple[int, str], BlockPlan] = {
    (16, "gated"): BlockPlan(True, 480),
    (32, "gated"): BlockPlan(True, 240, max_direct_rows=0),
    (32, "more outputs"): BlockPlan(True, 240),
    (32, "more inputs"): BlockPlan(False, 480),
    (64, "gated"): BlockPlan(True, 240, max_direct_rows=0),
    (64, "more outputs"): BlockPlan(False, 240),
    (64, "as many"): BlockPlan(False, 240),
    (64, "more inputs"): BlockPlan(False, 240),
}
_MEASURED_GROUP = 128  # inputs; smaller groups were not measured

# By tiles of 8 rows: warps that share a sum, chunks that a warp loads at once, minimum programs. Measured on an H200
# and an H100 (`tests.bench linear`).
_STREAM = {1: (8, 2, 240), 2: (4, 1, 240), 4: (4, 2, 240)}
_GATED = {1: (2, 2, 380), 2: (4, 1, 380), 4: (2, 2, 380)}


def stream_tiles(rows: int, n: int, k: int) -> StreamTiles | None:
    """Return tiles for a weight [n, k]; None for too many rows."""
    if rows > MAX_STREAM_ROWS:
        return None
    row_tiles = _row_tiles(rows)
    warps, chunks, programs = _STREAM[row_tiles]
    splits = _splits(cdiv(n, TILE), cdiv(k, TILE * warps * chunks), programs)
    return StreamTiles(row_tiles, 1, warps, splits, chunks)


def gated_tiles(rows: int, n: int, k: int) -> StreamTiles | None:
    """Return tiles for a gated product with weight [n, k]; None if it does not fit."""
    if rows > MAX_STREAM_ROWS or n % (2 * TILE):
        return None
    row_tiles = _row_tiles(rows)
    warps, chunks, programs = _GATED[row_tiles]
    splits = _splits(n // 2 // TILE, cdiv(k, TILE * warps * chunks), programs)
    return StreamTiles(row_tiles, 2, warps, splits, chunks)


def _row_tiles(rows: int) -> int:
    return max(1, next_power_of_2(rows) // 8)


def product_tiles(
    rows: int, n: int, k: int, gated: bool, code: str = "int4", group: int = _MEASURED_GROUP
) -> StreamTiles | BlockTiles | None:
    """Return tiles for a weight [n, k]; None if it is to be dequantised, or if a gated product does not fit.

    code, group: see `aerie.kernels.packed.weight.PackedWeight`.
    """
    bucket = max(8, next_power_of_2(rows))
    form = "gated" if gated else "more outputs" if n > k else "more inputs" if k > n else "as many"
    is_measured = code == "int4" and (group == k or group % _MEASURED_GROUP == 0)
    plan = _PLANS.get((bucket, form)) if is_measured else None
    tiles = None if plan is None else plan.tiles(rows, n, k, gated)
    if tiles is not None:
        return tiles
    if gated:
        return gated_tiles(rows, n, k) or gated_block_tiles(rows, n, k)
    return stream_tiles(rows, n, k) or block_tiles(rows, n, k)


def fixed_tiles(rows: int, n: int, k: int) -> StreamTiles:
    """Return the tiles of deterministic products, for more than FIXED_ROWS rows in blocks. All add in the same order: a
    tile of 8 rows has tensor core instructions of its own."""
    tiles = stream_tiles(FIXED_ROWS, n, k)
    assert tiles is not None
    return replace(tiles, row_tiles=_row_tiles(min(rows, FIXED_ROWS)))


def block_tiles(rows: int, n: int, k: int) -> BlockTiles | None:
    """Return tiles for a weight [n, k]; None for too many rows."""
    if rows > MAX_BLOCK_ROWS:
        return None
    block_m = min(128, next_power_of_2(rows))
    blocks = cdiv(rows, block_m) * cdiv(n, TILE)
    return BlockTiles(block_m, False, _splits(blocks, cdiv(k, TILE * 8), MULTIPROCESSORS), stages=4)


def gated_block_tiles(rows: int, n: int, k: int) -> BlockTiles | None:
    """Return tiles for a gated product with weight [n, k]; None if it does not fit."""
    if rows > MAX_BLOCK_ROWS or n % (2 * TILE):
        return None
    return BlockTiles(min(128, next_power_of_2(rows)), True, 1, stages=3)


def _splits(tiles: int, steps: int, programs: int) -> int:
    """Return the number of programs that share a sum: the smallest power of two that gives `programs` programs of at
    least one step."""
    splits = 1
    while splits * tiles < programs and 2 * splits <= steps:
        splits *= 2
    return splits


def outputs_at_once(n: int, k: int) -> int:
    """Return the number of outputs of a weight [n, k] that are dequantised at once."""
    return min(cdiv(n, TILE) * TILE, max(TILE, _MAX_CELLS // k // TILE * TILE))


def packed_workspace_size(shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return cells and tickets for weights of these shapes [N, K]."""
    cells, num_tickets = SHARED_SUMS
    for n, k in shapes:
        fixed = fixed_tiles(FIXED_ROWS, n, k)
        cells = max(cells, cdiv(min(n, outputs_at_once(n, k)) * k, 2), fixed.part_cells(n))
        num_tickets = max(num_tickets, cdiv(n, TILE), fixed.workspace_size(n, FIXED_BLOCKS)[1])
        for rows in (8, 16, *range(32, 129, 32), *range(256, MAX_BLOCK_ROWS + 1, 128)):
            for gated, group in product((False, True), (_MEASURED_GROUP, 1)):
                tiles = product_tiles(rows, n, k, gated, "int4", group)
                if isinstance(tiles, StreamTiles):
                    cells = max(cells, tiles.part_cells(n))
                elif tiles is not None and tiles.splits > 1:
                    cells = max(cells, tiles.part_cells(rows, n))
                    num_tickets = max(num_tickets, cdiv(n, TILE) * cdiv(rows, tiles.block_m))
    return cells, num_tickets
