"""Sizes of `gated_mlp.cu`."""

from dataclasses import dataclass
from functools import cache

from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.gemm.tiles import SHARED_BYTES

GROUP = 128  # inputs that share a scale
MAX_ROWS = 4  # with 8, two launches are faster
_TILE_ROWS = 8
_QUAD, _SLICE = 256, 16  # inputs and outputs of an item
_ITEM = 2048 + 64  # bytes
_MAX_WARPS, _MAX_RANGES, _MIN_STAGES = 16, 8, 3
_MAX_STAGES = 6


@dataclass(frozen=True)
class GatedMLPTiles:
    """size, width: sizes of rows and of inner activations.
    rows: 1, or for more rows 8.
    blocks: thread blocks, one for each multiprocessor.
    ranges: thread blocks that share a sum of the down projection.
    stages: items of each warp in shared memory.
    """

    size: int
    width: int
    rows: int
    blocks: int
    ranges: int
    stages: int

    @property
    def warps(self) -> int:
        return self.size // _QUAD

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def columns(self) -> int:
        """Thread blocks with different outputs of the down projection."""
        return self.size // _SLICE // self.warps

    @property
    def shared_bytes(self) -> int:
        own = cdiv(self.width // _QUAD, self.ranges)
        pitch, inner_pitch = (36, 576) if self.rows > 1 else (32, 512)
        parts = 2 * self.warps * self.rows * pitch * 4
        return self.warps * self.stages * _ITEM + parts + own * self.rows * (inner_pitch + 8)

    @property
    def words(self) -> int:
        """Words of mail: inner activations for each of `columns`, and sums of the ranges."""
        return self.rows * (self.columns * self.width // 2 + self.ranges * self.size)

    def defines(self) -> tuple[tuple[str, int], ...]:
        """Return the macros of the kernel."""
        return (
            ("SIZE", self.size),
            ("WIDTH", self.width),
            ("ROWS", self.rows),
            ("RANGES", self.ranges),
            ("STAGES", self.stages),
            ("HALF", 0),
            ("ROUNDED", 0),
            ("ZEROS", 0),
            ("SHARED_BYTES", self.shared_bytes),
        )


@cache
def gated_mlp_tiles(size: int, width: int, rows: int, blocks: int) -> GatedMLPTiles | None:
    """Return the sizes for `rows` rows; None if the kernel does not support them."""
    warps = size // _QUAD
    if size % _QUAD or width % _QUAD or not 8 <= warps <= _MAX_WARPS or not 1 <= rows <= MAX_ROWS:
        return None
    ranges = min(_MAX_RANGES, blocks // _SLICE, width // _QUAD)
    if ranges == 0:
        return None
    for stages in range(_MAX_STAGES, _MIN_STAGES - 1, -1):
        tiles = GatedMLPTiles(size, width, 1 if rows == 1 else _TILE_ROWS, blocks, ranges, stages)
        if tiles.shared_bytes <= SHARED_BYTES:
            return tiles
    return None


def gated_mlp_words(size: int, width: int) -> int:
    """Return the words of mail for any number of rows and blocks."""
    return _TILE_ROWS * (_SLICE * width // 2 + _MAX_RANGES * size) if size <= _MAX_WARPS * _QUAD else 0
