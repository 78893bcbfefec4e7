"""Domino (as SGLang 0.5.23 serves it; trees: arXiv 2607.08642): DFlash with a bias of low rank on a row's logits that
depends on the whole path, which a gated recurrent unit (GRU) reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.drafting.block_head import gru_step
from aerie.speculative.drafts.blocks.config import SCALES, all_keys
from aerie.speculative.drafts.blocks.dflash import Block, DFlash
from aerie.speculative.drafts.blocks.dflash2 import PlainTensors
from aerie.speculative.drafts.blocks.dspark import BiasedModel
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.linear import ReplicatedLinear
from aerie.workers.models.config_fields import size_of

_KEYS = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
_DEFAULTS = (256, 1024, 1)


@dataclass(frozen=True)
class Domino(DFlash):
    """A Domino head.

    rank: rank of the bias.
    state_size: size of a path's state.
    num_plain: number of first drafted tokens without a bias.
    """

    name: ClassVar[str] = "domino"
    keys: ClassVar[frozenset[str]] = SCALES | frozenset((*_KEYS, "projector_type", "shift_label"))
    rank: int
    state_size: int
    num_plain: int

    @classmethod
    def head_fields(cls, path: str, raw: Mapping[str, Any]) -> dict[str, Any]:
        keys = all_keys(path, raw)
        rank, state_size, num_plain = (
            size_of(keys, key, f"draft {path}", default, min_value=0 if key == _KEYS[2] else 1)
            for key, default in zip(_KEYS, _DEFAULTS, strict=True)
        )
        return {"rank": rank, "state_size": state_size, "num_plain": num_plain}

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "DominoModel":
        return DominoModel(self, group, max_position, device)

    def head_names(self) -> dict[str, str]:
        return {"prefix_gru": "prefix_gru", "reduce": "embed_proj.0", "successors": "embed_proj.2"}

    def head_aliases(self) -> tuple[tuple[str, str], ...]:
        return (("logit_head.", ""),)  # older checkpoints


class DominoModel(BiasedModel):
    """The state of a path is s = GRU(s of the path before, embedding of its last token), from 0 at the anchor. The
    bias on the row after it has the vector silu(reduce [state of the row; s])."""

    def __init__(self, method: Domino, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, method.rank, group, max_position, device)
        hidden, size = method.model.hidden_size, method.state_size
        self.num_plain_rows = method.num_plain
        self.prefix_gru = PlainTensors({"weight_ih_l0": (3 * size, hidden), "weight_hh_l0": (3 * size, size)})
        self.reduce = ReplicatedLinear(hidden + size, method.rank)

    def path_state(self, state: Tensor | None, tokens: Tensor) -> Tensor:
        input_weight, state_weight = (self.prefix_gru.get_parameter(f"weight_{part}_l0") for part in ("ih", "hh"))
        embedded = self.embed_tokens(tokens)
        if state is None:
            state = embedded.new_zeros(tokens.shape[0], state_weight.shape[1])
        return gru_step(F.linear(embedded, input_weight), F.linear(state, state_weight), state)

    def vectors(self, block: Block, row: int, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        assert state is not None, "`path_state` has computed it"
        states = block.states[:, row].repeat_interleave(previous.shape[1], dim=0)
        vectors = F.silu(self.reduce(torch.cat((states, state), dim=-1)))
        return vectors, torch.arange(previous.numel(), device=previous.device).view(previous.shape)
