"""EAGLE and EAGLE-2 heads (arXiv 2401.15077, 2406.16858): one projection and one decoder layer over the target's final
hidden state and the next token's embedding. Embedding and vocabulary head are the target's."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from aerie.speculative.drafts.config import check_target, check_width, read_layer
from aerie.speculative.drafts.drafter import IGNORED_WEIGHTS, DraftLayer, layer_names, same_names
from aerie.speculative.drafts.eagle3_config import HeadFlags
from aerie.speculative.drafts.method import DraftMethod, DraftModel
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import AttentionLayer
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear import ReplicatedLinear
from aerie.workers.layers.rotary import RotaryTable
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.config_fields import flag_of, section_of, size_of
from aerie.workers.models.llama import LlamaConfig
from aerie.workers.models.name_map import NameMap


@dataclass(frozen=True)
class Eagle(DraftMethod):
    """An EAGLE or EAGLE-2 head.

    projection_bias: whether the projection has a bias, as in published heads.
    """

    name: ClassVar[str] = "eagle"
    takes_adapters: ClassVar[bool] = True
    model: LlamaConfig
    projection_bias: bool

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        model = read_layer(path, raw)
        check_target(path, model, size_of(raw, "target_hidden_size", f"draft {path}", model.hidden_size), target)
        check_width(path, model, target, "an EAGLE head reads the target's hidden state and an embedding")
        flags = {**raw, **section_of(raw, "eagle_config", f"draft {path}")}
        set_flags = [flag.name for flag in fields(HeadFlags) if flags.get(flag.name)]
        if set_flags:
            raise ValueError(
                f"draft {path}: {', '.join(set_flags)} exists only in EAGLE-3 heads; set speculative.method: eagle3 "
                "if it is one, else use a head without it"
            )
        return cls(path, model, target.vocab_size, (), flag_of(raw, "bias", f"draft {path}", default=True))

    @property
    def weight_names(self) -> NameMap:
        return NameMap(same_names() | layer_names("layers.0"), (("model.", ""),), IGNORED_WEIGHTS)

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "EagleModel":
        return EagleModel(self, group, max_position, device)


class EagleModel(DraftModel):
    """An EAGLE head on one rank. In the next draft step its recurrent state takes the place of the target's hidden
    state."""

    reads_last_layer = True

    def __init__(self, method: Eagle, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group)
        self.rotary = RotaryTable(method.model.rope, method.model.head_dim, max_position, device)
        size = method.model.hidden_size
        self.fc = ReplicatedLinear(2 * size, size, method.projection_bias)
        self.layers = nn.ModuleList([DraftLayer(method.model, group, size)])

    def keep(self, ids: Tensor, features: Tensor, context: ForwardContext) -> None:
        attention: AttentionLayer = self.layers[0].self_attn  # type: ignore[assignment]
        attention.keep(self._input(ids, features), self.rotary.at(context.positions), context)

    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        x = self._input(ids, hidden)
        out: Tensor = self.layers[0](x, x, self.rotary.at(context.positions), context)
        return out

    def _input(self, ids: Tensor, hidden: Tensor) -> Tensor:
        x: Tensor = self.fc(torch.cat((self.embed_tokens(ids), hidden), dim=-1))
        return x
