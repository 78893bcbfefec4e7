"""Sizes of `gated_mlp.cu` and of `one_row_experts.cu`."""

from dataclasses import dataclass
from functools import cache

from aerie.kernels.experts.gated import GatedActivation
from aerie.kernels.experts.weights import ExpertSizes
from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.gemm.tiles import SHARED_BYTES
from aerie.kernels.packed.weight import TILE

GROUP = 128  # inputs that share a scale
MAX_ROWS = 4  # with 8, two launches are faster
_TILE_ROWS = 8
_QUAD, _SLICE = 256, 16  # inputs and outputs of an item
_ITEM = 2048 + 64  # bytes
_MAX_WARPS, _MAX_RANGES, _MIN_STAGES = 16, 8, 3
_MAX_STAGES = 6


@dataclass(frozen=True)
class GatedMLPTiles:
    """Tiles of the kernel of a whole gated MLP.

    size, width: sizes of rows and of inner activations.
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


EXPERT_GROUP = 32  # inputs that share a scale
_CODES, _SCALES = 2048, 256  # bytes of 64 outputs by 64 inputs
_STATIC_BYTES = 128  # static shared memory
_RINGS, _MAX_DEPTH = 4, 32  # ring buffers of a block, and maximum units in each
_MAX_SIZE = 4096  # each thread copies at most 16 bytes of the row
_UNITS = (3, 4, 2)  # chunks of 64 inputs in a unit, in order of preference


@dataclass(frozen=True)
class OneRowTiles:
    """Tiles of the kernel of one row's experts (`one_row_experts.cu`). Its blocks divide the weights in units of 64
    outputs by 64 * `unit` inputs, which they copy to ring buffers in shared memory.

    size, width: sizes of a row and of an expert.
    slots, used: experts of the row, and the maximum of them on this rank.
    blocks: thread blocks, one for each multiprocessor.
    unit: chunks of 64 inputs in a unit.
    rings, depth: ring buffers of a block, and units in each.
    """

    size: int
    width: int
    slots: int
    used: int
    blocks: int
    unit: int
    rings: int
    depth: int

    @property
    def threads(self) -> int:
        return 128 * self.rings + 32

    @property
    def down_units(self) -> int:
        """Maximum units of down projections that a block computes. All have room in its rings at once."""
        return cdiv(self.used * (self.size // TILE) * (self.width // TILE // self.unit), self.blocks)

    @property
    def tiles(self) -> int:
        """Maximum pairs of gate and up tiles of which a block computes a part."""
        steps = self.size // TILE // self.unit
        return max(2, cdiv(cdiv(self.used * (self.width // TILE) * steps, self.blocks) - 1, steps) + 1)

    @property
    def shared_bytes(self) -> int:
        ring_slots = self.rings * self.depth
        inputs = 2 * (self.size + self.down_units * TILE * self.unit)
        return ring_slots * ((_CODES + _SCALES) * self.unit + 16) + inputs + self.tiles * self.rings * 256

    @property
    def workspace(self) -> tuple[int, int]:
        """Float32 cells and tickets."""
        return self.blocks * 128 * (self.tiles + 1), 2 + self.size // TILE

    def defines(self, activation: GatedActivation) -> tuple[tuple[str, int], ...]:
        """Return the macros of the kernel."""
        return (
            ("SIZE", self.size),
            ("WIDTH", self.width),
            ("UNIT", self.unit),
            ("RINGS", self.rings),
            ("DEPTH", self.depth),
            ("KEPT", self.down_units),
            ("TILES", self.tiles),
            ("SLOTS", self.slots),
            ("USED", self.used),
            ("CLAMPED", int(activation.limit is not None)),
            ("CUBED", int(activation.cubic != 0.0)),
            ("HALF", 0),
            ("ROUNDED", 0),
            ("ZEROS", 0),
            ("SHARED_BYTES", self.shared_bytes),
        )


@cache
def one_row_tiles(sizes: ExpertSizes, blocks: int) -> OneRowTiles | None:
    """Return the sizes for a layer's experts, with rings as deep as shared memory allows; None if the kernel does not
    support them. It demands:

    - rows and experts of whole tiles, and no shared experts;
    - at least as many blocks as the down projection has tiles of outputs, so that a block has parts of two at most;
    - units for every block even if only one expert is in use;
    - room in a block's rings for all of its down units at once.
    """
    size, width = sizes.size, sizes.width
    if size % TILE or width % TILE or size // TILE > blocks or size > _MAX_SIZE or sizes.num_shared:
        return None
    for unit in _UNITS:
        if size // TILE % unit or width // TILE % unit or size // TILE * (width // TILE) // unit < blocks:
            continue
        by_depth = (
            OneRowTiles(size, width, sizes.experts_per_token, sizes.max_used(1), blocks, unit, _RINGS, depth)
            for depth in range(_MAX_DEPTH, 1, -1)
        )
        deepest = next((tiles for tiles in by_depth if tiles.shared_bytes <= SHARED_BYTES - _STATIC_BYTES), None)
        if deepest is not None and deepest.down_units <= deepest.rings * deepest.depth:
            return deepest
    return None
