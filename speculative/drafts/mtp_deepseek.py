"""MTP modules that are stored as one more layer after the target's layers: DeepSeek-V3 (arXiv 2412.19437, section 2.2)
and GLM's mixtures of experts."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from speculative.drafts.config import check_target, draft_architecture
from speculative.drafts.mtp import Mtp, MtpModel
from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import DecoderLayer
from workers.layers.rotary import RotaryTable
from workers.models import deepseek
from workers.models.config import ModelConfig
from workers.models.deepseek import DeepseekConfig
from workers.models.glm import glm4_moe, glm4_moe_lite
from workers.models.glm.glm4_moe import Glm4MoeConfig
from workers.models.name_map import NameMap


@dataclass(frozen=True)
class _Family:
    """A family's checkpoint: how to read its config, build a layer, and map a layer's tensor names (ours, theirs)."""

    read_config: Callable[[dict[str, Any], str], Any]
    make_layer: Callable[[Any, int, TPGroup], DecoderLayer]
    layer_rules: Callable[[str, str], dict[str, str]]


_DEEPSEEK = _Family(deepseek.read_config, deepseek.make_layer, deepseek.layer_rules)
_FAMILIES = {
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _Family(glm4_moe.read_config, glm4_moe.make_layer, glm4_moe.layer_rules),
    "Glm4MoeLiteForCausalLM": dataclasses.replace(_DEEPSEEK, read_config=glm4_moe_lite.read_config),
}


@dataclass(frozen=True)
class DeepseekMtp(Mtp):
    """The first MTP module of a checkpoint.

    model: configuration of the module's layer.
    layer: its number in the checkpoint, after the target's layers.
    """

    model: DeepseekConfig | Glm4MoeConfig
    layer: int

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return draft_architecture(raw) in _FAMILIES

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        family = _FAMILIES[draft_architecture(raw)]
        whole: DeepseekConfig | Glm4MoeConfig = family.read_config(dict(raw), f"draft {path}")
        check_target(path, whole, whole.hidden_size, target)
        if whole.num_mtp_layers < 1:
            raise ValueError(
                f"draft {path}: num_nextn_predict_layers={whole.num_mtp_layers}: the checkpoint has no module for "
                "drafting; use a head of another method, or leave the section `speculative` out"
            )
        layer = whole.num_layers
        alone: dict[str, Any] = {"num_layers": 1, "first_moe_layer": 0 if whole.has_experts(layer) else 1}
        if isinstance(whole, DeepseekConfig):
            alone["moe_layer_step"] = 1
        model = dataclasses.replace(whole, whole_experts=target.whole_experts, **alone)
        return cls(path, model, target.vocab_size, (), layer)

    @property
    def _family(self) -> _Family:
        return _FAMILIES[self.model.architecture]

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> MtpModel:
        model = self.model
        rotary = RotaryTable(model.rope, model.rotated_dim, max_position, device)
        return MtpModel(self, group, self._family.make_layer(model, 0, group), rotary, model.rms_eps)

    @property
    def layer_name(self) -> str:
        return f"model.layers.{self.layer}"

    @property
    def weight_names(self) -> NameMap:
        """Map checkpoint names to parameters. The module's copies of embedding and head, and the target's tensors, are
        not read."""
        theirs, others = self.layer_name, range(self.layer + self.model.num_mtp_layers)
        rules = {"norm": f"{theirs}.shared_head.norm", "lm_head": f"{theirs}.shared_head.head"}
        return NameMap(
            rules | self._family.layer_rules("layer", theirs) | {"{module}": f"{theirs}.{{module}}"},
            ignored=(
                *(f"model.layers.{other}.*" for other in others if other != self.layer),
                *("model.embed_tokens.*", "model.norm.*", "lm_head.*", "*.rotary_emb.inv_freq"),
                *(f"{theirs}.embed_tokens.*", f"{theirs}.shared_head.head.*"),
            ),
        )
