"""Attention by our Triton kernels: every mode, every length read on the device, safe to capture in a CUDA graph.

Captured graphs of a `TailBatch` stay valid when lengths, page tables and masks change: only batch size, rows and tail
are fixed. A shape must run once before it is captured, which compiles its kernels and makes its workspace. One backend
serves one stream at a time: its workspace is shared by all its layers and passes.

A request is cut into stretches whose number depends on the other lengths in the batch, so the last bits of a row's
result may too. Equal batches give equal bits.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention.backend import AttentionBackend, Prepared
from attention.kernels.chunks import ChunkTiles, attend_chunks, chunk_tiles, list_tiles
from attention.kernels.early_launch import launches_early
from attention.kernels.splits import plan_items
from attention.kernels.tail import MAX_SPLITS, TailPlan, TailTiles, TailWorkspace, attend_tail, tail_tiles
from attention.kv_pool import LayerKV
from attention.metadata import ChunkBatch, TailBatch

CPU_MULTIPROCESSORS = 8  # for Triton's interpreter: enough that short contexts are split

MERGED_AT_ONCE = 8  # partial results that a merging program holds; measured, see tests/bench/RESULTS.md


class TritonBackend(AttentionBackend):
    name = "triton"

    def __init__(self) -> None:
        self._workspaces: dict[tuple[torch.device, TailTiles, int], TailWorkspace] = {}

    def prepare(self, batch: TailBatch | ChunkBatch) -> Prepared:
        return _PreparedTail(batch, self) if isinstance(batch, TailBatch) else _PreparedChunks(batch)

    def workspace(self, tiles: TailTiles, head_dim: int, device: torch.device) -> TailWorkspace:
        """The buffers for programs of this shape. They are never freed: captured graphs hold their addresses."""
        key = (device, tiles, head_dim)
        if key not in self._workspaces:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("attention backend 'triton': a new shape under capture; run it once before that")
            num_programs = _num_multiprocessors(device) * tiles.programs_per_sm
            self._workspaces[key] = TailWorkspace.create(tiles, head_dim, num_programs, device)
        return self._workspaces[key]


@dataclass(frozen=True)
class _PreparedTail(Prepared):
    """plans: by (q_heads, kv_heads, head_dim, itemsize), made at a pass's first layer; there is one."""

    batch: TailBatch
    backend: TritonBackend
    plans: dict[tuple[int, int, int, int], TailPlan] = field(default_factory=dict)

    def forward(self, q: Tensor, kv: LayerKV, scale: float) -> Tensor:
        plan = self._plan(q.shape[1], kv.k.shape[2], kv.k.shape[3], kv.k.itemsize)
        return attend_tail(q, kv, self.batch, plan, scale)

    def _plan(self, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> TailPlan:
        key = (num_heads, num_kv_heads, head_dim, itemsize)
        if key not in self.plans:
            _check_head_dim(head_dim)
            device = self.batch.prefix_len.device
            density = self.batch.num_requests * num_kv_heads / _num_multiprocessors(device)
            tiles = tail_tiles(self.batch.rows * (num_heads // num_kv_heads), itemsize, density)
            workspace = self.backend.workspace(tiles, head_dim, device)
            self.plans[key] = plan_tail(self.batch, num_heads, num_kv_heads, tiles, workspace)
        return self.plans[key]


def plan_tail(batch: TailBatch, num_heads: int, num_kv_heads: int, tiles: TailTiles,
              workspace: TailWorkspace) -> TailPlan:
    """Cuts the batch's contexts and chooses who merges. Launches one small kernel."""
    device = batch.prefix_len.device
    columns = num_kv_heads * -(-batch.rows * (num_heads // num_kv_heads) // tiles.block_m)
    budget = split_budget(batch.num_requests, _num_multiprocessors(device) * tiles.programs_per_sm // columns)
    items = plan_items(batch.prefix_len, batch.tail, budget, tiles.min_span, tiles.block_n, MAX_SPLITS)
    each = min(MAX_SPLITS, budget // batch.num_requests)
    at_once = min(MERGED_AT_ONCE, 1 << max(1, (each - 1).bit_length()))
    return TailPlan(tiles, items, workspace, apart=each > 1, splits=at_once, pdl=launches_early(device))


def split_budget(num_requests: int, items: int) -> int:
    """How many items beyond one per request a batch may be cut into, of the `items` that fill the device.

    Where each request can have several, a multiple of the requests: equal lengths are then cut into equal numbers that
    fill the device at most once. Else what is there, for batches of unequal lengths.
    """
    return items // num_requests * num_requests or items


def _check_head_dim(head_dim: int) -> None:
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"attention backend 'triton': head_dim={head_dim}: must be a power of two of at least 16; "
                         "choose another backend")


def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class _PreparedChunks(Prepared):
    """plans: by (group, head_dim, itemsize), made at a pass's first layer; there is one."""

    batch: ChunkBatch
    plans: dict[tuple[int, int, int], tuple[ChunkTiles, Tensor]] = field(default_factory=dict)

    def forward(self, q: Tensor, kv: LayerKV, scale: float) -> Tensor:
        tiles, tile_list = self._plan(q.shape[1] // kv.k.shape[2], kv.k.shape[3], kv.k.itemsize)
        return attend_chunks(q, kv, self.batch.page_table, tile_list, tiles, scale)

    def _plan(self, group: int, head_dim: int, itemsize: int) -> tuple[ChunkTiles, Tensor]:
        key = (group, head_dim, itemsize)
        if key not in self.plans:
            _check_head_dim(head_dim)
            tiles, device = chunk_tiles(group, head_dim, itemsize), self.batch.page_table.device
            host = torch.tensor(list_tiles(self.batch, tiles.block_m // group), dtype=torch.int32)
            # Pinned memory comes from torch's cache, which reuses it only once the copy is done.
            tile_list = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
            self.plans[key] = (tiles, tile_list)
        return self.plans[key]
