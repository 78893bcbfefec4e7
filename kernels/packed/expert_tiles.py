"""Tile sizes of `aerie.kernels.packed.experts_triton`."""

from dataclasses import dataclass, replace

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.experts.weights import ExpertSizes
from aerie.kernels.gemm.blocks import largest
from aerie.kernels.packed.cuda.gated_mlp_tiles import one_row_tiles
from aerie.kernels.packed.weight import BITS, TILE, PackedWeight

MAX_LISTED_ROWS = 1  # maximum rows that all go through each used expert
_ROWS_OF_ONE_TILE = 6.4  # up to this many rows per expert, one tile of 8 rows is faster than two
_MAX_SPLITS = 8  # maximum programs that share a sum
_SMALL_SHARED = 48 << 10  # bytes of shared memory that a program may use without opting in to more


def _sums_bytes(parts: int, warps: int) -> int:
    """Return the bytes of shared memory in `aerie.kernels.packed.sums_triton.sums_of_warps`."""
    step = 512 * warps
    while parts * step > 32 << 10 and parts > warps:
        parts //= 2
    return parts * step


def _chunk_bytes(weight: PackedWeight) -> int:
    """Return the bytes of shared memory for 64 outputs by 64 inputs: codes, and scales and zeros of each lane."""
    halves = (1 if weight.group % TILE == 0 else 2) * (1 if weight.zeros is None else 2)
    return 512 * (BITS[weight.code] + halves)


@dataclass(frozen=True)
class PackedTiles:
    """Tiles of one product.

    row_tiles: tiles of 8 rows.
    warps_n: warps with different outputs, 64 each; always 2 for gate and up projections, one each.
    warps_k: warps that share a sum.
    splits: programs that share a sum; for down projections of listed experts, each has some of the experts.
    stages: stages of the load pipeline in shared memory.
    scales_weights: scale weights instead of sums also with one tile of rows, as with more.
    """

    row_tiles: int
    warps_n: int = 2
    warps_k: int = 4
    splits: int = 1
    stages: int = 4
    scales_weights: bool = False

    def steps(self, k: int, splits: int = 1) -> int:
        """Return the number of sequential loads of a warp, of 64 inputs each. splits: programs that share the
        inputs."""
        return -(-k // (TILE * self.warps_k * splits))

    def stages_for(self, weight: PackedWeight) -> int:
        """Return `stages`, or fewer if the launch would fail. Triton 3.6 opts in to more than 48 KB of shared memory
        only if the stages exceed that; the memory of `sums_of_warps` (`sums`) is not counted."""
        sums, stages = _sums_bytes(4 * self.row_tiles, self.warps_n * self.warps_k), self.stages
        step = self.warps_n * self.warps_k * _chunk_bytes(weight)
        while stages > 2 and (stages - 1) * step <= _SMALL_SHARED < (stages - 1) * step + sums:
            stages -= 1
        return stages


@dataclass(frozen=True)
class PackedExpertTiles:
    """Tile sizes of both products of an expert layer."""

    gate_up: PackedTiles
    down: PackedTiles

    @property
    def block_m(self) -> int:
        """Rows per block."""
        return 8 * self.gate_up.row_tiles  # 8: N of mma.m16n8k16


def packed_expert_tiles(rows: int, sizes: ExpertSizes, deterministic: bool = False) -> PackedExpertTiles:
    """Return the tiles for `rows` rows: the fastest on an H200 with even routing (gpt-oss-20b, Qwen3.5-35B-A3B and a
    rank of DeepSeek-V3; `tests.bench packed_experts`). deterministic: whether a row must have the same result for any
    number of rows; then never tiles of 8 rows, which use other tensor core instructions."""
    if lists_experts(rows, deterministic):
        return _listed_tiles(rows, sizes)
    chunks = sizes.width // TILE
    row_tiles = 1 if rows * sizes.share <= _ROWS_OF_ONE_TILE else 2
    if deterministic or row_tiles > 1:
        # fewer warps wait for each other, so more programs fit per multiprocessor
        gate_up = PackedTiles(row_tiles, warps_k=2, stages=3, scales_weights=deterministic)
        warps_n, warps_k = (2, 2) if chunks > 4 else (1, _warps_k(chunks))
        return PackedExpertTiles(gate_up, replace(gate_up, warps_n=warps_n, warps_k=warps_k))
    used = sizes.used(rows)
    return PackedExpertTiles(_gate_up_tiles(used * chunks, sizes), _down_tiles(used * -(-sizes.size // TILE), chunks))


def _gate_up_tiles(programs: float, sizes: ExpertSizes) -> PackedTiles:
    """Return tiles for blocks of 8 rows. programs: used experts by 64 outputs."""
    is_short = sizes.size <= 32 * TILE
    few = programs < (3 if is_short else 6) * MULTIPROCESSORS
    return PackedTiles(1) if few else PackedTiles(1, warps_k=2, stages=3)


def _down_tiles(programs: float, chunks: int) -> PackedTiles:
    """Do `_gate_up_tiles` for down projections. chunks: number of chunks of 64 inputs."""
    is_short = chunks <= 8
    if programs < (15 if is_short else 6) * MULTIPROCESSORS:
        return PackedTiles(1, 1, _warps_k(chunks))
    if not is_short and programs < 10 * MULTIPROCESSORS:
        return PackedTiles(1, 2, 2, stages=3)
    return PackedTiles(1, 1, min(2, _warps_k(chunks)), stages=3)


def lists_experts(rows: int, deterministic: bool) -> bool:
    """Return whether all rows go through each used expert. Otherwise rows are sorted by expert."""
    return rows <= MAX_LISTED_ROWS and not deterministic


def _listed_tiles(rows: int, sizes: ExpertSizes) -> PackedExpertTiles:
    """Return the tiles. Fewer programs get more warps each, so that each multiprocessor has enough loads in flight."""
    used, chunks = sizes.used(rows), sizes.width // TILE
    programs = used * chunks
    gate_up = PackedTiles(1, warps_k=2 if programs >= 2.5 * MULTIPROCESSORS else 4)
    if programs < 0.7 * MULTIPROCESSORS and sizes.size > 8 * TILE:
        gate_up = PackedTiles(1, warps_k=2, splits=2)
    splits, pairs = 1, -(-sizes.size // (2 * TILE))
    while 2 * splits <= min(used, _MAX_SPLITS):
        splits *= 2
    warps_n = 1 if splits * pairs < 0.9 * MULTIPROCESSORS else 2
    down = PackedTiles(1, warps_n, min(_warps_k(chunks), 2 if chunks <= 8 else 4), splits=splits)
    if programs < 2.5 * MULTIPROCESSORS and chunks >= 16:
        # split sums, so that no multiprocessor has twice the work of another; and more warps per block of outputs
        gate_up, down = PackedTiles(1, warps_k=2, splits=2), replace(down, warps_k=8 // warps_n)
    return PackedExpertTiles(gate_up, down)


def _warps_k(chunks: int) -> int:
    """Return the number of warps that share `chunks` chunks of 64 inputs."""
    return 4 if chunks >= 4 else 2 if chunks >= 2 else 1


def packed_expert_workspace(sizes: ExpertSizes) -> tuple[int, int]:
    """Return float32 cells and tickets of a `Workspace` for the routing and all listed tiles."""
    listed = [partial_sizes(rows, sizes, _listed_tiles(rows, sizes)) for rows in range(1, MAX_LISTED_ROWS + 1)]
    one_row = one_row_tiles(sizes, MULTIPROCESSORS)
    return largest([(0, sizes.num_routed), *listed, *([] if one_row is None else [one_row.workspace])])


def partial_sizes(rows: int, sizes: ExpertSizes, tiles: PackedExpertTiles) -> tuple[int, int]:
    """Return cells and tickets that these tiles need."""
    needed = [(0, 1)]
    gate_up_places = sizes.max_used(rows) * sizes.width // TILE
    down_places = -(-sizes.size // (TILE * tiles.down.warps_n))
    for product, places in ((tiles.gate_up, gate_up_places), (tiles.down, down_places)):
        if product.splits > 1:
            needed.append((places * product.splits * product.row_tiles * 8 * product.warps_n * TILE, places))
    return largest(needed)
