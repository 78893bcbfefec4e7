"""Embedding and logits over vocabulary shards, and reductions that exchange a few values instead of logits.

Shards have equal sizes. The last ones are padded if necessary, and the logits of padding are minus infinity. A shard
may be all padding; its reductions are then minus infinity, never NaN.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aerie.kernels.gemm.choice import TorchGEMM
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.span import Span
from aerie.kernels.vocabulary.topk_log_softmax import largest, topk_log_softmax
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.linear import LinearBase
from aerie.workers.layers.linear_method import DenseLinearMethod, LinearMethod, LinearShape, Part
from aerie.workers.layers.weighted import WeightedModule, WeightKey, check_plain, check_shape


class VocabShard:
    """This rank's token ids [first, end). `size` rows include padding."""

    def __init__(self, vocab_size: int, group: TPGroup) -> None:
        self.vocab_size = vocab_size
        self.group = group
        self.size = -(-vocab_size // group.size)
        self.first = min(group.rank * self.size, vocab_size)
        self.end = min(self.first + self.size, vocab_size)

    def argmax(self, logits: Tensor, checked: bool = False) -> Tensor:
        """Return the [rows] int64 token ids of the largest logits, the same on every rank; ties go to the smallest id.
        Gathers two numbers per row and rank, once.

        logits: [rows, size].
        checked: whether rows with NaN or plus infinity return a negative id, instead of any.
        """
        return self.best_of_ranks(*largest(logits, checked))

    def best_of_ranks(self, value: Tensor, index: Tensor) -> Tensor:
        """Return the [rows] int64 token ids of the largest value over the ranks, the same on every rank; ties go to the
        lowest rank. A column of `aerie.kernels.vocabulary.topk_log_softmax.NOT_FINITE` on a rank gives a negative id.

        value: [rows] this rank's largest values.
        index: [rows] int64 columns of these values in the shard.
        """
        if self.group.size == 1:
            return index
        # float64 carries both the float32 value and an id below 2^53 exactly.
        packed = torch.stack((value.double(), (index + self.first).double()), dim=-1)
        gathered = self.group.all_gather(packed)
        best = gathered[..., 0].argmax(0, keepdim=True)
        return gathered[..., 1].gather(0, best).squeeze(0).long()

    def topk_log_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest log-probabilities [rows, k] float32, best first, and their token ids [rows, k] int64;
        the same on every rank. Gathers 2 k + 1 numbers per row and rank, once.

        logits: [rows, size].
        """
        k = min(k, self.vocab_size)
        local_k = min(k, logits.shape[-1])
        best, index, norm = topk_log_softmax(logits, local_k)
        if self.group.size == 1:
            return best, index
        value = best + norm.unsqueeze(-1)
        packed = torch.cat((norm.double().unsqueeze(-1), value.double(), (index + self.first).double()), dim=-1)
        gathered = self.group.all_gather(packed)
        norms, values, ids = gathered[..., :1], gathered[..., 1 : 1 + local_k], gathered[..., 1 + local_k :]
        values = values.movedim(0, 1).flatten(1)
        if self.size * self.group.size == self.vocab_size:
            best, rank = values.topk(k, -1)
        else:  # padding is -inf like masked tokens; a stable sort keeps it after them
            best, rank = (tensor[:, :k] for tensor in values.sort(dim=-1, descending=True, stable=True))
        log_probability = best - torch.logsumexp(norms.squeeze(-1), 0).unsqueeze(-1)
        return log_probability.float(), ids.movedim(0, 1).flatten(1).gather(1, rank).long()

    def values_at(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of token ids that every rank has: [rows, n] float32, the same on every rank. Gathers n
        numbers per row and rank, once.

        logits: [rows, size].
        ids: [rows, n] int64.
        """
        if self.group.size == 1:
            return logits.gather(1, ids).float()
        local = ids - self.first
        mine = (local >= 0) & (local < self.size)
        own_values = logits.gather(1, torch.where(mine, local, 0)).float()
        return self.group.all_gather(torch.where(mine, own_values, float("-inf"))).amax(0)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather logits [rows, size] of all ranks: [rows, vocab_size]."""
        return self.group.all_gather_last(logits)[..., : self.vocab_size]

    def mask_padding(self, logits: Tensor) -> Tensor:
        """Set padding columns of logits [..., size] to minus infinity, in place."""
        if self.end - self.first < self.size:
            logits[..., self.end - self.first :] = float("-inf")
        return logits


class EmbeddingAdapters(Protocol):
    """Adapters of an embedding, chosen by row."""

    def add(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return the rows [n, hidden] with their adapters' part; may change them in place.

        ids: [n] int64, counted from the shard's first; outside of [0, size): of another rank, and nothing is added.
        """


class VocabEmbedding(WeightedModule):
    """An embedding table [vocab, hidden], sharded by vocabulary. Each rank looks up its ids; the results are summed.

    weight: [rows of the shard, hidden]; without rows while a tied head's GEMM has the table.
    shape: the transposed table without padding, whose product with a one-hot vector is a row.
    adapters: None in engines without adapters.
    """

    adapters: EmbeddingAdapters | None = None

    def __init__(self, vocab_size: int, hidden_size: int, group: TPGroup) -> None:
        super().__init__()
        self.shard = VocabShard(vocab_size, group)
        ids = Span(self.shard.first, self.shard.end, vocab_size)
        self.shape = LinearShape.stacked([("", Span.whole(hidden_size))], ids)
        self.weight = nn.Parameter(torch.empty(self.shard.size, hidden_size), requires_grad=False)
        self._table: TorchGEMM | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def is_sharded(self) -> bool:
        return self.shard.group.size > 1

    def move_to(self, table: TorchGEMM) -> None:
        """Free the weight, which `table` has in its own layout."""
        self._table = table
        self.weight.data = self.weight.data.new_empty((0, self.weight.shape[1]))

    def reopen(self) -> None:
        self.weight.data, self._table = self.dense_weight.data, None

    @property
    def dense_weight(self) -> Tensor:
        """Return the weight; a copy, converted at each call, after `move_to`."""
        return self.weight if self._table is None else self._table.dense()

    def _rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) if self._table is None else self._table.rows(ids)

    def forward(self, ids: Tensor) -> Tensor:
        """Return [rows, hidden] for token ids [rows] int64."""
        shard = self.shard
        if shard.group.size == 1:
            rows = self._rows(ids)
            return rows if self.adapters is None else self.adapters.add(rows, ids)
        local = ids - shard.first
        mine = (local >= 0) & (local < shard.size)
        rows = self._rows(torch.where(mine, local, 0)) * mine.unsqueeze(-1)
        if self.adapters is not None:
            rows = self.adapters.add(rows, local)
        return shard.group.all_reduce(rows)

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return (WeightKey("weight"),)

    def load(self, key: WeightKey, full: Tensor) -> None:
        shard = self.shard
        check_plain(full)
        check_shape(full, (shard.vocab_size, self.weight.shape[1]))
        self.weight.data.zero_()  # padding rows stay zero
        self.weight.data[: shard.end - shard.first].copy_(full[shard.first : shard.end])

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.weight.data.normal_(0.0, 0.02, generator=generator)


class TiedLinearMethod(DenseLinearMethod):
    """Multiplies by the embedding's weight. Loads nothing."""

    kinds = ()

    def __init__(self, shape: LinearShape, embedding: VocabEmbedding) -> None:
        super().__init__(shape)
        self._embedding = (embedding,)  # the tuple keeps it from being a submodule

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding[0].weight.dtype

    def dense_weight(self) -> Tensor:
        return self._embedding[0].dense_weight

    def finish(self, options: GEMMOptions) -> None:
        super().finish(options)
        if self._gemm is not None and self._gemm.owns_weight:
            self._embedding[0].move_to(self._gemm)

    @property
    def reload_fault(self) -> str:
        return ""

    def reloaded(self) -> None:
        is_stale = len(self._embedding[0].weight) > 0  # the embedding was reopened, or the GEMM may have a copy
        if self._options is not None and self._options.workspace is None and is_stale:
            self._gemm = None
            self.finish(self._options)

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        raise AssertionError("has nothing to load")

    def fill_dummy(self, generator: torch.Generator) -> None:
        pass


class LMHead(LinearBase):
    """Logits of this rank's vocabulary shard. May share the embedding's weight.

    divisor: divides the logits (Granite).
    soft_cap: then, soft_cap * tanh(logit / soft_cap) replaces each logit; None: no cap.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: TPGroup,
        tied: VocabEmbedding | None = None,
        bias: bool = False,
        soft_cap: float | None = None,
        divisor: float = 1.0,
    ) -> None:
        shard = VocabShard(vocab_size, group)
        rows = Span(shard.first, shard.end, vocab_size)
        shape = LinearShape.stacked([("", rows)], Span.whole(hidden_size), padding=shard.size - rows.size)
        method: LinearMethod | None = TiedLinearMethod(shape, tied) if tied else None
        super().__init__(shape, bias, method)
        self.shard = shard
        self.soft_cap = soft_cap
        self.divisor = divisor

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, shard size] of hidden [rows, hidden_size]."""
        return self.scaled(hidden, self.divisor, self.soft_cap)

    def scaled(self, hidden: Tensor, divisor: float, soft_cap: float | None) -> Tensor:
        """Do `forward` with another divisor and soft cap, for a draft that shares the head."""
        logits = self.method.multiply(hidden, self.bias)
        if divisor != 1.0:
            logits = logits.div_(divisor)
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        return self.shard.mask_padding(logits)
