"""What the layers of one forward pass may see: positions, where KV goes, who sees what. Made per pass, thrown away."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attention.backend import AttentionBackend, Prepared
from attention.expansion import ExpandedChunks
from attention.kv_cache.pool import KVPool
from attention.metadata import DecodeBatch, Mode, PrefillBatch
from attention.ops.slot_mapping import map_rows
from workers.ops.experts.route import TokenSlots
from workers.ops.rotary import Angles


@dataclass(frozen=True)
class Attending:
    """The rows of a pass whose output is wanted of its last layer, where the others are there for their KV alone: these
    attend, and go on to what comes after attention.

    rows: [n] int64.
    decode, chunks: the same rows as batches, those of decode first. Neither is there if no row attends.
    """

    rows: Tensor
    decode: DecodeBatch | None
    chunks: PrefillBatch | None

    @staticmethod
    def nobody(device: torch.device) -> "Attending":
        """For a pass that is there for its KV alone."""
        return Attending(torch.empty(0, dtype=torch.int64, device=device), None, None)


@dataclass(frozen=True)
class ForwardContext:
    """Rows are those of a decode batch, then those of a chunk batch (see `attention.metadata`).

    positions: [rows] int64 for rotary embedding.
    slot_mapping: [rows] int64 where each row's KV is written.
    attending: [n] int64, the rows that attend, None for all; num_decode_rows, decode and chunks are of these.
    last: of the last layer, if fewer rows attend there.
    expanded: the chunks of `chunks` for layers that keep latent rows, where they cost less so.
    """

    pool: KVPool
    positions: Tensor
    slot_mapping: Tensor
    num_decode_rows: int
    decode: Prepared | None
    chunks: Prepared | None
    attending: Tensor | None = None
    last: "ForwardContext | None" = None
    expanded: ExpandedChunks | None = None

    def attending_rows(self, x: Tensor) -> Tensor:
        """[n, ...]: of x [rows, ...] the rows that attend."""
        return x if self.attending is None else x.index_select(0, self.attending)

    @cached_property
    def token_slots(self) -> TokenSlots:
        """Of the rows that attend: which of them are padding."""
        return TokenSlots(self.attending_rows(self.slot_mapping), self.pool.page_size)

    @cached_property
    def rounds(self) -> "ForwardContext":
        """The same with the rows of `decode` alone attending."""
        return replace(self, chunks=None, expanded=None)

    def attend(self, layer: int, q: Tensor, rows: tuple[Tensor, ...], angles: Angles, scale: float) -> Tensor:
        """Turn q [rows, q_heads, head_dim] and what is kept by `angles`, keep it, and attend to the layer: [n, q_heads,
        head_dim] of the rows that attend. On a GPU q is turned in place.

        rows: what the layer's projections made for the cache, as its layout takes it (`KVLayout.store`): for K/V heads
        k and v [rows, kv_heads, head_dim].
        """
        self.plan(layer, q, scale)
        return self.attend_to_kept(layer, self.keep(layer, q, rows, angles), scale)

    def keep(self, layer: int, q: Tensor, rows: tuple[Tensor, ...], angles: Angles) -> Tensor:
        """`attend` as far as q, which it returns turned."""
        return self.pool.store(layer, q, rows, angles.cos, angles.sin, angles.index, self.slot_mapping)

    def plan(self, layer: int, q: Tensor, scale: float) -> bool:
        """See `Prepared.plan`; before the layer's rows are kept. Of q no value is read."""
        fence = False
        for prepared in (self.decode, self.chunks):
            if prepared is not None:
                fence |= prepared.plan(q, self.pool.layer(layer), scale)
        return fence

    def attend_to_kept(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """`attend` for turned q [rows, q_heads, head_dim], when `plan` has been called and the layer's rows kept."""
        kv = self.pool.layer(layer)
        q = self.attending_rows(q)
        if self.chunks is None:
            assert self.decode is not None
            return self.decode.forward(q, kv, scale)
        if self.decode is None:
            return self.chunks.forward(q, kv, scale)
        split = self.num_decode_rows
        decode = self.decode.forward(q[:split], kv, scale)
        return torch.cat((decode, self.chunks.forward(q[split:], kv, scale)))


def make_context(
    pool: KVPool,
    backends: Mapping[Mode, AttentionBackend],
    decode: DecodeBatch | None,
    decode_positions: Tensor | None,
    chunks: PrefillBatch | None,
    attending: Attending | None = None,
) -> ForwardContext:
    """The context of a pass over `decode` and `chunks`.

    decode_positions: [B * R] int64, the rotary positions of decode rows (a tree's rows are deeper than their column
        says); None where they equal the columns.
    attending: None for all rows.
    """
    positions, slots = [], []
    if decode is not None:
        own_positions, own_slots = map_rows(decode, pool.page_size)
        positions.append(own_positions if decode_positions is None else decode_positions)
        slots.append(own_slots)
    if chunks is not None:
        chunk_positions, chunk_slots = map_rows(chunks, pool.page_size)
        positions.append(chunk_positions)
        slots.append(chunk_slots)
    if attending is not None:
        decode, chunks = attending.decode, attending.chunks
    return ForwardContext(
        pool=pool,
        positions=positions[0] if len(positions) == 1 else torch.cat(positions),
        slot_mapping=slots[0] if len(slots) == 1 else torch.cat(slots),
        num_decode_rows=decode.num_rows if decode is not None else 0,
        decode=backends[decode.mode].prepare(decode) if decode is not None else None,
        chunks=backends[Mode.PREFILL].prepare(chunks) if chunks is not None else None,
        attending=attending.rows if attending is not None else None,
        expanded=(
            backends[Mode.PREFILL].expand(chunks, pool.page_size) if chunks is not None and attending is None else None
        ),
    )
