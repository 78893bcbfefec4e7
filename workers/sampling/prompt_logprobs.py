"""Computes log-probabilities of prompt tokens, in blocks of rows, which bounds memory. Used by decoding strategies."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.workers.layers.vocab import LMHead
from aerie.workers.sampling.sampler import logprobs_of

BLOCK_BYTES = 1 << 26  # float32 logits per block: 130 rows of 128,000 tokens


@dataclass(frozen=True)
class PromptRanking:
    """Log-probabilities and ranks of n prompt tokens.

    logprobs: [n] float32, nats.
    ranks: [n] int32, 1 for the most likely token.
    top_ids: [n, k] int32, the k most likely tokens, best first.
    top: [n, k] float32, their log-probabilities.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor


def rank_prompt(head: LMHead, hidden: Tensor, tokens: Tensor, num_top: int) -> PromptRanking:
    """Rank tokens [n] int64, n >= 1, by the logits of hidden [n, H], the preceding rows. The result is equal on all
    ranks."""
    rows = max(1, BLOCK_BYTES // (4 * head.shard.vocab_size))
    pairs = zip(torch.split(hidden, rows), torch.split(tokens, rows), strict=True)
    blocks = [_rank(head, *pair, num_top) for pair in pairs]
    logprobs, ranks, top_ids, top = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return PromptRanking(logprobs, ranks, top_ids, top)


def _rank(head: LMHead, hidden: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = head.shard.gather_logits(head(hidden))
    found = logprobs_of(logits.unsqueeze(0), tokens.unsqueeze(0), num_top)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(1, dtype=torch.int32) + 1
    return found.chosen[0], ranks, found.top_ids[0].int(), found.top[0]
