# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Plans FlashInfer's fa2 kernels on the device: splits the work, and packs masks.

FlashInfer plans on the host, and copies the plan to the workspace from which its kernels read lengths and splits. The
kernel here writes the same plan to the workspace on the device, so the host need not know the lengths. Format and
splitting are those of FlashInfer 0.6.17 (`attention/scheduler.cuh`, with CUDA graphs):
- A request's KV is split into pieces (FlashInfer's KV chunks) of equal length, in pages.
- Pieces have at least 128 tokens, and are as short as the grid allows, which must hold the pieces of all requests.
- A program computes a tile: one piece for one tile of query rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_PIECE_TOKENS = 128  # minimum tokens of a piece, unless its context is shorter
ALIGNMENT = 4  # int32 values: FlashInfer aligns its arrays at 16 bytes
MASK_BYTES = 512  # per program
TABLE_ELEMENTS = 4096  # requests x tiles compared at a time
TILE_ARRAYS = ("request", "qo_tile", "kv_tile")


@dataclass(frozen=True)
class Grid:
    """A grid for `num_requests` requests of `rows` rows.

    tiles: tiles of query rows per request.
    room: tiles that fit in the grid.
    page_size: tokens.
    """

    num_requests: int
    rows: int
    tiles: int
    room: int
    page_size: int

    @property
    def splits(self) -> bool:
        """Whether KV is split. It is not if the grid is full without splitting."""
        return self.num_requests * self.tiles < self.room

    @property
    def padded(self) -> int:
        """Tiles launched, idle ones included."""
        return self.room if self.splits else self.num_requests * self.tiles


class PlanArrays:
    """The plan's arrays in one int32 buffer `ints` on the device, and their offsets.

    request, qo_tile, kv_tile: [padded] per tile.
    o_indptr: [B + 1] start of each request's partial results.
    kv_chunk_size: [1] tokens per piece.
    total_num_rows: [1].
    merge_indptr: [B * rows + 1] start of each row's partial results.
    block_valid: [padded] bytes, whether a tile has work.
    """

    def __init__(self, grid: Grid, device: torch.device) -> None:
        self.grid = grid
        self._sizes = dict.fromkeys(TILE_ARRAYS, grid.padded) | {
            "o_indptr": grid.num_requests + 1,
            "kv_chunk_size": 1,
            "total_num_rows": 1,
            "merge_indptr": grid.num_requests * grid.rows + 1,
            "block_valid": grid.padded,
        }
        self.begin: dict[str, int] = {}
        end = 0
        for name, size in self._sizes.items():
            self.begin[name] = end
            num_ints = -(-size // 4) if name == "block_valid" else size
            end += -(-num_ints // ALIGNMENT) * ALIGNMENT
        self.ints = torch.zeros(end, dtype=torch.int32, device=device)
        self.values("total_num_rows").fill_(grid.num_requests * grid.rows)

    def byte(self, name: str) -> int:
        """Byte offset of an array in the buffer."""
        return 4 * self.begin[name]

    def values(self, name: str) -> Tensor:
        """Return an array of the plan, a view on the device: int32 (`block_valid`: uint8)."""
        rest = self.ints[self.begin[name] :]
        return (rest.view(torch.uint8) if name == "block_valid" else rest)[: self._sizes[name]]


@triton.jit(
    do_not_specialize=[
        "suffix_len",
        "num_requests",
        "rows",
        "tiles",
        "room",
        "padded",
        "page_size",
        "table_width",
        "min_pages",
        "qo_tile_at",
        "kv_tile_at",
        "o_indptr_at",
        "kv_chunk_size_at",
        "merge_indptr_at",
    ]
)
def _plan(
    prefix_len_ptr,
    ints_ptr,
    valid_ptr,
    last_page_len_ptr,
    suffix_len,
    num_requests,
    rows,
    tiles,
    room,
    padded,
    page_size,
    table_width,
    min_pages,
    qo_tile_at,
    kv_tile_at,
    o_indptr_at,
    kv_chunk_size_at,
    merge_indptr_at,
    SPLITS: tl.constexpr,
    REQUESTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write the plan of a batch: the shortest pieces of equal length (in pages) that fit in `room` tiles, and each
    tile's request, query tile and piece.

    prefix_len_ptr: [num_requests] tokens before the suffix_len new ones.
    ints_ptr: the plan's int32 arrays, at the offsets *_at.
    valid_ptr: whether a tile is used.
    last_page_len_ptr: [num_requests] int32, written: tokens in the last page of a table row of table_width pages.
    rows, tiles: query rows and query tiles of a request.
    padded: tiles of the grid.
    min_pages: minimum pages of a piece.
    SPLITS: requests may be cut; else each is one piece.
    REQUESTS, TILES: requests and tiles, padded.
    """
    request = tl.arange(0, REQUESTS)
    live = request < num_requests
    length = tl.load(prefix_len_ptr + request, mask=live, other=0) + suffix_len
    pages = tl.where(live, (length + page_size - 1) // page_size, 0)
    # All pages of a table row belong to the request, so the last page may begin after the request's end. Then
    # last_page_len is negative, and the kernels still compute the right length from it.
    tl.store(last_page_len_ptr + request, length - (table_width - 1) * page_size, mask=live)

    low = min_pages
    high = tl.max(pages)
    if SPLITS:
        while low < high:
            middle = (low + high) // 2
            if tl.sum((pages + middle - 1) // middle) * tiles > room:
                low = middle + 1
            else:
                high = middle
    else:
        low = tl.maximum(low, high)
    pieces = (pages + low - 1) // low
    ends = tl.cumsum(pieces)
    begins = ends - pieces
    tl.store(ints_ptr + kv_chunk_size_at, low * page_size)
    tl.store(ints_ptr + o_indptr_at, 0)
    tl.store(ints_ptr + o_indptr_at + 1 + request, ends * rows, mask=live)
    tl.store(ints_ptr + merge_indptr_at, 0)
    for row in range(0, rows):
        tl.store(ints_ptr + merge_indptr_at + 1 + request * rows + row, begins * rows + (row + 1) * pieces, mask=live)

    total = tl.sum(pieces) * tiles
    for first in range(0, padded, TILES):
        tile = first + tl.arange(0, TILES)
        before = ends[None, :] * tiles <= tile[:, None]  # requests whose tiles are all earlier
        mine = (begins[None, :] * tiles <= tile[:, None]) & (before == 0)
        owner = tl.sum(before.to(tl.int32), 1)
        place = tile - tl.sum(tl.where(before, pieces[None, :], 0), 1) * tiles
        of_owner = tl.maximum(tl.sum(tl.where(mine, pieces[None, :], 0), 1), 1)
        used = tile < total
        exists = tile < padded
        tl.store(ints_ptr + tile, tl.where(used, owner, 0), mask=exists)
        tl.store(ints_ptr + qo_tile_at + tile, tl.where(used, place // of_owner, 0), mask=exists)
        tl.store(ints_ptr + kv_tile_at + tile, tl.where(used, place % of_owner, 0), mask=exists)
        tl.store(valid_ptr + tile, used.to(tl.uint8), mask=exists)


def write_plan(
    arrays: PlanArrays, prefix_len: Tensor, suffix_len: int, table_width: int, last_page_len: Tensor
) -> None:
    """Plan requests of prefix_len [B] int32 plus suffix_len tokens into `arrays`. Reads nothing on the host.

    table_width: pages per row of the page table; all belong to the request.
    last_page_len: [B] int32, written: tokens on the last of these pages.
    """
    grid = arrays.grid
    requests = triton.next_power_of_2(grid.num_requests)
    begin = arrays.begin
    assert begin["request"] == 0
    _plan[(1,)](
        prefix_len,
        arrays.ints,
        arrays.values("block_valid"),
        last_page_len,
        suffix_len,
        grid.num_requests,
        grid.rows,
        grid.tiles,
        grid.room,
        grid.padded,
        grid.page_size,
        table_width,
        max(MIN_PIECE_TOKENS // grid.page_size, 1),
        begin["qo_tile"],
        begin["kv_tile"],
        begin["o_indptr"],
        begin["kv_chunk_size"],
        begin["merge_indptr"],
        SPLITS=grid.splits,
        REQUESTS=requests,
        TILES=min(max(TABLE_ELEMENTS // requests, 16), triton.next_power_of_2(grid.padded)),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["suffix_len", "rows", "request_stride", "row_stride", "bytes_stride"])
def _pack_mask(
    mask_ptr,
    prefix_len_ptr,
    packed_ptr,
    suffix_len,
    rows,
    request_stride,
    row_stride,
    bytes_stride,
    BYTES: tl.constexpr,
):
    """Write BYTES bytes of a request's mask as FlashInfer packs it: a bit for each row and column of prefix and suffix,
    row by row.

    mask_ptr: [requests, rows] tree masks of the suffix_len last columns, request_stride and row_stride apart.
    prefix_len_ptr: [requests] columns before these, which every row sees.
    packed_ptr: [requests, bytes_stride] uint8, written.
    """
    request = tl.program_id(0)
    prefix = tl.load(prefix_len_ptr + request)
    length = prefix + suffix_len
    first = tl.program_id(1) * BYTES
    if first * 8 < rows * length:
        byte = first + tl.arange(0, BYTES)
        place = tl.arange(0, 8)
        bit = byte[:, None] * 8 + place[None, :]
        row = bit // length
        column = bit - row * length - prefix
        words = tl.load(
            mask_ptr + request * request_stride + row * row_stride, mask=(row < rows) & (column >= 0), other=0
        )
        seen = (column < 0) | ((words >> tl.maximum(column, 0).to(tl.int64)) & 1 == 1)
        value = tl.sum(seen.to(tl.int32) << place[None, :], 1)
        tl.store(packed_ptr + request.to(tl.int64) * bytes_stride + byte, value.to(tl.uint8), mask=byte < bytes_stride)


def mask_bytes(rows: int, max_length: int) -> int:
    """Bytes of a request's packed mask: one bit per row and position, rounded up to 16 bytes."""
    return -(-rows * max_length // 128) * 16


def write_mask(packed: Tensor, mask: Tensor, prefix_len: Tensor, suffix_len: int) -> None:
    """Write FlashInfer's packed masks: bit r * length + j of a request says whether row r sees position j.

    packed: [B, bytes] uint8, written up to each request's length.
    mask: [B, rows] int64; bit j is column prefix_len + j of the suffix; all rows see the prefix.
    prefix_len: [B] int32.
    """
    num_requests, num_bytes = packed.shape
    _pack_mask[(num_requests, triton.cdiv(num_bytes, MASK_BYTES))](
        mask,
        prefix_len,
        packed,
        suffix_len,
        mask.shape[1],
        mask.stride(0),
        mask.stride(1),
        packed.stride(0),
        BYTES=MASK_BYTES,
        num_warps=4,
    )
