"""A model, its KV pool and its attention backends: one forward pass over a decode batch and prompt
chunks. Used by decoding strategies, which own the order of passes."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.kv_cache.pool import KVPool
from attention.metadata import DecodeBatch, Mode, PrefillBatch
from workers.layers.forward_context import Attending, ForwardContext, make_context
from workers.models.decoder import Decoder, DecoderOutput

ModelT = TypeVar("ModelT")


@dataclass(frozen=True)
class ModelRunner(Generic[ModelT]):
    """backends: one per mode that this model is run in."""

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
        """See `workers.layers.forward_context.make_context`."""
        return make_context(self.pool, self.backends, decode, decode_positions, chunks, attending)


class TargetRunner(ModelRunner[Decoder]):
    def forward(
        self,
        ids: Tensor,
        decode: DecodeBatch | None,
        decode_positions: Tensor | None,
        chunks: PrefillBatch | None,
        every_row: bool = False,
    ) -> DecoderOutput:
        """ids: [rows] int64, those of `decode` first. Of chunks each one's last row alone goes through the whole last
        layer and has a hidden state in the output, unless every_row."""
        context = self.context(decode, decode_positions, chunks)
        if chunks is not None and not every_row:
            ends = context.num_decode_rows + chunks.last_row_indices
            rows = torch.cat((torch.arange(context.num_decode_rows, device=ends.device), ends))
            prepared = self.backends[Mode.PREFILL].prepare(chunks.last_rows())
            context = replace(context, last=replace(context, attending=rows, chunks=prepared, expanded=None))
        output: DecoderOutput = self.model(ids, context)
        return output
