"""FP8 weights, and tile sizes of the FP8 products."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.fp8.rows import GROUP
from aerie.kernels.gemm.blocks import cdiv, largest, next_power_of_2
from aerie.kernels.gemm.tiles import MAX_SPLITS, SHARED_BYTES

MAX_ROWS = 128  # limit of `aerie.kernels.fp8.gemm_triton`
MIN_WIDE_ROWS = 65  # with scales per group, `aerie.kernels.fp8.product_triton` is faster from here on
SCALE_ROWS = 64  # rows of W that share a scale; a checkpoint's block of 128 becomes two
MAX_AHEAD_ROWS = 8  # limit of `aerie.kernels.fp8.gemm_ahead_triton`
_ROUNDED = 8192  # numbers quantised at once by a program: 64 per thread


@dataclass(frozen=True)
class Fp8GemmTiles:
    """Tiles for up to `block_m` rows.

    block_n: rows of W per program; in a gated product, of gate and up each.
    splits: programs that share a sum (split K).
    ahead: groups of W's columns read before the PDL wait.
    stages, warps: Triton's num_stages and num_warps.
    last: groups at the start of each split that are multiplied last, without reading them before the wait.
    """

    block_m: int
    block_n: int
    splits: int
    ahead: int
    stages: int
    warps: int
    last: int = 0

    def span(self, k: int) -> int:
        """Groups of columns per program."""
        return k // GROUP // self.splits

    @property
    def for_fp8(self) -> bool:
        """Whether a program computes a whole group of output columns."""
        return self.block_n == GROUP


@dataclass(frozen=True)
class Fp8AheadTiles:
    """Tiles for up to `rows` rows. A program has SCALE_ROWS rows of W, and reads all of them before the PDL wait.

    together: groups of columns per load and per product, a power of two.
    splits: programs that share a sum (split K).
    """

    rows: int
    together: int
    splits: int

    def span(self, k: int) -> int:
        """Groups of columns per program."""
        return k // GROUP // self.splits

    def shared_bytes(self, k: int) -> int:
        """Shared memory of a program: W, x, and what the device reserves."""
        columns = self.rows * self.together
        return (self.span(k) * SCALE_ROWS + self.together * columns) * GROUP + 1024


@dataclass(frozen=True)
class Fp8SumOrder:
    """The order of additions of a weight's products in deterministic engines, for any number of rows.

    splits: slices of K. Each is summed apart, one group after another; the sums are added in order of slices.
    last: groups at the start of a slice that are multiplied last.
    """

    splits: int
    last: int


@dataclass(frozen=True)
class Fp8WideTiles:
    """Tiles for many rows: `block_m` rows by `block_n` rows of W per program.

    splits: programs that share a sum (split K).
    stages, warps: Triton's num_stages and num_warps.
    slices: slices of K that a program sums one after another.
    last: groups at the start of a slice that are multiplied last.
    """

    block_m: int
    block_n: int
    splits: int
    stages: int
    warps: int
    slices: int = 1
    last: int = 0

    def count(self, rows: int, n: int) -> int:
        """Return the number of tiles of a product."""
        return int(cdiv(rows, self.block_m) * cdiv(n, self.block_n))


# block_m, block_n, splits, stages, warps
WIDE_TILES = Fp8WideTiles(64, 64, 1, 6, 4), Fp8WideTiles(128, 64, 1, 4, 4), Fp8WideTiles(128, 128, 1, 4, 8)


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight in the kernels' layout.

    values: [N, K] float8_e4m3fn, contiguous, K a multiple of GROUP.
    scales: float32 [ceil(N / SCALE_ROWS), K / GROUP], or [N, 1] per output; contiguous.
    """

    values: Tensor
    scales: Tensor

    @property
    def by_group(self) -> bool:
        return self.scales.shape[0] != self.values.shape[0]


def fp8_gemm_tiles(rows: int, n: int, k: int) -> Fp8GemmTiles | None:
    """Return tiles for a weight [n, k]; None if it does not fit.

    Each multiprocessor has as many bytes in flight as with the measured table of `skinny_gemm`. Tiles have half the
    bytes, so there are twice as many stages, and twice as many columns before the wait.
    """
    if rows > MAX_ROWS or k % GROUP:
        return None
    block_m = max(16, next_power_of_2(rows))
    tiles, groups = cdiv(n, 64), k // GROUP
    if tiles > MULTIPROCESSORS:
        ahead = _ahead(block_m, 128, groups)
        stages, warps = (5 if ahead == 0 else 4, 4) if block_m <= 32 else (4, 8)  # two programs per multiprocessor
        return Fp8GemmTiles(block_m, 128, 1, ahead, stages, warps)
    # Double the programs up to a whole wave. With few rows, continue even if some multiprocessors get two, because idle
    # ones would be worse.
    doubled = int(0.6 * MULTIPROCESSORS) if block_m == 16 else MULTIPROCESSORS // 2
    splits = 1
    while splits * tiles <= doubled and groups % (2 * splits) == 0 and splits < MAX_SPLITS:
        splits *= 2
    ahead = _ahead(block_m, 64, groups // splits)
    # Few rows: two programs must fit, because one reads ahead while the previous GEMM runs. More rows: one program per
    # multiprocessor, see `_split`.
    stages = 10 if block_m == 16 else max(6, _stages_alone(block_m + 64))
    return Fp8GemmTiles(block_m, 64, splits, ahead, stages, warps=4)


def fp8_ahead_tiles(rows: int, n: int, k: int) -> Fp8AheadTiles | None:
    """Return tiles for a weight [n, k] with scales per group; None if it does not fit in shared memory, or for too many
    rows.

    Chooses the fewest splits with few loads per program, because loads run one after another.
    """
    if rows > MAX_AHEAD_ROWS or k % GROUP:
        return None
    rows, groups = next_power_of_2(max(rows, 1)), k // GROUP
    for splits in (d for d in range(1, MAX_SPLITS + 1) if groups % d == 0):
        span = groups // splits
        together = min(span & -span, _together(rows))
        tiles = Fp8AheadTiles(max(rows, 16 // together), together, splits)  # tensor cores take 16 columns
        programs = MULTIPROCESSORS * (SHARED_BYTES // tiles.shared_bytes(k))
        if span <= 4 * together and splits * cdiv(n, SCALE_ROWS) <= programs:
            return tiles
    return None


def _together(rows: int) -> int:
    """Return the groups per product for `rows` rows (a power of two): at most 32 operand columns and 32 kB."""
    return 16 if rows == 1 else 8 if rows <= 4 else 32 // rows


def _ahead(block_m: int, rows_of_w: int, span: int) -> int:
    """Return the groups to read ahead: 32 kB of W, as in `skinny_gemm`."""
    ahead = 256 // rows_of_w
    return ahead if block_m == 16 and span >= 2 * ahead else 0


def fp8_gated_tiles(rows: int, n: int, k: int, for_fp8: bool = False) -> Fp8GemmTiles | None:
    """Return tiles for a gated product of weight [n, k], gate rows above up rows; None if it does not fit.

    A program has 64 gate rows and 64 up rows. Weights with so few rows that K would be split are not supported.
    for_fp8: 128 of each, which is one output group; None unless programs fill the device and sums fit in registers.
    """
    tiles = fp8_gemm_tiles(rows, n, k)
    if tiles is None or tiles.block_n < 128 or n // 2 % SCALE_ROWS:
        return None
    block_m, groups = tiles.block_m, k // GROUP
    if not for_fp8:
        warps = 4 if block_m <= 64 else 8
        return Fp8GemmTiles(block_m, 64, 1, _ahead(block_m, 128, groups), tiles.stages, warps)
    programs = n // 2 / GROUP
    if not 0.75 * MULTIPROCESSORS <= programs <= MULTIPROCESSORS or programs % 1 or block_m > 64:
        return None
    return Fp8GemmTiles(block_m, GROUP, 1, _ahead(block_m, 256, groups), stages=4, warps=8)


def fp8_wide_tiles(rows: int, n: int, k: int) -> Fp8WideTiles:
    """Return tiles for a weight [n, k], k a multiple of GROUP.

    Measured on an H200, where two programs of 64 outputs fit on a multiprocessor (`tests.bench linear`).
    """
    small, narrow, wide = WIDE_TILES
    twice = 2 * MULTIPROCESSORS
    if small.count(rows, n) <= twice and (rows <= MAX_ROWS or small.count(rows, n) > MULTIPROCESSORS and rows <= 256):
        return _split(small, rows, n, k, twice)
    fewer_waves = cdiv(narrow.count(rows, n), twice) < cdiv(wide.count(rows, n), MULTIPROCESSORS)
    return _split(narrow, rows, n, k, MULTIPROCESSORS) if rows <= 512 or fewer_waves else wide


def fp8_sum_order(n: int, k: int, by_group: bool) -> Fp8SumOrder:
    """Return the order of additions of a weight's products in deterministic engines: that of its fastest tiles for one
    row."""
    tiles, ahead = fp8_gemm_tiles(1, n, k), fp8_ahead_tiles(1, n, k) if by_group else None
    assert tiles is not None, "k is a multiple of GROUP"
    splits = tiles.splits if ahead is None else ahead.splits
    return Fp8SumOrder(splits, _ahead(tiles.block_m, tiles.block_n, k // GROUP // splits))


def fp8_ordered_ahead_tiles(rows: int, n: int, k: int) -> Fp8AheadTiles | None:
    """Return `fp8_ahead_tiles` that add in the order of `fp8_sum_order`; None if there are none."""
    tiles = fp8_ahead_tiles(rows, n, k)
    return tiles if tiles is not None and tiles.splits == fp8_sum_order(n, k, True).splits else None


def fp8_ordered_tiles(rows: int, n: int, k: int, by_group: bool) -> Fp8GemmTiles | None:
    """Return tiles for up to MAX_ROWS rows that add in the order of `fp8_sum_order`. None for more rows."""
    tiles, order = fp8_gemm_tiles(rows, n, k), fp8_sum_order(n, k, by_group)
    if tiles is None:
        return None
    stages = tiles.stages
    if order.splits > tiles.splits and order.splits * cdiv(n, tiles.block_n) > MULTIPROCESSORS:
        stages = min(stages, _stages_alone(tiles.block_m + tiles.block_n) - 2)  # two programs per multiprocessor
    ahead, last = (order.last, 0) if tiles.block_m == 16 else (0, order.last)
    return replace(tiles, splits=order.splits, ahead=ahead, last=last, stages=stages)


def fp8_ordered_gated_tiles(rows: int, n: int, k: int, for_fp8: bool, by_group: bool) -> Fp8GemmTiles | None:
    """Return `fp8_gated_tiles` that add in the order of `fp8_sum_order`, for the same weight."""
    tiles, order = fp8_gated_tiles(rows, n, k, for_fp8), fp8_sum_order(n, k, by_group)
    if tiles is None or order.splits > 1:
        return None
    return tiles if tiles.ahead == order.last else replace(tiles, ahead=0, last=order.last)


def fp8_ordered_wide_tiles(rows: int, n: int, k: int, by_group: bool) -> Fp8WideTiles:
    """Return tiles for many rows that add in the order of `fp8_sum_order`. If tiles do not fill half of the device,
    slices of K have programs of their own; else a program sums them one after another."""
    order = fp8_sum_order(n, k, by_group)
    small, narrow, wide = WIDE_TILES
    tiles = small if small.count(rows, n) <= MULTIPROCESSORS else narrow if narrow.count(rows, n) <= 512 else wide
    if order.splits * tiles.count(rows, n) <= MULTIPROCESSORS:
        return replace(tiles, splits=order.splits, last=order.last)
    # a third sum of 128 x 128 numbers would not fit in registers
    return replace(narrow if order.splits > 1 else tiles, slices=order.splits, last=order.last)


def _split(tiles: Fp8WideTiles, rows: int, n: int, k: int, programs: int) -> Fp8WideTiles:
    """Split K while there are at most `programs` programs with at least ten steps each.

    With at most one program per multiprocessor, each gets so many stages that a second program does not fit. Otherwise
    some multiprocessors would get two programs and others none, because programs start where those of the previous
    kernel end.
    """
    groups, splits, count, stages = k // GROUP, 1, tiles.count(rows, n), tiles.stages
    while 2 * splits * count <= programs and groups % (2 * splits) == 0 and groups >= 20 * splits:
        splits *= 2
    if splits * count <= MULTIPROCESSORS:
        stages = max(stages, _stages_alone(tiles.block_m + tiles.block_n))
    return replace(tiles, splits=splits, stages=stages)


def _stages_alone(rows: int) -> int:
    """Return the minimum stages, of GROUP columns by `rows` rows, that leave no room for a second program."""
    return SHARED_BYTES // 2 // (rows * GROUP) + 1


def rounding_columns(weight: Fp8Matrix, tiles: Fp8GemmTiles) -> int:
    """Return the columns of one row that a program quantises at once. 0: the GEMM does not quantise, because scales are
    per row or a program's work would be too large."""
    span = tiles.span(weight.values.shape[1]) * GROUP
    return min(int(next_power_of_2(span)), _ROUNDED) if weight.by_group and span <= 2 * _ROUNDED else 0


def fp8_workspace_size(shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the sizes of a `Workspace` for weights of these shapes [N, K]: float32 partial sums, and int32 counters of
    programs that have stored theirs. They are the largest that any split product needs, for any number of rows."""
    # The need of `_split` and `fp8_ordered_wide_tiles`: one program of 128 x 128 sums for each multiprocessor, or two
    # of 64 x 64.
    needed = [(MULTIPROCESSORS * 128 * 128, MULTIPROCESSORS)]
    for n, k in shapes:
        few_rows = [tiles for rows in (16, 32, 64, MAX_ROWS) for tiles in _few_row_tiles(rows, n, k)]
        read_ahead = [fp8_ahead_tiles(rows, n, k) for rows in (1, 2, 4, MAX_AHEAD_ROWS)]
        sums = [(tiles.splits, tiles.block_n, tiles.block_m) for tiles in few_rows]
        sums += [(tiles.splits, SCALE_ROWS, tiles.rows) for tiles in read_ahead if tiles is not None]
        for splits, block_n, rows in sums:
            if splits > 1:
                tiles_of_w = cdiv(n, block_n)
                needed.append((tiles_of_w * splits * block_n * rows, tiles_of_w))
    return largest(needed)


def _few_row_tiles(rows: int, n: int, k: int) -> list[Fp8GemmTiles]:
    """Return the tiles for `rows` rows of engines of either kind."""
    if k % GROUP:
        return []
    found = [fp8_gemm_tiles(rows, n, k), *(fp8_ordered_tiles(rows, n, k, by_group) for by_group in (True, False))]
    return [tiles for tiles in found if tiles is not None]
