"""`SuffixDrafts`: a rank's drafts that are copied from the requests' own tokens. Used by `aerie.speculative.decoding`.
Needs no model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.drafting.suffix_match import MatchLimits, attach_chains, find_matches, record_tokens
from aerie.kernels.slots.commit import Commit
from aerie.kernels.tree.nodes import NO_TOKEN
from aerie.speculative.tree_table import TreeTable
from aerie.workers.slots import SlotTable


@dataclass(frozen=True)
class SuffixDrafts:
    """Reads and writes the slots' tokens (`SlotTable.tokens`).

    trees: receive the drafts, as a branch.
    chains: [num_slots + 1, K] int64, the tokens proposed after each slot's newest token.
    """

    slots: SlotTable
    trees: TreeTable
    limits: MatchLimits
    chains: Tensor

    @staticmethod
    def of(slots: SlotTable, trees: TreeTable, limits: MatchLimits, num_tokens: int) -> "SuffixDrafts":
        """Return drafts of up to `num_tokens` tokens, without proposals."""
        shape = slots.padding_slot + 1, num_tokens
        chains = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=slots.device)
        return SuffixDrafts(slots, trees, limits, chains)

    def record(self, slots: Tensor, length: Tensor, commit: Commit) -> Tensor:
        """Append a commit's tokens. Return how many of them were proposed, [B] int64; -1 without a proposal.

        slots: [B] int64.
        length: [B] int32, committed KV tokens before it.
        """
        return record_tokens(self.slots.tokens, slots, length, commit.tokens, commit.counts, self.chains)

    def draft(self, slots: Tensor, max_kv_len: int, first: int = 1) -> Tensor:
        """Draft for slots [B] int64, whose newest tokens are recorded. Return the lengths of their matches, [B] int64;
        0 where nothing is drafted.

        max_kv_len: host-side bound of their committed tokens.
        first: number of nodes of a model's tree, including the root; the branch's nodes follow.
        """
        table = self.slots
        lengths = find_matches(table.tokens, slots, table.seq_len, self.limits, self.chains, max_kv_len + 1)
        attach_chains(self.trees.trees, slots, self.chains, first)
        return lengths
