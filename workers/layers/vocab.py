"""Embedding and logits over vocabulary shards, and reductions over them that move a few numbers instead of logits.

The vocabulary is cut into equal shards; if it does not divide, the last ranks' shards are padded and their padding's
logits are minus infinity. A shard may be all padding: its reductions are minus infinity then, never NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.distributed.tp_group import TPGroup
from workers.layers.linear import check_shape
from workers.layers.linear_method import Multiplies


class VocabShard:
    """This rank's token ids [first, end) of a vocabulary; `size` rows, of which end - first are real."""

    def __init__(self, vocab_size: int, group: TPGroup) -> None:
        self.vocab_size = vocab_size
        self.group = group
        self.size = -(-vocab_size // group.size)
        self.first = min(group.rank * self.size, vocab_size)
        self.end = min(self.first + self.size, vocab_size)

    def load_rows(self, target: Tensor, name: str, full: Tensor) -> None:
        """Copy this rank's rows of a full [vocab, ...] tensor; padding rows become zero."""
        check_shape(name, full, (self.vocab_size, *target.shape[1:]))
        target.zero_()
        target[: self.end - self.first].copy_(full[self.first : self.end])

    def argmax(self, logits: Tensor) -> Tensor:
        """[rows] int64 token ids of the largest of logits [rows, size], the same on every rank; ties go to the
        smallest id. One gather of two numbers per row and rank."""
        index = argmax(logits)
        if self.group.size == 1:
            return index
        return self.best_of_ranks(logits.gather(-1, index.unsqueeze(-1)).squeeze(-1), index)

    def best_of_ranks(self, value: Tensor, index: Tensor) -> Tensor:
        """[rows] int64 token ids: of the ranks' largest values [rows], at columns index [rows] int64 of their shards,
        the largest; ties go to the lowest rank. The same on every rank."""
        if self.group.size == 1:
            return index
        # float64 carries both the float32 value and an id below 2^53 exactly.
        packed = torch.stack((value.double(), (index + self.first).double()), dim=-1)
        gathered = self.group.all_gather(packed)
        best = gathered[..., 0].argmax(0, keepdim=True)
        return gathered[..., 1].gather(0, best).squeeze(0).long()

    def topk_log_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest log-probabilities [rows, k] float32, best first, and their ids [rows, k] int64 in the
        vocabulary, of logits [rows, size]; the same on every rank. One gather of 2 k + 1 numbers per row and rank."""
        k = min(k, self.vocab_size)
        local_k = min(k, logits.shape[-1])
        best, index, norm = _topk_log_softmax(logits, local_k)
        if self.group.size == 1:
            return best, index
        value = best + norm.unsqueeze(-1)
        packed = torch.cat((norm.double().unsqueeze(-1), value.double(), (index + self.first).double()), dim=-1)
        gathered = self.group.all_gather(packed)
        norms, values, ids = gathered[..., :1], gathered[..., 1 : 1 + local_k], gathered[..., 1 + local_k :]
        values = values.movedim(0, 1).flatten(1)
        best, place = values.topk(k, -1)
        log_probability = best - torch.logsumexp(norms.squeeze(-1), 0).unsqueeze(-1)
        return log_probability.float(), ids.movedim(0, 1).flatten(1).gather(1, place).long()

    def gather_logits(self, logits: Tensor) -> Tensor:
        """[rows, vocab_size] from every rank's logits [rows, size]."""
        return self.group.all_gather_last(logits)[..., : self.vocab_size]

    def mask_padding(self, logits: Tensor) -> Tensor:
        """Padding columns of logits [rows, size] to minus infinity, in place."""
        if self.end - self.first < self.size:
            logits[:, self.end - self.first :] = float("-inf")
        return logits


class VocabEmbedding(nn.Module):
    """Rows of a [vocab, hidden] table, cut by vocabulary: each rank looks up its own ids and the results are summed."""

    def __init__(self, vocab_size: int, hidden_size: int, group: TPGroup) -> None:
        super().__init__()
        self.shard = VocabShard(vocab_size, group)
        self.weight = nn.Parameter(torch.empty(self.shard.size, hidden_size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[rows, hidden] for token ids [rows] int64."""
        shard = self.shard
        if shard.group.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - shard.first
        mine = (local >= 0) & (local < shard.size)
        rows = F.embedding(torch.where(mine, local, 0), self.weight) * mine.unsqueeze(-1)
        return shard.group.all_reduce(rows)

    def load(self, part: str, kind: str, full: Tensor) -> None:
        self.shard.load_rows(self.weight.data, part, full)


class LMHead(Multiplies):
    """Logits of this rank's vocabulary shard; may share its weight with the embedding."""

    def __init__(self, vocab_size: int, hidden_size: int, group: TPGroup, tied: VocabEmbedding | None = None) -> None:
        super().__init__()
        self.shard = VocabShard(vocab_size, group)
        self._tied = (tied,)  # in a tuple: the embedding is not this module's child
        self.own = None if tied else nn.Parameter(torch.empty(self.shard.size, hidden_size), requires_grad=False)

    def product_weight(self) -> Tensor:
        tied = self._tied[0]
        if self.own is not None:
            return self.own
        assert tied is not None
        return tied.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, shard size] logits of hidden [rows, hidden_size]."""
        return self.shard.mask_padding(self.multiply(hidden, None))

    def load(self, part: str, kind: str, full: Tensor) -> None:
        self.shard.load_rows(self.product_weight().data, part, full)


def argmax(logits: Tensor) -> Tensor:
    """[rows] int64: the column of the largest of logits [rows, n]."""
    if logits.is_cuda:
        from workers.layers.kernels.argmax import argmax as fast_argmax

        return fast_argmax(logits)
    return logits.argmax(-1)


def _topk_log_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of log_softmax(logits) [rows, k] float32, best first, their columns, and logsumexp [rows]; of rows
    that are all minus infinity both are that."""
    if logits.is_cuda:
        from workers.layers.kernels.topk import MAX_K, topk_log_softmax

        if k <= MAX_K:
            return topk_log_softmax(logits, k)
    norm = torch.logsumexp(logits.float(), -1)
    value, index = logits.float().topk(k, -1)
    return value - finite(norm).unsqueeze(-1), index, norm


def finite(norm: Tensor) -> Tensor:
    """norm [rows], a logsumexp, to take from logits: 0 for rows that are all minus infinity, which stay so."""
    return norm.masked_fill(norm == float("-inf"), 0.0)
