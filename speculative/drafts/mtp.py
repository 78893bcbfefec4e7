"""The module for multi-token prediction that comes with DeepSeek-V3 and its like (arXiv 2412.19437, section 2.2): the
target's final hidden state and the next token's embedding through one projection and one more layer of the target's
kind. One module drafts every depth; embedding and vocabulary head are the target's."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from speculative.drafts.config import check_target, draft_architecture
from speculative.drafts.method import DraftMethod, DraftModel
from workers.distributed.tp_group import TPGroup
from workers.layers.forward_context import ForwardContext
from workers.layers.linear import ReplicatedLinear
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryTable
from workers.models.config import ModelConfig
from workers.models.decoder import DecoderOutput
from workers.models.deepseek import DeepseekConfig, layer_rules, make_layer, read_config
from workers.models.name_map import NameMap
from workers.ops.fp8.rows import Fp8Rows

ARCHITECTURES = ("DeepseekV3ForCausalLM",)


@dataclass(frozen=True)
class Mtp(DraftMethod):
    """model: of the module's layer. layer: its number in the checkpoint, after those of the target. Of several modules
    the first is used."""

    name: ClassVar[str] = "mtp"
    shares_vocabulary: ClassVar[bool] = True
    trims_head: ClassVar[bool] = True
    model: DeepseekConfig
    layer: int

    @classmethod
    def folder(cls, draft_path: str, target_path: str) -> str:
        """The target's, unless the module is kept elsewhere."""
        return draft_path or target_path

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return draft_architecture(raw) in ARCHITECTURES

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        whole = read_config(dict(raw), f"draft {path}")
        check_target(path, whole, whole.hidden_size, target)
        if whole.num_mtp_layers < 1:
            raise ValueError(
                f"draft {path}: num_nextn_predict_layers={whole.num_mtp_layers}: the checkpoint has no module for "
                "drafting; use a head of another method, or leave the section `speculative` out"
            )
        layer = whole.num_layers
        first = 0 if whole.has_experts(layer) else 1
        model = dataclasses.replace(
            whole, num_layers=1, first_moe_layer=first, moe_layer_step=1, whole_experts=target.whole_experts
        )
        return cls(path, model, target.vocab_size, (), layer)

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "MtpModel":
        return MtpModel(self, group, max_position, device)

    @property
    def weight_names(self) -> NameMap:
        """The rest of the checkpoint is the target's; the module's copies of embedding and head are not used."""
        theirs, others = f"model.layers.{self.layer}", range(self.layer + self.model.num_mtp_layers)
        rules = {"norm": f"{theirs}.shared_head.norm", "lm_head": f"{theirs}.shared_head.head"}
        return NameMap(
            rules | layer_rules("layer", theirs) | {"{module}": f"{theirs}.{{module}}"},
            ignored=(
                *(f"model.layers.{other}.*" for other in others if other != self.layer),
                *("model.embed_tokens.*", "model.norm.*", "lm_head.*", "*.rotary_emb.inv_freq"),
                *(f"{theirs}.embed_tokens.*", f"{theirs}.shared_head.head.*"),
            ),
        )


class MtpModel(DraftModel):
    """Its recurrent state, which takes the place of the target's hidden state, is what left its last norm."""

    reads_last_layer: ClassVar[bool] = True

    def __init__(self, method: Mtp, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group)
        model, size = method.model, method.model.hidden_size
        self.rotary = RotaryTable(model.rope, model.rotated_dim, max_position, device)
        self.enorm, self.hnorm, self.norm = (RMSNorm(size, model.rms_eps) for _ in range(3))
        self.eh_proj = ReplicatedLinear(2 * size, size)
        self.layer = make_layer(model, 0, group)

    def features(self, output: DecoderOutput) -> Tensor:
        return output.hidden

    def keep(self, ids: Tensor, features: Tensor, context: ForwardContext) -> None:
        normed, _ = self._input(ids, features)
        self.layer.self_attn.keep(normed, self.rotary.at(context.positions), context)

    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        normed, residual = self._input(ids, hidden)
        added, residual = self.layer(normed, residual, self.rotary.at(context.positions), context)
        state, _ = self.norm.add(added, residual, self.group)
        return state

    def _input(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor | Fp8Rows, Tensor]:
        """What the layer's attention reads, and the residual stream."""
        residual = self.eh_proj(torch.cat((self.enorm(self.embed_tokens(ids)), self.hnorm(hidden)), dim=-1))
        return self.layer.input_layernorm.for_product(residual, self.layer.self_attn.fp8_inputs), residual

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits
