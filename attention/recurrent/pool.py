"""The recurrent states of one model on one rank, by slot, and `StateBatch`, the slots whose states the rows of a pass
read and write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aerie.attention.recurrent.layout import StateGroup
from aerie.attention.recurrent.sizes import StateSizes
from aerie.kernels.delta_rule.chunks import delta_rule_chunks
from aerie.kernels.delta_rule.rounds import commit_rows, delta_rule_rounds, replay_rows
from aerie.kernels.delta_rule.tables import (
    AllWeights,
    ChunkTables,
    DeltaRows,
    DeltaState,
    DeltaWeights,
    LayerState,
    RoundTables,
)
from aerie.kernels.kv.batches import DecodeBatch, PrefillBatch


class StatePool:
    """The states of all recurrent layers, for every slot, the padding slot, and snapshots.

    Invariant between steps: a slot's state is the one `count` tokens before its committed length; its next round first
    replays these rows (`DeltaState`).

    snapshot_at: [num_slots + 1] int32, by slot: the round that passes this position saves the state there; -1: none.
    snapshot_entry: [num_slots + 1] int64, by slot: the snapshot to which it is saved.
    """

    def __init__(
        self,
        groups: Sequence[StateGroup],
        sizes: StateSizes,
        num_slots: int,
        device: torch.device,
        weights: Mapping[int, DeltaWeights],
        saved_dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
    ) -> None:
        """weights: by layer.
        saved_dtype: dtype of the states in snapshots.
        deterministic: a row's result must depend on its path only (`RoundTables.fixed`)."""
        self.deterministic = deterministic
        self.groups = tuple(groups)
        self._weights = tuple(AllWeights.of([weights[layer] for layer in group.layers]) for group in groups)
        self.saved_dtype = saved_dtype
        self.sizes = sizes
        self.device = device
        self.num_slots = num_slots
        self.snapshot_at = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device)
        self.snapshot_entry = torch.zeros((num_slots + 1,), dtype=torch.int64, device=device)
        self.num_snapshots = 0
        self.states: tuple[DeltaState, ...] = ()
        self._layers: dict[int, LayerState] = {}
        self.allocate(0)

    def allocate(self, num_snapshots: int) -> None:
        """Replace the states and snapshots with new empty ones. Call it before anything uses their addresses."""
        if self.states and num_snapshots == self.num_snapshots:
            return
        self.num_snapshots = num_snapshots
        self.states, self._layers = (), {}  # freed before the new ones are allocated
        self.states = tuple(
            DeltaState.zeros(
                len(group.layers),
                group.layout.heads,
                self.num_slots,
                num_snapshots,
                self.sizes.rows,
                self.sizes.path,
                group.layout.dtype,
                self.device,
                self.saved_dtype,
            )
            for group in self.groups
        )
        for group, state in zip(self.groups, self.states, strict=True):
            self._layers |= {layer: state.layer(i) for i, layer in enumerate(group.layers)}

    def layer(self, index: int) -> LayerState:
        """Return the state of layer `index` of the model."""
        return self._layers[index]

    def has(self, layer: int) -> bool:
        """Whether layer `layer` of the model is recurrent."""
        return layer in self._layers

    def enter(self, slots: Tensor) -> None:
        """Forget the rows of the requests that had slots [n] int64 before. Their states are overwritten by the first
        chunk, which begins at position 0 or after `restore`."""
        for state in self.states:
            state.count.index_fill_(0, slots, 0)
        self.snapshot_at.index_fill_(0, slots, -1)

    def save(self, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Make rounds of slots [n] int64 save the states after positions [n] int32 to snapshots rows [n] int64, once
        they pass these positions."""
        self.snapshot_at.index_copy_(0, slots, positions)
        self.snapshot_entry.index_copy_(0, slots, rows)

    def pretend(self, num_slots: int) -> None:
        """Give the first `num_slots` slots one row to replay each, and the others none, for measured steps. The commit
        of their next round removes it."""
        for state in self.states:
            state.count.zero_()
            state.count[:num_slots] = 1

    def restore(self, rows: Tensor, slots: Tensor) -> None:
        """Copy snapshots rows [n] int64 to slots [n] int64, in all layers."""
        for state in self.states:
            for saved, own in ((state.saved_state, state.state), (state.saved_conv, state.conv)):
                own.index_copy_(1, slots, saved.index_select(1, rows).to(own.dtype))

    def replay(self, rounds: RoundTables) -> RoundTables:
        """Replay the committed rows of a wide round in all layers, and return its tables for the layers. Other rounds
        replay them in each layer."""
        if not rounds.is_wide(self.sizes.path):
            return rounds
        for state, weights in zip(self.states, self._weights, strict=True):
            replay_rows(state, weights, rounds)
        return replace(rounds, replayed=True)

    def commit(self, slots: Tensor, path: Tensor, counts: Tensor) -> None:
        """Make the first counts [B] of the nodes path [B, D] int64 of each slot's last round its committed rows: see
        `commit_rows`."""
        for state in self.states:
            commit_rows(state, slots, path, counts)


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
            saved = pool.snapshot_at, pool.snapshot_entry
            rounds = RoundTables(decode.slots, decode.prefix_len, decode.mask, *saved, pool.deterministic)
        if chunks is not None:
            assert chunks.slots is not None, "recurrent layers need the slots of chunks"
            saved_at, saved_row = chunks.saved_at, chunks.saved_row
            if saved_at is None or saved_row is None:
                saved_at, saved_row = torch.full_like(chunks.starts, -1), chunks.slots
            of_chunks = ChunkTables(
                chunks.slots, chunks.qo_indptr, chunks.starts, saved_at, saved_row, pool.deterministic
            )
        return StateBatch(pool, 0 if decode is None else decode.num_rows, rounds, of_chunks)

    def replay(self) -> "StateBatch":
        """Return the batch for the layers; see `StatePool.replay`. Called once per pass, before its layers."""
        return self if self.rounds is None else replace(self, rounds=self.pool.replay(self.rounds))

    def recur(self, layer: int, rows: DeltaRows, weights: DeltaWeights) -> Tensor:
        """Return the outputs [rows, value_heads * value_dim] of layer `layer` for all rows of the pass, and advance its
        states. The outputs of padding rows are finite."""
        layer_state, split = self.pool.layer(layer), self.num_round_rows
        out = torch.empty_like(rows.z, memory_format=torch.contiguous_format)
        if self.rounds is not None:
            of_rounds = rows if self.chunks is None else rows.part(0, split)
            delta_rule_rounds(of_rounds, weights, layer_state, self.rounds, out[:split])
        if self.chunks is not None:
            of_chunks = rows if self.rounds is None else rows.part(split, rows.z.shape[0])
            delta_rule_chunks(of_chunks, weights, layer_state, self.chunks, out[split:])
        return out
