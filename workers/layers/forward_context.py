"""The inputs that all layers of one forward pass share. Created per pass."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from aerie.attention.backend import AttentionBackend, Prepared
from aerie.attention.expansion import ExpandedChunks
from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.recurrent.pool import StateBatch
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.delta_rule.tables import DeltaRows, DeltaWeights
from aerie.kernels.experts.route import TokenSlots
from aerie.kernels.host_layer import HostPass
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, RowInputs
from aerie.kernels.kv.slot_mapping import map_rows
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.rope.rope_store import Angles

BatchT = TypeVar("BatchT", DecodeBatch, PrefillBatch)


@dataclass(frozen=True)
class Attending:
    """The rows that attend in a draft's last layer. Only these rows continue after attention; the others only write
    KV.

    rows: [n] int64.
    decode, chunks: the same rows as batches, decode rows first; both None if no row attends.
    """

    rows: Tensor
    decode: DecodeBatch | None
    chunks: PrefillBatch | None

    @staticmethod
    def none(device: torch.device) -> "Attending":
        """Return the empty selection: a pass that only writes KV."""
        return Attending(torch.empty(0, dtype=torch.int64, device=device), None, None)


@dataclass(frozen=True)
class ForwardContext:
    """Positions, KV slots and attention batches of a pass. The decode batch's rows come first, then the chunk batch's
    (see `aerie.kernels.kv.batches`).

    positions: [rows] int64 for rotary embedding, or [3, rows] of M-RoPE where a chunk has three for each row.
    slot_mapping: [rows] int64 KV slots to write.
    num_decode_rows, decode, chunks: the rows that attend.
    attending: [n] int64 rows that attend; None for all.
    last: the context of the last layer, if fewer rows attend there.
    expanded: `chunks` with expanded keys and values, for MLA layers; None if the absorbed form is faster.
    states: states of recurrent layers, which compute all rows; None without such layers.
    live_mapping: [rows] int64, like `slot_mapping`, but only padding rows are on page 0. None if this holds for
        `slot_mapping`; `PrefillBatch.store_from` and window pages put other rows there.
    windowed: the context with the page table of window pages; None without windowed layers.
    inputs: inputs of chunk rows besides their ids; None for most passes.
    batches: the batches of all rows, from which `row_slots` is computed.
    adapted: whether any row has an adapter, so that each layer's matrices are multiplied alone.
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
    states: StateBatch | None = None
    live_mapping: Tensor | None = None
    windowed: "ForwardContext | None" = None
    inputs: RowInputs | None = None
    batches: tuple[DecodeBatch | None, PrefillBatch | None] = (None, None)
    adapted: bool = False

    def embedded(self, x: Tensor) -> Tensor:
        """Return x [rows, hidden_size], the embeddings of the rows' ids, with those that requests give in their place;
        x itself if none does."""
        inputs, first = self.inputs, self._first_chunk_row
        if inputs is not None and inputs.rows is not None and inputs.embeddings is not None:
            x = x.index_copy(0, first + inputs.rows, inputs.embeddings.to(x.dtype))
        if inputs is not None and inputs.image_rows is not None and inputs.image_values is not None:
            x = x.index_copy(0, first + inputs.image_rows, inputs.image_values[:, : x.shape[1]].to(x.dtype))
        if inputs is not None and inputs.image_mask is not None and inputs.image_values is not None:
            mask, values = inputs.image_mask.unsqueeze(1), inputs.image_values[:, : x.shape[1]].to(x.dtype)
            x = torch.cat((x[:first], torch.where(mask, values, x[first:])))
        return x

    def deepened(self, layer: int, x: Tensor) -> Tensor:
        """Return x [rows, hidden_size], the residual stream after a layer, with what images add to it there; x itself
        if none does."""
        inputs, begin = self.inputs, (layer + 1) * x.shape[1]
        if inputs is None or inputs.image_values is None or begin >= inputs.image_values.shape[1]:
            return x
        added, first = inputs.image_values[:, begin : begin + x.shape[1]].to(x.dtype), self._first_chunk_row
        if inputs.image_mask is not None:
            added = torch.where(inputs.image_mask.unsqueeze(1), added, 0)
            return torch.cat((x[:first], x[first:] + added))
        assert inputs.image_rows is not None
        return x.index_add(0, first + inputs.image_rows, added)

    @property
    def _first_chunk_row(self) -> int:
        decode = self.batches[0]
        return 0 if decode is None else decode.num_rows

    @cached_property
    def row_slots(self) -> Tensor:
        """Return [rows] int32: the slot of each row's request. Padding rows have the padding slot or another row's.
        Computed from the pass's tensors when a layer asks for it, so that a captured pass contains it; other passes do
        not."""
        decode, chunks = self.batches
        parts = []
        if decode is not None:
            assert decode.slots is not None, "rounds of a target have slots"
            parts.append(decode.slots.int().repeat_interleave(decode.rows))
        if chunks is not None:
            assert chunks.slots is not None, "captured without a `RowIndex`"
            parts.append(chunks.slots.int()[chunks.row_chunks().clamp_max(chunks.num_chunks - 1)])
        return _joined(parts)

    def for_layer(self, layer: int) -> "ForwardContext":
        """Return the context whose pages have the layer's KV."""
        return self.windowed if self.windowed is not None and layer in self.pool.window_layers else self

    def attending_rows(self, x: Tensor) -> Tensor:
        """Select the rows of x [rows, ...] that attend: [n, ...]."""
        return x if self.attending is None else x.index_select(0, self.attending)

    @cached_property
    def token_slots(self) -> TokenSlots:
        """Return which of the rows that attend are padding."""
        mapping = self.slot_mapping if self.live_mapping is None else self.live_mapping
        return TokenSlots(self.attending_rows(mapping), self.pool.page_size)

    def host_pass(self, angles: Angles) -> HostPass | None:
        """Return the pass for `HostLayer`; None unless all rows are rounds on a CPU, without adapters. Layers with the
        same angles share it."""
        batch = None if self.decode is None or self.chunks is not None else self.decode.host_batch
        if batch is None or self.attending is not None or self.windowed is not None or self.adapted:
            return None
        key = angles.cos.data_ptr()
        if key not in self._host_passes:
            self._host_passes[key] = HostPass(batch, angles, self.slot_mapping)
        return self._host_passes[key]

    @cached_property
    def _host_passes(self) -> dict[int, HostPass]:
        return {}

    @cached_property
    def rounds(self) -> "ForwardContext":
        """Return this context with only the rows of `decode` attending."""
        return replace(self, chunks=None, expanded=None)

    def recur(self, layer: int, rows: DeltaRows, weights: DeltaWeights) -> Tensor:
        """Advance the states of a recurrent layer; see `StateBatch.recur`."""
        assert self.states is not None, "a model with recurrent layers has states"
        return self.states.recur(layer, rows, weights)

    def attend(
        self,
        layer: int,
        q: Tensor,
        rows: tuple[Tensor, ...],
        angles: Angles,
        rule: ScoreRule,
        sinks: Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Apply RoPE to q and the layer's rows, write the rows to the KV pool, and attend. Return [n, q_heads,
        head_dim] for the n rows that attend. On a GPU without norms, q is rotated in place.

        q: [rows, q_heads, head_dim].
        rows: the projections that `KVLayout.store` takes: k and v [rows, kv_heads, head_dim] for K/V heads; () if
            `layer` is an earlier layer, whose KV is stored already.
        rule, sinks: as in `aerie.attention.backend.Prepared.forward`.
        norms: norms of q and the rows, applied before RoPE.
        """
        context = self.for_layer(layer)
        context.plan(layer, q, rule)
        return context.attend_to_cached(layer, context.keep(layer, q, rows, angles, norms), rule, sinks)

    def keep(
        self, layer: int, q: Tensor, rows: tuple[Tensor, ...], angles: Angles, norms: HeadNorms | None = None
    ) -> Tensor:
        """Apply norms and RoPE and store as `attend` does. Return rotated q."""
        if not rows:
            return self.pool.rotate(layer, q, angles, norms)
        return self.pool.store(layer, q, rows, angles, self.slot_mapping, norms)

    def plan(self, layer: int, q: Tensor, rule: ScoreRule) -> bool:
        """Call `Prepared.plan` of each batch, before the layer's rows are stored. Does not read q's values. Return
        whether a batch needs the store to be a fence."""
        fence = False
        for prepared in (self.decode, self.chunks):
            if prepared is not None:
                fence |= prepared.plan(q, self.pool.layer(layer), rule)
        return fence

    def attend_to_cached(self, layer: int, q: Tensor, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        """Attend with rotated q [rows, q_heads, head_dim], after `plan` and after the layer's rows are stored."""
        kv = self.pool.layer(layer)
        q = self.attending_rows(q)
        if self.chunks is None:
            assert self.decode is not None
            return self.decode.forward(q, kv, rule, sinks)
        if self.decode is None:
            return self.chunks.forward(q, kv, rule, sinks)
        split = self.num_decode_rows
        decode = self.decode.forward(q[:split], kv, rule, sinks)
        return torch.cat((decode, self.chunks.forward(q[split:], kv, rule, sinks)))


class RowIndex:
    """Tells linear layers which request each of their rows belongs to, such as for adapters chosen by request. Given to
    the layers' `LinearMethod`s, and to the model's runner, which enters the context of each pass."""

    def __init__(self) -> None:
        self.context: ForwardContext | None = None

    def enter(self, context: ForwardContext, adapted: bool) -> None:
        """Begin a pass. adapted: whether any of its rows has an adapter; for subclasses that use adapters."""
        self.context = context

    @contextmanager
    def rows_of(self, slots: Tensor) -> Iterator[None]:
        """Within the context, the vocabulary head has a row for each slot. Its end ends the pass: drafts may share the
        head and the embedding.

        slots: [n] int64 slots of the rows' requests, of which one has an adapter.
        """
        yield

    def of(self, num_rows: int) -> Tensor:
        """Return [num_rows] int32: the slots of a layer's rows. num_rows: all rows of the pass, or those that
        attend."""
        assert self.context is not None, "runners enter the context of each pass"
        slots = self.context.row_slots
        # fewer rows: a draft's last layer, which has a context of its own if the draft has several layers
        return slots if slots.shape[0] == num_rows else (self.context.last or self.context).attending_rows(slots)


def make_context(
    pool: KVPool,
    backends: Mapping[Mode, AttentionBackend],
    decode: DecodeBatch | None,
    decode_positions: Tensor | None,
    chunks: PrefillBatch | None,
    attending: Attending | None = None,
) -> ForwardContext:
    """Return the context of a pass over `decode` and `chunks`.

    decode_positions: [B * R] int64 rotary positions of decode rows; None if equal to their KV positions (in a tree they
        differ).
    attending: rows that attend; None: all.
    """
    context = _context(pool, backends, decode, decode_positions, chunks, attending)
    if not pool.window_layers:
        return context
    assert attending is None, "only drafts choose rows here, and their layers keep no windows"
    decode = None if decode is None else through_windows(decode, pool)
    chunks = None if chunks is None else through_windows(chunks, pool)
    windowed = _context(pool, backends, decode, decode_positions, chunks, None)
    # window pages that were freed map to page 0 as padding does, so only the full layers' mapping shows padding
    return replace(context, windowed=replace(windowed, live_mapping=context.slot_mapping))


def through_windows(batch: BatchT, pool: KVPool) -> BatchT:
    """Return the batch with the page table of window pages."""
    return replace(batch, page_table=pool.window_table(batch.page_table))


def _context(
    pool: KVPool,
    backends: Mapping[Mode, AttentionBackend],
    decode: DecodeBatch | None,
    decode_positions: Tensor | None,
    chunks: PrefillBatch | None,
    attending: Attending | None,
) -> ForwardContext:
    """Return the context of layers without a window."""
    positions, slots, live, batches = [], [], None, (decode, chunks)
    if decode is not None:
        own_positions, own_slots = map_rows(decode, pool.page_size)
        positions.append(own_positions if decode_positions is None else decode_positions)
        slots.append(own_slots)
    if chunks is not None:
        chunk_positions, chunk_slots = map_rows(chunks, pool.page_size)
        rotary_positions = None if chunks.inputs is None else chunks.inputs.positions
        positions.append(chunk_positions if rotary_positions is None else rotary_positions)
        if rotary_positions is not None and rotary_positions.dim() == 2:  # a row of a round has three equal positions
            positions = [part.expand(rotary_positions.shape[0], -1) for part in positions]
        if chunks.store_from is not None:
            live = _joined([*slots, map_rows(replace(chunks, store_from=None), pool.page_size)[1]])
        slots.append(chunk_slots)
    if attending is not None:
        decode, chunks = attending.decode, attending.chunks
    return ForwardContext(
        pool=pool,
        positions=positions[0] if len(positions) == 1 else torch.cat(positions, dim=-1),
        slot_mapping=_joined(slots),
        num_decode_rows=decode.num_rows if decode is not None else 0,
        decode=backends[decode.mode].prepare(decode) if decode is not None else None,
        chunks=backends[Mode.PREFILL].prepare(chunks) if chunks is not None else None,
        attending=attending.rows if attending is not None else None,
        expanded=(
            backends[Mode.PREFILL].expand(chunks, pool.page_size) if chunks is not None and attending is None else None
        ),
        live_mapping=live,
        inputs=None if chunks is None else chunks.inputs,
        batches=batches,
    )


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
