"""Writes the draft's KV of several plain rounds at a time. Used by `speculative.decoding` on CPUs.

A plain round has one draft row per request. So few rows take almost as long as many: at batch 8 on a CPU, a tenth of
the round. So rows wait until there are `MAX_ROUNDS` per request, or until another kind of step follows, which they
precede.

On GPUs every plain round writes them. That costs 1.2 to 1.7 % of a round (H200, Llama-3.1-8B, batch 1 to 128). A
backlog would need a second graph of plain rounds per batch size, and one that writes it.
"""

import torch
from torch import Tensor

from attention.metadata import DecodeBatch, Mode, causal_mask
from speculative.drafts.drafter import DraftRunner
from speculative.step_parts import Rounds
from workers.slots.slot_table import SlotTable

MAX_ROUNDS = 16


class DraftBacklog:
    """Rounds of the same requests, one after another. Their pages get a new owner only after a step of other requests,
    which writes the backlog first."""

    def __init__(self, draft: DraftRunner, slots: SlotTable) -> None:
        self._draft = draft
        self._table = slots
        self._slots: Tensor | None = None
        self._rounds: list[Rounds] = []
        self._max_kv_len = 0

    def add(self, slots: Tensor, rounds: Rounds, max_kv_len: int) -> None:
        """Add the rows of a plain round.

        slots: [B] int64.
        max_kv_len: see `DecodeBatch`.
        """
        if self._slots is not None and not torch.equal(self._slots, slots):
            self.write()
        self._slots, self._max_kv_len = slots, max_kv_len
        self._rounds.append(rounds)
        # a request that has ended goes no further, so that its next row would not come after this one
        if len(self._rounds) == MAX_ROUNDS or bool(self._table.finished[slots].any()):
            self.write()

    def write(self) -> None:
        """Write all waiting rows."""
        if self._slots is None:
            return
        rounds, count, num_requests = self._rounds, len(self._rounds), len(self._slots)
        ids = torch.cat([of.committed.commit.tokens for of in rounds], dim=1)
        features = torch.stack([of.features for of in rounds if of.features is not None], dim=1)
        extend = DecodeBatch(
            Mode.DRAFT_EXTEND,
            count,
            count,
            rounds[0].length,
            causal_mask(num_requests, count, ids.device),
            rounds[-1].page_table,
            self._max_kv_len,
        )
        self._draft.keep(ids.flatten(), features.flatten(0, 1), extend, None)
        self._slots, self._rounds = None, []
