"""Tile sizes of the CUDA products with int4 weights (`kernels_cuda`)."""

from dataclasses import dataclass

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.gemm.blocks import cdiv, next_power_of_2
from aerie.kernels.packed.weight import TILE

STEP = 128  # inputs of a stage
_MAX_CLUSTER = 8  # portable cluster size on Hopper
_ROW_BYTES = 256 + 64  # bytes of a row in a stage of `few_rows.cu`
_MAX_CLUSTERS = MULTIPROCESSORS // 2  # clusters of `many_rows.cu`, of two programs each
_MIN_SHARE = 4  # minimum stages per cluster; with fewer, adding the sums takes longer than multiplying
SHARED_SUMS = 2 * _MAX_CLUSTERS * 128 * 256, 2 * _MAX_CLUSTERS * 8
"""Cells and tickets of the workspace of `many_rows.cu`: a tile's sums for each program, and a flag for each warp."""


@dataclass(frozen=True)
class FewRowsTiles:
    """Tiles of `few_rows.cu`.

    row_tiles: tiles of 8 rows.
    warps_n: warps with different outputs, 64 each; in a gated product half of them compute gate projections.
    warps_k: warps that share a sum.
    splits: programs of a cluster, which share a sum (split K).
    stages: pipeline stages of 128 inputs, in shared memory; a multiple of `warps_k`.
    programs: programs per multiprocessor.
    """

    row_tiles: int
    warps_n: int
    warps_k: int
    splits: int
    stages: int
    programs: int = 1

    @property
    def outputs(self) -> int:
        return TILE * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    def shared_bytes(self, zeros: bool) -> int:
        """Return the shared memory: stages of codes, scales, zeros and rows, or later the sums; and their barriers."""
        stage = (4096 + 128 * (1 + zeros)) * self.warps_n + 8 * _ROW_BYTES * self.row_tiles
        sums = self.warps_n * self.warps_k * self.row_tiles * 2048
        return max(self.stages * stage, sums) + 16 * self.stages

    def defines(self, gated: bool, half: bool, zeros: bool) -> tuple[tuple[str, int], ...]:
        """Return the macros of the kernel. half: rows and scales are float16, else bfloat16."""
        assert self.stages % self.warps_k == 0 and not (gated and self.warps_n % 2)
        return (
            ("WN", self.warps_n),
            ("WK", self.warps_k),
            ("RT", self.row_tiles),
            ("STAGES", self.stages),
            ("SPLITS", self.splits),
            ("PROGRAMS", self.programs),
            *_common(gated, half, zeros, self.shared_bytes(zeros)),
        )


@dataclass(frozen=True)
class WideTiles:
    """Tiles of `wide.cu`: 256 outputs by `block_m` rows. Used for 17 to 32 rows, gated or with more outputs than
    inputs: a layer's products take 91.3 us, instead of 94.6 with `many_rows.cu`.

    splits: programs of a cluster, which share a sum (split K).
    """

    splits: int

    threads = 384
    outputs = 4 * TILE
    block_m = 32
    stages = 4  # stages of 128 inputs each, in shared memory

    def shared_bytes(self, zeros: bool) -> int:
        """Return the shared memory. Zeros need no more, because stages start at multiples of 1,024 bytes."""
        stage = 256 * self.block_m + 64 * self.outputs + 1024  # rows of 128 inputs, codes, scales and zeros
        return max(self.stages * stage, 4 * self.outputs * self.block_m) + 16 * self.stages

    def defines(self, gated: bool, half: bool, zeros: bool) -> tuple[tuple[str, int], ...]:
        """Return the macros of the kernel. Arguments: `FewRowsTiles.defines`."""
        return (
            ("ROWS", self.block_m),
            ("STAGES", self.stages),
            ("SPLITS", self.splits),
            ("ROUNDED", 1),
            *_common(gated, half, zeros, self.shared_bytes(zeros)),
        )


@dataclass(frozen=True)
class ManyRowsTiles:
    """Tiles of `many_rows.cu`: 128 outputs by `block_m` rows, for each of a cluster's two programs.

    block_m: a multiple of 32, at most 256.
    stages: pipeline stages of 128 inputs, in shared memory.
    """

    block_m: int
    stages: int

    threads = 384
    outputs = 2 * TILE

    def shared_bytes(self, zeros: bool) -> int:
        """Return the shared memory: stages of rows, codes, scales and zeros; 8 kB for stores; and barriers."""
        stage = 256 * self.block_m + 64 * self.outputs + 256 * (1 + zeros)
        return self.stages * stage + 8192 + 16 * self.stages

    def defines(self, gated: bool, half: bool, zeros: bool) -> tuple[tuple[str, int], ...]:
        """Return the macros of the kernel. Arguments: `FewRowsTiles.defines`."""
        return (
            ("ROWS", self.block_m),
            ("STAGES", self.stages),
            ("ROUNDED", 1),
            *_common(gated, half, zeros, self.shared_bytes(zeros)),
        )

    def num_pairs(self, rows: int, n: int) -> int:
        """Return the number of pairs of tiles for `n` outputs; a cluster computes one pair at a time."""
        return cdiv(cdiv(n, self.outputs), 2) * cdiv(rows, self.block_m)

    def num_clusters(self, rows: int, n: int, steps: int) -> int:
        """Return the number of clusters for a weight [n, 128 `steps`]."""
        return min(_MAX_CLUSTERS, max(1, self.num_pairs(rows, n) * steps // _MIN_SHARE))

    def us(self, rows: int, n: int, steps: int) -> float:
        """Return the microseconds that the product takes on an H200, as predicted by `_STEP_US` and its neighbours."""
        pairs, clusters = self.num_pairs(rows, n), self.num_clusters(rows, n, steps)
        rest, sums = pairs % clusters, 0
        if rest:
            share = cdiv((rest + clusters * (pairs > clusters)) * steps, clusters)
            sums = cdiv(steps, share)
        tile_us = (_TILE_US * cdiv(pairs, clusters) + _SUM_US * sums) * self.block_m / 256
        return cdiv(pairs * steps, clusters) * _STEP_US[self.block_m] + tile_us


Tiles = FewRowsTiles | WideTiles | ManyRowsTiles


def _common(gated: bool, half: bool, zeros: bool, shared_bytes: int) -> tuple[tuple[str, int], ...]:
    return ("GATED", int(gated)), ("HALF", int(half)), ("ZEROS", int(zeros)), ("SHARED_BYTES", shared_bytes)


# (warps_n, warps_k, stages, programs) by row_tiles and kind of product, for int4 in groups of 128 on an H200. A layer
# of Llama-3.1-8B with norms takes, with Triton's kernels and with these, 49.6 and 47.6 us at 1 row, 57.5 and 54.5 at 8,
# 72.3 and 61.2 at 16, 95.4 and 84.6 at 32. Triton's kernels compute the unlisted cases: up to 8 rows, these kernels are
# faster alone there, but slower in a layer (52.6 at 1 row, 60.9 at 8).
_FEW_ROWS: dict[tuple[int, str], tuple[int, int, int, int]] = {
    (1, "gated"): (2, 4, 8, 2),
    (2, "gated"): (2, 4, 8, 2),
    (2, "more outputs"): (1, 8, 24, 1),
    (2, "as many"): (1, 8, 16, 1),
    (2, "more inputs"): (1, 8, 24, 1),
    (4, "as many"): (1, 8, 8, 1),
}
_PROGRAMS = 90  # sums are split until there are at least this many programs

# `many_rows.cu`: microseconds of 128 inputs by block_m, of storing a tile of 256 rows, and of adding one sum of such a
# tile; fitted to 80 products of Llama-3.1-8B, 128 to 1,200 rows. A layer takes 136 us at 128 rows, 285 at 384, 504 at
# 700, 621 at 1,024 and 1,230 at 2,048 (bf16: 143, 268, 456, 607 and 1,198).
_STEP_US = {64: 0.68, 96: 0.76, 128: 0.84, 192: 1.08, 256: 1.31}
_TILE_US, _SUM_US = 6.1, 1.3
_MANY_ROWS = [ManyRowsTiles(block_m, stages) for block_m, stages in ((64, 8), (96, 6), (128, 5), (192, 3), (256, 3))]
MAX_ROWS = 4096  # at 8,192 rows, dequantising and cuBLAS take 3 % less time


def cuda_tiles(rows: int, n: int, k: int, gated: bool) -> Tiles | None:
    """Return tiles for a weight [n, k]; None if the kernels do not support it or other kernels are faster."""
    if k % STEP or (gated and n % (2 * TILE)) or rows > MAX_ROWS:
        return None
    bucket, steps = max(8, next_power_of_2(rows)), k // STEP
    form = "gated" if gated else "more outputs" if n > k else "more inputs" if k > n else "as many"
    if bucket > 32:
        return min(_MANY_ROWS, key=lambda tiles: tiles.us(rows, n, steps))
    if bucket == 32 and (gated or n > k):
        return WideTiles(_wide_splits(cdiv(n, WideTiles.outputs), steps))
    if (bucket // 8, form) not in _FEW_ROWS:
        return None
    warps_n, warps_k, stages, programs = _FEW_ROWS[bucket // 8, form]
    tiles, splits = cdiv(n, TILE * warps_n), 1
    while tiles * splits < _PROGRAMS and splits < _MAX_CLUSTER and 4 * splits * warps_k <= steps:
        splits *= 2
    stages = min(stages, cdiv(cdiv(steps, splits), warps_k) * warps_k)
    return FewRowsTiles(bucket // 8, warps_n, warps_k, splits, stages, programs)


def _wide_splits(tiles: int, steps: int) -> int:
    """Return the number of programs that share a sum. Clusters of more than two leave some multiprocessors idle."""
    splits = 1
    for more in (2, 3, 4, 6):
        if more * tiles <= (128 if more == 2 else 100) and 2 * more <= steps:
            splits = more
    return splits
