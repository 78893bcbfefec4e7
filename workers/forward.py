"""What the layers of one forward pass may see: positions, where KV goes, who sees what. Made per pass, thrown away."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.backend import AttentionBackend, Prepared
from attention.kv_pool import KVPool
from attention.metadata import ChunkBatch, Mode, TailBatch, chunk_kv_slots, tail_kv_slots
from workers.layers.rotary import Angles, rotate


@dataclass(frozen=True)
class Attending:
    """The rows of a pass whose output is wanted of its last layer, where the others are there for their KV alone: these
    attend, and go on to what is behind attention. rows: [n] int64. tail, chunks: the same rows as batches, tail's
    first."""

    rows: Tensor
    tail: TailBatch | None
    chunks: ChunkBatch | None


@dataclass(frozen=True)
class ForwardContext:
    """Rows are those of a tail batch, then those of a chunk batch (see `attention.metadata`).

    positions: [rows] int64 for rotary embedding. kv_slots: [rows] int64 where each row's KV is written. attending: [n]
    int64, the rows that attend, None for all; num_tail_rows, tail and chunks are of these. last: of the last layer, if
    fewer rows attend there.
    """

    pool: KVPool
    positions: Tensor
    kv_slots: Tensor
    num_tail_rows: int
    tail: Prepared | None
    chunks: Prepared | None
    attending: Tensor | None = None
    last: "ForwardContext | None" = None

    def attending_rows(self, x: Tensor) -> Tensor:
        """[n, ...]: of x [rows, ...] the rows that attend."""
        return x if self.attending is None else x.index_select(0, self.attending)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, angles: Angles, scale: float
    ) -> Tensor:
        """Rotate q [rows, q_heads, head_dim] and k by `angles`, write k and v [rows, kv_heads, head_dim] of a layer and
        attend to it: [n, q_heads, head_dim] of the rows that do. On a GPU q is rotated in place."""
        kv = self.pool.layer(layer)
        if q.is_cuda:
            from attention.kernels.early_launch import launches_early
            from attention.kernels.rope_store import rope_store

            rope_store(q, k, v, angles.cos, angles.sin, angles.index, kv, self.kv_slots, pdl=launches_early(q.device))
        else:
            q = rotate(q, angles)
            self.pool.store(layer, self.kv_slots, rotate(k, angles), v)
        q = self.attending_rows(q)
        if self.chunks is None:
            assert self.tail is not None
            return self.tail.forward(q, kv, scale)
        if self.tail is None:
            return self.chunks.forward(q, kv, scale)
        split = self.num_tail_rows
        tail = self.tail.forward(q[:split], kv, scale)
        return torch.cat((tail, self.chunks.forward(q[split:], kv, scale)))


def make_context(
    pool: KVPool,
    backends: Mapping[Mode, AttentionBackend],
    tail: TailBatch | None,
    tail_positions: Tensor | None,
    chunks: ChunkBatch | None,
    attending: Attending | None = None,
) -> ForwardContext:
    """The context of a pass over `tail` and `chunks`. tail_positions: [B * R] int64, the rotary positions of tail
    rows (a tree's rows are deeper than their column tells); None where they equal the columns. attending: None for
    all rows."""
    positions, slots = [], []
    if tail is not None:
        own_positions, own_slots = _tail_rows(tail, pool.page_size)
        positions.append(own_positions if tail_positions is None else tail_positions)
        slots.append(own_slots)
    if chunks is not None:
        positions.append(chunks.kv_positions())
        slots.append(chunk_kv_slots(chunks, pool.page_size))
    if attending is not None:
        tail, chunks = attending.tail, attending.chunks
    return ForwardContext(
        pool=pool,
        positions=positions[0] if len(positions) == 1 else torch.cat(positions),
        kv_slots=slots[0] if len(slots) == 1 else torch.cat(slots),
        num_tail_rows=tail.num_rows if tail is not None else 0,
        tail=backends[tail.mode].prepare(tail) if tail is not None else None,
        chunks=backends[Mode.PREFILL].prepare(chunks) if chunks is not None else None,
        attending=attending.rows if attending is not None else None,
    )


def _tail_rows(tail: TailBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """KV positions and token indices that the rows of `tail` write, [B * R] int64 each."""
    if tail.prefix_len.is_cuda:
        from attention.kernels.tail_rows import tail_rows

        return tail_rows(tail, page_size)
    return tail.kv_positions().flatten(), tail_kv_slots(tail, page_size)
