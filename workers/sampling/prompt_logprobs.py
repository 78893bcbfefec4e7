"""Log-probabilities of prompt tokens, in blocks of rows: what a step holds of its vocabulary does not grow with the
prompt. Called by decoding strategies."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.layers.vocab import LMHead
from workers.sampling.sampler import logprobs_of

BLOCK_BYTES = 1 << 26  # of a block's logits as float32: 130 rows of 128,000 tokens


@dataclass(frozen=True)
class PromptRanking:
    """Where n prompt tokens stand among all that could have come.

    logprobs: [n] float32, nats.
    ranks: [n] int32, one more than how many tokens are likelier.
    top_ids, top: [n, k] int32 and float32, the k most likely tokens and their log-probabilities, best first.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor


def rank_prompt(head: LMHead, hidden: Tensor, tokens: Tensor, num_top: int) -> PromptRanking:
    """The ranking of tokens [n] int64, n >= 1, after rows of hidden [n, H]; the same on every rank."""
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
