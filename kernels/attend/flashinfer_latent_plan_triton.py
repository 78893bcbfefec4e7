# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Plans FlashInfer's fa3 MLA kernel on the device: assigns pieces of requests to clusters of programs, and the merging
of partial results to programs.

The kernel is persistent. A cluster processes a list of pieces, each a tile of query rows x heads and a span of tokens.
After a grid barrier, programs merge the rows whose pieces went to several clusters.

FlashInfer 0.6.17 plans on the host, from lengths on the host. This plan cuts the concatenated tokens of all tiles into
as many equal spans as there are clusters (fewer if spans would be short). So clusters have equal work, and a boundary
cuts at most one tile, as the format requires.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.flashinfer_plan_triton import ALIGNMENT

TILE_ROWS = 64  # query rows x heads per program
TILE_TOKENS = 64  # tokens per step; pieces begin at multiples
ELEMENTS = 4096  # tiles x pieces compared at a time
# Arrays in the order of `MLAPlanInfo`. PIECE_ARRAYS, per piece: first row, first page-table entry, first partial row
# (-1: none). MERGE_ARRAYS are per program, EXTENT_ARRAYS per piece.
PIECE_ARRAYS = ("q_indptr", "kv_indptr", "partial_indptr")
MERGE_ARRAYS = ("merge_begin", "merge_end", "merge_partial_begin", "merge_partial_end", "merge_stride")
EXTENT_ARRAYS = ("q_len", "kv_len", "q_start", "kv_start", "kv_end")


@dataclass(frozen=True)
class LatentGrid:
    """A grid for `num_requests` requests of `rows` rows.

    heads: query heads.
    multiprocessors: number of the device's multiprocessors; each runs one program.
    causal: whether the rows are the last `rows` tokens and each sees the tokens up to its own; else all rows see all
        tokens.
    """

    num_requests: int
    rows: int
    heads: int
    multiprocessors: int
    causal: bool

    @property
    def packed_rows(self) -> int:
        """Rows x heads per request."""
        return self.rows * self.heads

    @property
    def cluster(self) -> int:
        """Programs per cluster, as FlashInfer chooses it. They compute adjacent tiles of rows over the same tokens."""
        return 2 if self.packed_rows > TILE_ROWS else 1

    @property
    def clusters(self) -> int:
        return self.multiprocessors // self.cluster

    @property
    def tiles(self) -> int:
        """Tiles per request, one cluster each."""
        return -(-self.packed_rows // (TILE_ROWS * self.cluster))

    @property
    def max_pieces(self) -> int:
        return self.num_requests * self.tiles + self.clusters

    @property
    def max_partial_rows(self) -> int:
        """Upper bound: each boundary between clusters cuts one tile, which then has at least two pieces."""
        return 2 * self.clusters * TILE_ROWS * self.cluster


class LatentPlanArrays:
    """The plan's arrays in one int32 buffer `ints` on the device, and their offsets."""

    def __init__(self, grid: LatentGrid, device: torch.device) -> None:
        self.grid = grid
        self.sizes = (
            dict.fromkeys(PIECE_ARRAYS, grid.max_pieces)
            | dict.fromkeys(MERGE_ARRAYS, grid.multiprocessors)
            | dict.fromkeys(EXTENT_ARRAYS, grid.max_pieces)
            | {"work_indptr": grid.clusters + 1}
        )
        self.begin: dict[str, int] = {}
        end = 0
        for name, size in self.sizes.items():
            self.begin[name] = end
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.ints = torch.zeros(end, dtype=torch.int32, device=device)

    def values(self, name: str) -> Tensor:
        """Return an array of the plan, a view on the device."""
        return self.ints[self.begin[name] :][: self.sizes[name]]

    def plan_info(self, partial_lse: int) -> list[int]:
        """Return the plan in the launcher's format: the grid, and byte offsets of the arrays and of partial results.

        partial_lse: byte offset of log-sum-exps in the partial results.
        """
        return [self.grid.cluster, self.grid.clusters, *(4 * begin for begin in self.begin.values()), 0, partial_lse]


@triton.jit(do_not_specialize=["added", "num_requests", "table_width", "pieces_stride"])
def _plan_latent(
    prefix_len_ptr,
    pieces_ptr,
    extents_ptr,
    merges_ptr,
    work_indptr_ptr,
    added,
    num_requests,
    table_width,
    pieces_stride,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    CLUSTER: tl.constexpr,
    CLUSTERS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MERGERS: tl.constexpr,
    MERGERS_STRIDE: tl.constexpr,
    TASKS: tl.constexpr,
    TOGETHER: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write the plan; one program. A tile is TILE_ROWS * CLUSTER rows x heads of a request. A piece is the part of a
    tile's tokens that one cluster computes.

    prefix_len_ptr: [num_requests] int32.
    pieces_ptr: [3, pieces_stride] int32, written: the arrays of PIECE_ARRAYS, one entry per piece.
    extents_ptr: [5, pieces_stride] int32, written: the arrays of EXTENT_ARRAYS, one entry per piece.
    merges_ptr: [5, MERGERS_STRIDE] int32, written: the arrays of MERGE_ARRAYS, one entry per program that may merge.
    work_indptr_ptr: [CLUSTERS + 1] int32, written: first piece of each cluster, then the number of pieces.
    added: tokens of each request after its prefix.
    table_width: entries per request of the page table.
    ROWS, HEADS: rows and heads of a request.
    TILES: tiles of a request.
    CAUSAL: each tile ends at the last token that its rows see.
    CLUSTERS: number of clusters, of CLUSTER programs each.
    TILE_TOKENS: a piece is a multiple of it.
    MERGERS: programs that may merge.
    TASKS: tiles of all requests, padded; a task is a tile's number among them.
    TOGETHER: pieces per tile written at a time.
    PADDED: clusters and mergers, padded.
    """
    tile_rows: tl.constexpr = TILE_ROWS * CLUSTER
    task = tl.arange(0, TASKS)
    live = task < num_requests * TILES
    request, tile = task // TILES, task % TILES
    kv_len = tl.load(prefix_len_ptr + request, mask=live, other=0) + added
    seen = kv_len
    if CAUSAL:
        last_row = tl.minimum(((tile + 1) * tile_rows + HEADS - 1) // HEADS, ROWS)
        seen = kv_len - ROWS + last_row
    # A fully masked tile has a piece without tokens, which writes zeros.
    steps = tl.where(live, tl.maximum((seen + TILE_TOKENS - 1) // TILE_TOKENS, 1), 0)
    ends = tl.cumsum(steps, 0)
    begins = ends - steps
    total = tl.sum(steps, 0)
    # Merging many small pieces takes longer than attending to fewer.
    least = tl.where(total * 4 <= CLUSTERS, 1, tl.where(total * 2 <= CLUSTERS, 2, 3))
    span = tl.maximum((total + CLUSTERS - 1) // CLUSTERS, least)
    first = begins // span
    pieces = tl.where(live, (ends - 1) // span - first + 1, 0)
    piece_ends = tl.cumsum(pieces, 0)
    piece_begins = piece_ends - pieces
    rows_here = tl.minimum(ROWS * HEADS - tile * tile_rows, tile_rows)
    is_cut = pieces > 1
    partials = tl.where(is_cut, pieces * rows_here, 0)
    partial_ends = tl.cumsum(partials, 0)
    partial_begins = partial_ends - partials
    # Programs that merge a tile: number of boundaries in it x programs per cluster, which never exceeds the grid.
    mergers = tl.where(is_cut, (pieces - 1) * CLUSTER, 0)
    merger_ends = tl.cumsum(mergers, 0)
    merger_begins = merger_ends - mergers
    rows_each = (rows_here + tl.maximum(mergers, 1) - 1) // tl.maximum(mergers, 1)

    most = tl.max(pieces, 0)
    for start in range(0, most, TOGETHER):
        k = start + tl.arange(0, TOGETHER)
        exists = k[None, :] < pieces[:, None]
        at = piece_begins[:, None] + k[None, :]
        cluster = first[:, None] + k[None, :]
        low = tl.maximum(cluster * span, begins[:, None]) - begins[:, None]
        high = tl.minimum((cluster + 1) * span, ends[:, None]) - begins[:, None]
        nothing = tl.zeros([TASKS, TOGETHER], tl.int32)
        partial = tl.where(is_cut[:, None], partial_begins[:, None] + k[None, :] * rows_here[:, None], -1)
        tl.store(pieces_ptr + at, request[:, None] * ROWS + nothing, mask=exists)
        tl.store(pieces_ptr + pieces_stride + at, request[:, None] * table_width + nothing, mask=exists)
        tl.store(pieces_ptr + 2 * pieces_stride + at, partial, mask=exists)
        tl.store(extents_ptr + at, ROWS + nothing, mask=exists)
        tl.store(extents_ptr + pieces_stride + at, kv_len[:, None] + nothing, mask=exists)
        tl.store(extents_ptr + 2 * pieces_stride + at, (tile * tile_rows)[:, None] + nothing, mask=exists)
        tl.store(extents_ptr + 3 * pieces_stride + at, low * TILE_TOKENS, mask=exists)
        tl.store(extents_ptr + 4 * pieces_stride + at, tl.minimum(high * TILE_TOKENS, seen[:, None]), mask=exists)
        opens = (k[None, :] > 0) | (begins % span == 0)[:, None]  # its cluster's first piece
        tl.store(work_indptr_ptr + cluster, at, mask=exists & opens)
    cluster = tl.arange(0, PADDED)
    unused = (cluster * span >= total) & (cluster <= CLUSTERS)
    tl.store(work_indptr_ptr + cluster, tl.sum(pieces, 0) + tl.zeros([PADDED], tl.int32), mask=unused)

    for start in range(0, most * CLUSTER, TOGETHER):
        k = start + tl.arange(0, TOGETHER)
        exists = k[None, :] < mergers[:, None]
        at = merger_begins[:, None] + k[None, :]
        offset = tl.minimum(k[None, :] * rows_each[:, None], rows_here[:, None])
        until = tl.minimum(offset + rows_each[:, None], rows_here[:, None])
        packed = (request * (ROWS * HEADS) + tile * tile_rows)[:, None]
        tl.store(merges_ptr + at, packed + offset, mask=exists)
        tl.store(merges_ptr + MERGERS_STRIDE + at, packed + until, mask=exists)
        tl.store(merges_ptr + 2 * MERGERS_STRIDE + at, partial_begins[:, None] + offset, mask=exists)
        past = tl.broadcast_to(partial_ends[:, None], [TASKS, TOGETHER])
        tl.store(merges_ptr + 3 * MERGERS_STRIDE + at, past, mask=exists)
        stride = tl.broadcast_to(rows_here[:, None], [TASKS, TOGETHER])
        tl.store(merges_ptr + 4 * MERGERS_STRIDE + at, stride, mask=exists)
    merger = tl.arange(0, PADDED)
    idle = (merger >= tl.sum(mergers, 0)) & (merger < MERGERS)
    tl.store(merges_ptr + merger, 0, mask=idle)
    tl.store(merges_ptr + MERGERS_STRIDE + merger, 0, mask=idle)


def write_latent_plan(arrays: LatentPlanArrays, prefix_len: Tensor, suffix_len: int, table_width: int) -> None:
    """Plan requests of prefix_len tokens, plus suffix_len if the grid is causal. One launch; the host does not wait.

    prefix_len: [B] int32.
    table_width: pages per row of the page table; all belong to the request.
    """
    grid = arrays.grid
    assert prefix_len.shape == (grid.num_requests,) and prefix_len.is_contiguous()
    tasks = triton.next_power_of_2(grid.num_requests * grid.tiles)
    begin = arrays.begin
    _plan_latent[(1,)](
        prefix_len,
        arrays.ints[begin[PIECE_ARRAYS[0]] :],
        arrays.ints[begin[EXTENT_ARRAYS[0]] :],
        arrays.ints[begin[MERGE_ARRAYS[0]] :],
        arrays.values("work_indptr"),
        suffix_len if grid.causal else 0,
        grid.num_requests,
        table_width,
        begin[PIECE_ARRAYS[1]] - begin[PIECE_ARRAYS[0]],
        ROWS=grid.rows,
        HEADS=grid.heads,
        TILES=grid.tiles,
        CLUSTER=grid.cluster,
        CLUSTERS=grid.clusters,
        CAUSAL=grid.causal,
        TILE_ROWS=TILE_ROWS,
        TILE_TOKENS=TILE_TOKENS,
        MERGERS=grid.multiprocessors,
        MERGERS_STRIDE=begin[MERGE_ARRAYS[1]] - begin[MERGE_ARRAYS[0]],
        TASKS=tasks,
        TOGETHER=max(1, ELEMENTS // tasks),
        PADDED=triton.next_power_of_2(grid.multiprocessors + 1),
        num_warps=8,
    )
