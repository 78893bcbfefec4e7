"""DSpark (DeepSpec): DFlash with a Markov head, which adds a bias to a row's logits that depends on the token before.
`BiasedModel` is the part that Domino shares."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.drafting.block_head import score_candidates
from aerie.speculative.drafts.blocks.config import all_keys
from aerie.speculative.drafts.blocks.dflash import Block, DFlash, DFlashModel, RowCandidates
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.linear import ReplicatedLinear
from aerie.workers.layers.vocab import VocabEmbedding
from aerie.workers.models.config_fields import size_of

_TYPES = ("vanilla", "gated")
CORRECTED = 64  # as in DominoTree (arXiv 2607.08642); the target's token is among a row's best 8 in 99 % of rows


@dataclass(frozen=True)
class DSpark(DFlash):
    """A DSpark head.

    rank: rank of the Markov head.
    gated: whether a gate computed from the row's state multiplies the embedding of the previous token.
    """

    name: ClassVar[str] = "dspark"
    keys: ClassVar[frozenset[str]] = frozenset(("markov_rank", "markov_head_type", "confidence_temperatures"))
    rank: int
    gated: bool

    @classmethod
    def head_fields(cls, path: str, raw: Mapping[str, Any]) -> dict[str, Any]:
        keys = all_keys(path, raw)
        kind = keys.get("markov_head_type", "vanilla")
        if kind not in _TYPES:
            raise ValueError(
                f"draft {path}: markov_head_type={kind!r} is not supported; use a head of type {' or '.join(_TYPES)}"
            )
        return {"rank": size_of(keys, "markov_rank", f"draft {path}", 256), "gated": kind == "gated"}

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "DSparkModel":
        return DSparkModel(self, group, max_position, device)

    def head_names(self) -> dict[str, str]:
        names = {"markov_w1": "markov_w1", "successors": "markov_w2", "gate_proj": "gate_proj"}
        return {module: f"markov_head.{name}" for module, name in names.items()}


class BiasedModel(DFlashModel):
    """Adds a bias of low rank, which depends on the path before, to a row's logits.

    Only the tokens of a row with the best logits, CORRECTED of them, get their bias: a level of 50 parents would
    otherwise read and write the vocabulary 50 times. In a batch with random requests these are the best tokens with
    the target's noise, because that is what the target will draw from. Under grammars the whole vocabulary is scored.

    Vectors of tokens are replicated, so that a level needs no exchange for them.

    num_plain_rows: number of first rows without a bias.
    """

    conditional: ClassVar[bool] = True
    num_plain_rows: int = 0

    def __init__(self, method: DFlash, rank: int, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group, max_position, device)
        self.successors = VocabEmbedding(method.vocab_size, rank, SOLO)
        self.num_candidates = min(CORRECTED, method.vocab_size)

    def candidates_of(self, states: Tensor, logits: Tensor, noisy: Tensor | None = None) -> RowCandidates:
        shard, flat = self.lm_head.shard, logits.flatten(0, 1)
        scores, ids = shard.topk_log_softmax(flat if noisy is None else noisy, self.num_candidates)
        if noisy is not None:
            scores = shard.values_at(flat, ids)
        shape = (*logits.shape[:2], -1)
        return RowCandidates(scores.view(shape), ids.view(shape))

    def candidates_after(
        self, block: Block, row: int, previous: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        of = block.candidates
        assert of is not None
        if row < self.num_plain_rows:
            scores, ids = (part[:, row].repeat_interleave(previous.shape[1], dim=0) for part in (of.scores, of.ids))
            return scores, ids
        vectors, index = self.vectors(block, row, previous, state)
        return score_candidates(of.scores, of.ids, None, row, index, vectors, self.successors.weight)

    def after(self, block: Block, row: int, previous: Tensor, state: Tensor | None = None) -> Tensor:
        logits, shard = super().after(block, row, previous), self.lm_head.shard
        if row < self.num_plain_rows:
            return logits
        vectors, index = self.vectors(block, row, previous, state)
        biases = F.linear(vectors[index.flatten()], self.successors.weight[shard.first : shard.end])
        logits[:, : biases.shape[1]] += biases
        return logits

    @abstractmethod
    def vectors(self, block: Block, row: int, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return vectors [any, rank], and for each of previous [B, k] int64 target ids the index of its vector. state:
        of the paths to them."""


class DSparkModel(BiasedModel):
    """The vector depends on the previous token, and in gated heads on the row's state. The confidence head is not
    loaded, because path probabilities order the nodes."""

    def __init__(self, method: DSpark, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, method.rank, group, max_position, device)
        self.markov_w1 = VocabEmbedding(method.model.vocab_size, method.rank, SOLO)
        width = method.model.hidden_size + method.rank
        self.gate_proj = ReplicatedLinear(width, method.rank, bias=True) if method.gated else None

    def vectors(self, block: Block, row: int, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.gate_proj is None:
            return self.markov_w1.weight, previous
        embedded = self.markov_w1(previous.flatten())
        states = block.states[:, row].repeat_interleave(previous.shape[1], dim=0)
        gated = torch.sigmoid(self.gate_proj(torch.cat((states, embedded), dim=-1))) * embedded
        return gated, torch.arange(previous.numel(), device=previous.device).view(previous.shape)
