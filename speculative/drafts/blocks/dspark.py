"""DSpark (DeepSpec): DFlash with a Markov head, which adds a bias to a row's logits that depends on the token
before."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from aerie.speculative.drafts.blocks.config import all_keys
from aerie.speculative.drafts.blocks.dflash import Block, DFlash, DFlashModel
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.linear import ReplicatedLinear
from aerie.workers.layers.vocab import LMHead, VocabEmbedding
from aerie.workers.models.config_fields import size_of

_TYPES = ("vanilla", "gated")


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
        given = all_keys(path, raw)
        kind = given.get("markov_head_type", "vanilla")
        if kind not in _TYPES:
            raise ValueError(
                f"draft {path}: markov_head_type={kind!r} is not supported; use a head of type {' or '.join(_TYPES)}"
            )
        return {"rank": size_of(given, "markov_rank", f"draft {path}", 256), "gated": kind == "gated"}

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "DSparkModel":
        return DSparkModel(self, group, max_position, device)

    def head_names(self) -> dict[str, str]:
        return {"markov_{module}": "markov_head.markov_{module}", "gate_proj": "markov_head.gate_proj"}


class DSparkModel(DFlashModel):
    """markov_w1 is replicated, so that a level needs no exchange for it; markov_w2 is sharded like the vocabulary head.
    The confidence head is not loaded, because path probabilities order the nodes."""

    conditional: ClassVar[bool] = True

    def __init__(self, method: DSpark, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group, max_position, device)
        self.markov_w1 = VocabEmbedding(method.model.vocab_size, method.rank, SOLO)
        self.markov_w2 = LMHead(method.vocab_size, method.rank, group)
        width = method.model.hidden_size + method.rank
        self.gate_proj = ReplicatedLinear(width, method.rank, bias=True) if method.gated else None

    def after(self, block: Block, row: int, previous: Tensor) -> Tensor:
        embedded = self.markov_w1(previous.flatten())
        if self.gate_proj is not None:
            states = block.states[:, row].repeat_interleave(previous.shape[1], dim=0)
            embedded = torch.sigmoid(self.gate_proj(torch.cat((states, embedded), dim=-1))) * embedded
        biases: Tensor = self.markov_w2(embedded)
        biases.view(*previous.shape, -1).add_(block.logits[:, row].unsqueeze(1))  # copies no logits for each parent
        return biases
