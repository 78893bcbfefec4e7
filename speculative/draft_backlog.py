"""Writes the draft's KV of several non-speculative rounds at a time. Used by `aerie.speculative.decoding` on CPUs.

A non-speculative round has one draft row per request, and a pass over few rows takes almost as long as one over many:
at batch 8 on a CPU, a tenth of the round. So rows are collected, and written at `MAX_ROUNDS` per request, at `MAX_ROWS`
in all, or just before another kind of step. At batch 1, 16 rows take 2.2 to 3.8 ms, one row half of that, and a round
17.

On GPUs every non-speculative round writes its rows, which costs 1.2 to 1.7 % of a round (H200, Llama-3.1-8B, batch 1 to
128). A backlog would need two more graphs per batch size.
"""

import torch
from torch import Tensor

from aerie.kernels.kv.batches import DecodeBatch, Mode, causal_mask
from aerie.speculative.drafts.drafter import DraftRunner
from aerie.speculative.step_parts import Rounds
from aerie.workers.slots.slot_table import SlotTable

MAX_ROUNDS = 48  # a mask has 63 bits
MAX_ROWS = 512  # of all requests together; bounds the memory of their features


class DraftBacklog:
    """The rows of consecutive rounds of the same requests. A step of other requests writes the backlog first, so pages
    have no new owner before."""

    def __init__(self, draft: DraftRunner, slots: SlotTable) -> None:
        self._draft = draft
        self._table = slots
        self._slots: Tensor | None = None
        self._rounds: list[Rounds] = []
        self._max_kv_len = 0

    def add(self, slots: Tensor, rounds: Rounds, max_kv_len: int) -> None:
        """Add the rows of a round.

        slots: [B] int64.
        max_kv_len: see `DecodeBatch`.
        """
        if self._slots is not None and self._slots is not slots and not torch.equal(self._slots, slots):
            self.write()
        self._slots, self._max_kv_len = slots, max_kv_len
        self._rounds.append(rounds)
        # an ended request does not advance, so its next row would not follow this one
        is_full = len(self._rounds) == max(1, min(MAX_ROUNDS, MAX_ROWS // len(slots)))
        if is_full or bool(self._table.finished[slots].any()):
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
