"""The slots whose states the rows of a pass read and write."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.attention.recurrent.pool import StatePool
from aerie.kernels.delta_rule.chunks import delta_rule_chunks
from aerie.kernels.delta_rule.rounds import delta_rule_rounds
from aerie.kernels.delta_rule.tables import ChunkTables, DeltaRows, DeltaWeights, RoundTables
from aerie.kernels.kv.batches import DecodeBatch, PrefillBatch


@dataclass(frozen=True)
class StateBatch:
    """The rows of a pass for recurrent layers: those of rounds first, then those of chunks.

    num_round_rows: rows of rounds.
    rounds, chunks: None if the pass has none.
    """

    pool: StatePool
    num_round_rows: int
    rounds: RoundTables | None
    chunks: ChunkTables | None

    @staticmethod
    def of(pool: StatePool, decode: DecodeBatch | None, chunks: PrefillBatch | None) -> "StateBatch":
        """Return the batch of a pass over `decode` and `chunks`, both of which have slots."""
        rounds = of_chunks = None
        if decode is not None:
            assert decode.slots is not None, "recurrent layers need the slots of rounds"
            rounds = RoundTables(decode.slots, decode.prefix_len, decode.mask, pool.snapshot_at, pool.snapshot_entry)
        if chunks is not None:
            assert chunks.slots is not None, "recurrent layers need the slots of chunks"
            saved_at, saved_row = chunks.saved_at, chunks.saved_row
            if saved_at is None or saved_row is None:
                saved_at, saved_row = torch.full_like(chunks.starts, -1), chunks.slots
            of_chunks = ChunkTables(chunks.slots, chunks.qo_indptr, chunks.starts, saved_at, saved_row)
        return StateBatch(pool, 0 if decode is None else decode.num_rows, rounds, of_chunks)

    def recur(self, layer: int, rows: DeltaRows, weights: DeltaWeights) -> Tensor:
        """Return the outputs [rows, value_heads * value_dim] of layer `layer` for all rows of the pass, and advance its
        states. The outputs of padding rows are finite."""
        kept, split = self.pool.layer(layer), self.num_round_rows
        out = torch.empty_like(rows.z, memory_format=torch.contiguous_format)
        if self.rounds is not None:
            of_rounds = rows if self.chunks is None else rows.part(0, split)
            delta_rule_rounds(of_rounds, weights, kept, self.rounds, out[:split])
        if self.chunks is not None:
            of_chunks = rows if self.rounds is None else rows.part(split, rows.z.shape[0])
            delta_rule_chunks(of_chunks, weights, kept, self.chunks, out[split:])
        return out
