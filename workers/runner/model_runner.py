"""Runs one forward pass of a model over a decode batch and prompt chunks, with its KV pool and attention backends. Used
by decoding strategies, which decide the order of passes."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from aerie.attention.backend import AttentionBackend
from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.recurrent.pool import StateBatch, StatePool
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch
from aerie.workers.layers.forward_context import Attending, ForwardContext, RowIndex, make_context, through_windows
from aerie.workers.models.decoder import DecoderOutput, TargetModel

ModelT = TypeVar("ModelT")


@dataclass(frozen=True)
class ModelRunner(Generic[ModelT]):
    """A model, its KV pool, and one backend per mode in which the model runs."""

    model: ModelT
    pool: KVPool
    backends: dict[Mode, AttentionBackend]

    def context(
        self,
        decode: DecodeBatch | None,
        decode_positions: Tensor | None = None,
        chunks: PrefillBatch | None = None,
        attending: Attending | None = None,
    ) -> ForwardContext:
        """See `aerie.workers.layers.forward_context.make_context`."""
        return make_context(self.pool, self.backends, decode, decode_positions, chunks, attending)


@dataclass(frozen=True)
class TargetRunner(ModelRunner[TargetModel]):
    """Runs the target.

    states: states of its recurrent layers; None without such layers.
    row_index: tells layers their rows' requests; None if no layer depends on them.
    records_experts: whether routers record their choices, so that all layers compute every row.
    """

    states: StatePool | None = None
    row_index: RowIndex | None = None
    records_experts: bool = False

    def forward(
        self,
        ids: Tensor,
        decode: DecodeBatch | None,
        decode_positions: Tensor | None,
        chunks: PrefillBatch | None,
        every_row: bool = False,
        adapted: bool = False,
    ) -> DecoderOutput:
        """Run the target.

        ids: [rows] int64, the rows of `decode` first.
        every_row: return hidden states of all chunk rows; else only of each chunk's last row. The last layer then
            computes only these rows, if it has attention.
        adapted: whether any row has an adapter.
        """
        context = self.context(decode, decode_positions, chunks)
        if adapted:
            context = replace(context, adapted=True)
        if self.states is not None:
            context = replace(context, states=StateBatch.of(self.states, decode, chunks).replay())
        if chunks is None or every_row:
            return self._run(ids, context)
        ends = context.num_decode_rows + chunks.last_row_indices
        rows = torch.cat((torch.arange(context.num_decode_rows, device=ends.device), ends))
        if self.states is not None and self.states.has(self.model.config.num_layers - 1):  # it needs all rows
            output = self._run(ids, context)
            return replace(output, hidden=output.hidden.index_select(0, rows))
        last, ends_of_chunks = context.for_layer(self.model.config.num_layers - 1), chunks.last_rows()
        if last is not context:
            ends_of_chunks = through_windows(ends_of_chunks, self.pool)
        prepared = self.backends[Mode.PREFILL].prepare(ends_of_chunks)
        last = replace(last, attending=rows, chunks=prepared, expanded=None, windowed=None)
        return self._run(ids, replace(context, last=last))

    def _run(self, ids: Tensor, context: ForwardContext) -> DecoderOutput:
        if self.row_index is not None:
            self.row_index.enter(context, context.adapted)
        output: DecoderOutput = self.model(ids, context)
        return output

    def logits(self, hidden: Tensor, slots: Tensor | None) -> Tensor:
        """Return logits [n, shard size] of hidden [n, hidden_size].

        slots: [n] int64 slots of the rows' requests, if one of them has an adapter; else None.
        """
        with nullcontext() if self.row_index is None or slots is None else self.row_index.rows_of(slots):
            logits: Tensor = self.model.lm_head(hidden)
        return logits

    def commit(self, slots: Tensor, path: Tensor, counts: Tensor) -> None:
        """Commit the accepted path of a round in the recurrent layers: see `StatePool.commit`."""
        if self.states is not None:
            self.states.commit(slots, path, counts)
