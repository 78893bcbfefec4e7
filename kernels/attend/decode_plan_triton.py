"""Tiles, scratch memory and plan of the decode kernels."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from aerie.kernels.attend.split_kv_triton import Items

FAN = 8  # partial results per merge
MAX_SPLITS = FAN * FAN
MAX_BLOCK_M = 64  # maximum rows x heads per tile
FULL_DENSITY = 0.9  # programs a multiprocessor with which splitting for a second program does not pay
MIN_SPAN_OF_FULL = 2560  # tokens from which it does (`_tiles_of_few`)
TOKENS_FIRST_ROWS = 32  # maximum block_m with transposed products over latent rows: `latent_tile_triton`


@dataclass(frozen=True)
class DecodeTiles:
    """Tiles for a decode batch.

    block_m: rows x group per program.
    block_n: KV positions per tile.
    warps, stages: Triton's num_warps and num_stages.
    programs_per_sm: target number of items per multiprocessor after splitting.
    min_span: minimum length of an item of a split request, up to rounding.
    rarely_splits: requests are rarely split, so the programs that finish last merge, without another launch.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs_per_sm: int
    min_span: int
    rarely_splits: bool = False

    def merge_slice(self, head_dim: int) -> int:
        """Return the number of head dimensions merged at a time, so that FAN partial results take 64 registers per
        thread."""
        return min(head_dim, max(16, 64 * 32 * self.warps // (FAN * self.block_m)))


# For `fixed` plans over latent rows. Both kinds give a row the same bits. Here and below:
# block_m, block_n, warps, stages, programs_per_sm, min_span
FIXED_LATENT_TILES = DecodeTiles(64, 32, 8, 4, 1, 0)
FIXED_LATENT_TILES_OF_FEW = DecodeTiles(16, 32, 4, 4, 1, 0)


def decode_tiles(
    packed_rows: int, head_dim: int, itemsize: int, density: float, kv_itemsize: int | None = None
) -> DecodeTiles:
    """Return the tiles measured to be fastest on an H200 (tests/bench/RESULTS.md).

    packed_rows: rows x group of a request.
    itemsize, kv_itemsize: bytes per number of q and of the cache; None: equal.
    density: requests x KV heads / multiprocessors: programs per multiprocessor without splitting.
    """
    # block_m, block_n, warps, stages, programs_per_sm, min_span
    if itemsize == 4:
        block_n = 32 if head_dim <= 256 else 16
        return DecodeTiles(min(MAX_BLOCK_M, max(16, triton.next_power_of_2(packed_rows))), block_n, 4, 2, 2, 128)
    if kv_itemsize == 1:
        return _fp8_tiles(packed_rows, head_dim, density)
    few, narrow = packed_rows <= 16, head_dim <= 128
    if head_dim > 256:  # not measured; chosen so that tiles fit in shared memory, and sums in registers
        least = 64 if density <= 1 else 128
        return DecodeTiles(16, 32, 4, 3, 1, least) if few else DecodeTiles(64, 32, 8, 2, 1, least)
    if not narrow and (not few or density <= 2):  # not measured; chosen so that two programs fit in shared memory
        return DecodeTiles(16 if few else 64, 32, 4, 3 if few else 2, 2, 64 if density <= 1 else 128)
    if density <= 1:
        return DecodeTiles(16, 64, 4, 3, 2, 64) if few else _tiles_of_few(packed_rows, density)
    if few and density > 2:
        return DecodeTiles(16, 32, 1 if narrow else 2, 4, 2, 128)
    # Tiles of 64 rows use wgmma, which reads K and V from shared memory and needs fewer barriers than mma on 16 rows.
    # That is faster for a kernel measured alone, despite empty rows; in rounds, at the GPU's power limit, multiplying
    # empty rows costs more. Tiles of 128 tokens need fewer barriers, if shared memory holds three of them.
    if few and narrow:
        return DecodeTiles(16, 128, 4, 3, 1, 128)
    return DecodeTiles(64, 64, 4, 3, 2, 128)


def _tiles_of_few(packed_rows: int, density: float) -> DecodeTiles:
    """Return the tiles of batches that do not fill the device by their KV heads alone, for heads of up to 128.

    Tiles of 64 tokens instead of 32 save 8 to 14 % of trees of 63 to 256 nodes over 8,192 tokens. If blocks of rows
    fill the device, a second program on a multiprocessor gains less than the merge costs, up to about 2,560 tokens:
    trees of 256 nodes over 620 tokens take 21.0 us whole and 27.3 in halves, four of 63 nodes 15.5 and 23.2; over
    8,192 tokens 129 and 105 us, 138 and 111 (H200, Qwen3-8B's heads).
    """
    # block_m, block_n, warps, stages, programs_per_sm, min_span
    if packed_rows < 64:
        return DecodeTiles(64, 32, 4, 4, 2, 64)
    if density * triton.cdiv(packed_rows, 64) >= FULL_DENSITY:
        return DecodeTiles(64, 64, 4, 3, 2, MIN_SPAN_OF_FULL, rarely_splits=True)
    return DecodeTiles(64, 64, 4, 3, 2, 128)


def _fp8_tiles(packed_rows: int, head_dim: int, density: float) -> DecodeTiles:
    """Return tiles of many tokens and at most 32 rows. Tiles are converted to float16 in registers. With long tiles,
    more warps convert while others wait for memory; with few rows, products read operands from registers."""
    block_n = min(128, max(32, 128 * 128 // head_dim))
    # block_m, block_n, warps, stages, programs_per_sm, min_span
    if head_dim > 256:  # not measured; chosen so that sums fit in registers
        return DecodeTiles(16, block_n, 8, 3, 1, 64 if density <= 1 else 128)
    if packed_rows <= 16:
        return DecodeTiles(16, block_n, 4, 3 if density <= 1 else 4, 2, 64 if density <= 1 else 128)
    return DecodeTiles(32, block_n, 4, 3, 2, 64)


def latent_tiles(packed_rows: int, itemsize: int, density: float, kv_itemsize: int | None = None) -> DecodeTiles:
    """Return the tiles over latent rows.

    packed_rows: rows x heads of a request.
    density: requests / multiprocessors.

    A multiprocessor's shared memory holds one program: a tile of 64 tokens of 576 numbers is 74 kB. Sums of 64 rows
    take 128 registers per thread with eight warps. Tiles of 64 tokens are up to 10 % faster than tiles of 32 (H200, 4
    and 8 rows of 16 heads, 4,096 and 32,768 tokens). With tiles of 64 rows, a single request has too few items to fill
    the device; tiles of 32 give twice as many programs (11.0 instead of 13.3 us for 640 tokens; equal for 32,768).
    """
    # block_m, block_n, warps, stages, programs_per_sm, min_span
    if itemsize == 4:
        return DecodeTiles(16, 16, 4, 1, 1, 128)
    least = 64 if density <= 0.25 else 128
    if kv_itemsize == 1:  # with many rows, a tile is converted once for all rows, through shared memory
        return DecodeTiles(16 if packed_rows <= 16 else 64, 64, 8, 3, 1, least)
    if packed_rows <= 16:
        return DecodeTiles(16, 64, 4, 2, 1, least)
    if packed_rows <= TOKENS_FIRST_ROWS or density * MAX_SPLITS <= 0.5:
        return DecodeTiles(32, 64, 8, 2, 1, least)
    return DecodeTiles(64, 64, 8, 2, 1, least)


def token_axis(tiles: DecodeTiles) -> int:
    """Return the token axis of a tile's scores (`aerie.kernels.attend.latent_tile_triton`)."""
    return 0 if tiles.block_m <= TOKENS_FIRST_ROWS and tiles.block_n >= 64 else 1


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch for partial results (partials), one per item, until they are merged.

    part: [partials * columns, block_m, head_dim] float32, flat.
    lse: [partials * columns, block_m] float32, flat.
    sums: like lse, sums of weights of partials that are not a single span's result, in fixed plans; else empty.
    tickets: [2, partials * columns] int32, flat, zero between launches.
    """

    part: Tensor
    lse: Tensor
    sums: Tensor
    tickets: Tensor

    @staticmethod
    def create(tiles: DecodeTiles, head_dim: int, num_programs: int, device: torch.device) -> "DecodeWorkspace":
        """Allocate partials for up to `num_programs` items x columns: twice as many (see `plan_items`)."""
        partials = 2 * num_programs
        return DecodeWorkspace(
            torch.empty(partials * tiles.block_m * head_dim, dtype=torch.float32, device=device),
            torch.empty(partials * tiles.block_m, dtype=torch.float32, device=device),
            torch.empty(0, dtype=torch.float32, device=device),
            torch.zeros(2 * partials, dtype=torch.int32, device=device),
        )

    @staticmethod
    def for_separate_merge(num_rows: int, head_dim: int, device: torch.device) -> "DecodeWorkspace":
        """Allocate `num_rows` rows of partials for a plan that merges in a second kernel."""
        return DecodeWorkspace(
            torch.empty(num_rows * head_dim, dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
            torch.empty(0, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class DecodePlan:
    """The plan of a pass, shared by all layers.

    items: from `plan_items`, with a budget of at most num_programs of the workspace / columns.
    merges_separately: a second kernel merges the partials of a request; else the programs that finish last do.
    merged_at_once: partials of a request that the second kernel loads at a time, a power of two.
    fixed: a row's bits depend on its own path only. Needs `merges_separately` and items from `plan_whole_spans`,
        over latent rows from `plan_spans`.
    span: base size of a fixed plan's spans, in tokens.
    leads: in a fixed plan, a request's leading item adds the results of its spans.
    paths: paths of trees in a fixed plan, from `aerie.kernels.attend.fixed.path_triton.plan_paths`; else None.
    """

    tiles: DecodeTiles
    items: Items
    workspace: DecodeWorkspace
    merges_separately: bool
    merged_at_once: int
    fixed: bool = False
    span: int = 0
    leads: bool = False
    paths: Tensor | None = None


def partial_rows(tiles: DecodeTiles, packed_rows: int) -> int:
    """Return the rows per partial if unused ones are not stored. packed_rows: rows x group of a request."""
    return min(tiles.block_m, 1 << (packed_rows - 1).bit_length())
