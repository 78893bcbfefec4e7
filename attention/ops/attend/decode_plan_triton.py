"""How the decode kernel computes a batch: the table of tiles, memory for partial results, and the plan of a pass."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from attention.ops.attend.split_kv_triton import Items

FAN = 8  # partial results that are merged together
MAX_SPLITS = FAN * FAN
MAX_BLOCK_M = 64


@dataclass(frozen=True)
class DecodeTiles:
    """How a decode batch of some shape is computed.

    block_m: rows x group in a program.
    block_n: KV positions in a tile.
    warps, stages: Triton's.
    programs_per_sm: how many items the splitting aims at.
    min_span: no item of a split request is shorter, but for rounding.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs_per_sm: int
    min_span: int

    def merge_slice(self, head_dim: int) -> int:
        """How many of head_dim's columns are merged at once: FAN partials in 64 registers of each thread."""
        return min(head_dim, max(16, 64 * 32 * self.warps // (FAN * self.block_m)))


def decode_tiles(packed_rows: int, head_dim: int, itemsize: int, density: float) -> DecodeTiles:
    """The table, measured on an H200 (tests/bench/RESULTS.md), for packed_rows = rows x group. density: requests x KV
    heads by multiprocessors, which is to say how many programs each has when nothing is cut."""
    if itemsize == 4:
        return DecodeTiles(min(MAX_BLOCK_M, max(16, triton.next_power_of_2(packed_rows))), 32, 4, 2, 2, 128)
    few, narrow = packed_rows <= 16, head_dim <= 128
    if density <= 1:
        return DecodeTiles(16, 64, 4, 3, 2, 64) if few else DecodeTiles(64, 32, 4, 4, 2, 64)
    if few and density > 2:
        return DecodeTiles(16, 32, 1 if narrow else 2, 4, 2, 128)
    # Tiles of 64 rows run on wgmma, which takes K and V from shared memory and needs fewer barriers than mma on 16
    # rows. Alone that is worth the empty rows of a few; within rounds, which run at the limit of the GPU's power,
    # multiplying them costs more. Tiles of 128 tokens make up for the barriers where shared memory has room for three.
    if few and narrow:
        return DecodeTiles(16, 128, 4, 3, 1, 128)
    return DecodeTiles(64, 64, 4, 3, 2, 128)


@dataclass(frozen=True)
class DecodeWorkspace:
    """What programs leave for those that merge. A partial is what one item gives.

    part: [partials * columns, block_m, head_dim] float32, flat.
    lse: [partials * columns, block_m] float32, flat.
    tickets: [2, partials * columns] int32, flat, zero between launches.
    """

    part: Tensor
    lse: Tensor
    tickets: Tensor

    @staticmethod
    def create(tiles: DecodeTiles, head_dim: int, num_programs: int, device: torch.device) -> "DecodeWorkspace":
        """For a budget of items x columns up to num_programs: twice as many partials (see `plan_items`)."""
        partials = 2 * num_programs
        return DecodeWorkspace(
            torch.empty(partials * tiles.block_m * head_dim, dtype=torch.float32, device=device),
            torch.empty(partials * tiles.block_m, dtype=torch.float32, device=device),
            torch.zeros(2 * partials, dtype=torch.int32, device=device),
        )

    @staticmethod
    def merged_apart(num_rows: int, head_dim: int, device: torch.device) -> "DecodeWorkspace":
        """For num_rows rows of partials, all of them merged by the second kernel."""
        return DecodeWorkspace(
            torch.empty(num_rows * head_dim, dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
            torch.empty(0, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class DecodePlan:
    """What all layers of a pass share.

    items: of `plan_items`, with a budget of at most the workspace's programs by columns.
    apart: merge in a second kernel, of up to `splits` partials at a time.
    fixed: a row's bits depend on its own path only, given `apart` and items of `plan_spans`.
    """

    tiles: DecodeTiles
    items: Items
    workspace: DecodeWorkspace
    apart: bool
    splits: int
    fixed: bool = False


def partial_rows(tiles: DecodeTiles, packed_rows: int) -> int:
    """Rows that programs store of a partial if none are kept that are not there, for packed_rows = rows x group of a
    request."""
    return min(tiles.block_m, 1 << (packed_rows - 1).bit_length())
