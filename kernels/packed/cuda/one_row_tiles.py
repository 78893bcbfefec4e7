"""Sizes of `one_row_experts.cu`."""

from dataclasses import dataclass
from functools import cache

from aerie.kernels.experts.gated import GatedActivation
from aerie.kernels.experts.weights import ExpertSizes
from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.gemm.tiles import SHARED_BYTES
from aerie.kernels.packed.weight import TILE

GROUP = 32  # inputs that share a scale
_CODES, _SCALES = 2048, 256  # bytes of 64 outputs by 64 inputs
_STATIC_BYTES = 128  # static shared memory
_RINGS, _MAX_DEPTH = 4, 32
_MAX_SIZE = 4096  # each thread copies at most 16 bytes of the row
_UNITS = (3, 4, 2)  # chunks of a unit, in order of preference


@dataclass(frozen=True)
class OneRowTiles:
    """size, width: sizes of a row and of an expert.
    slots, used: experts of the row, and the maximum of them on this rank.
    blocks: thread blocks, one for each multiprocessor.
    unit: chunks of 64 inputs in a unit.
    rings, depth: rings of units in shared memory, and units in each.
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
    def kept(self) -> int:
        """Units of the down projections that a block keeps in shared memory."""
        return cdiv(self.used * (self.size // TILE) * (self.width // TILE // self.unit), self.blocks)

    @property
    def tiles(self) -> int:
        """Maximum pairs of gate and up tiles of which a block computes a part."""
        steps = self.size // TILE // self.unit
        return max(2, cdiv(cdiv(self.used * (self.width // TILE) * steps, self.blocks) - 1, steps) + 1)

    @property
    def shared_bytes(self) -> int:
        ring_slots = self.rings * self.depth
        inputs = 2 * (self.size + self.kept * TILE * self.unit)
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
            ("KEPT", self.kept),
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
    """Return the sizes for a layer's experts; None if the kernel does not support them. Each block must have a unit of
    one expert, parts of at most two tiles of outputs, and down units that fit in shared memory."""
    size, width = sizes.size, sizes.width
    if size % TILE or width % TILE or size // TILE > blocks or size > _MAX_SIZE or sizes.num_shared:
        return None
    for unit in _UNITS:
        if size // TILE % unit or width // TILE % unit or size // TILE * (width // TILE) // unit < blocks:
            continue
        for depth in range(_MAX_DEPTH, 1, -1):
            tiles = OneRowTiles(size, width, sizes.experts_per_token, sizes.max_used(1), blocks, unit, _RINGS, depth)
            if tiles.shared_bytes <= SHARED_BYTES - _STATIC_BYTES:
                if tiles.kept <= _RINGS * depth:
                    return tiles
                break
    return None
