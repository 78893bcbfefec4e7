"""The module of DeepSeek-V3 and its like (arXiv 2412.19437, section 2.2): one more layer after the target's, of latent
attention and experts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from speculative.drafts.config import check_target, draft_architecture
from speculative.drafts.mtp import Mtp, MtpModel
from workers.distributed.tp_group import TPGroup
from workers.layers.rotary import RotaryTable
from workers.models.config import ModelConfig
from workers.models.deepseek import DeepseekConfig, layer_rules, make_layer, read_config
from workers.models.name_map import NameMap

ARCHITECTURES = ("DeepseekV3ForCausalLM",)


@dataclass(frozen=True)
class DeepseekMtp(Mtp):
    """model: of the module's layer. layer: its number in the checkpoint, after those of the target. Of several modules
    the first is used."""

    model: DeepseekConfig
    layer: int

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

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> MtpModel:
        model = self.model
        rotary = RotaryTable(model.rope, model.rotated_dim, max_position, device)
        return MtpModel(self, group, make_layer(model, 0, group), rotary, model.rms_eps)

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
