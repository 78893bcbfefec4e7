"""The MTP module of Qwen3-Next, Qwen3.5, 3.6 and 3.8: one layer of gated attention, with an MLP or experts. It has KV
and no recurrent layer."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from speculative.drafts.config import check_target, draft_architecture
from speculative.drafts.mtp import Mtp, MtpModel
from workers.distributed.tp_group import TPGroup
from workers.layers.norm import ZeroCentredRMSNorm
from workers.layers.rotary import RotaryTable
from workers.models.config import ModelConfig
from workers.models.config_fields import flag_of, section_of, size_of
from workers.models.name_map import NameMap
from workers.models.qwen.hybrid import HybridConfig, make_layer
from workers.models.qwen.hybrid_names import layer_rules, packed_experts
from workers.models.registry import family_of

ARCHITECTURES = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3NextForCausalLM",
)


@dataclass(frozen=True)
class QwenMtp(Mtp):
    """The first layer of a checkpoint's MTP module. model: configuration of that layer."""

    layer_name: ClassVar[str] = "mtp.layers.0"
    model: HybridConfig

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return draft_architecture(raw) in ARCHITECTURES

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        source = f"draft {path}"
        whole = family_of(draft_architecture(raw), source).read_config(dict(raw), source)
        assert isinstance(whole, HybridConfig), "the architectures are hybrids"
        check_target(path, whole, whole.hidden_size, target)
        _check_module(raw, source)
        experts = None if whole.experts is None else dataclasses.replace(whole.experts, layers=frozenset({0}))
        model = dataclasses.replace(
            whole, num_layers=1, recurrent=frozenset(), experts=experts, whole_experts=target.whole_experts
        )
        return cls(path, model, target.vocab_size, ())

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> MtpModel:
        model = self.model
        rotary = RotaryTable(model.rope, model.rotated_dim, max_position, device)
        return MtpModel(self, group, make_layer(model, 0, group), rotary, model.rms_eps, ZeroCentredRMSNorm)

    @property
    def weight_names(self) -> NameMap:
        """Map checkpoint names to parameters. The target's tensors are not read."""
        rules = {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "norm": "mtp.norm",
            "embed_tokens": "mtp.embed_tokens",
            "lm_head": "mtp.lm_head",
        }
        return NameMap(
            rules | layer_rules("layer", self.layer_name),
            ignored=("model.*", "lm_head.*", "mtp.layers.[!0]*.*", "mtp.embed_tokens.*", "mtp.lm_head.*"),
            packed=packed_experts(self.model, self.layer_name),
        )


def _check_module(raw: Mapping[str, Any], source: str) -> None:
    """Raise ValueError if the checkpoint has no module, or one with its own embedding. Qwen3-Next's config.json does
    not say whether there is one; its weights show it."""
    text = {**raw, **section_of(raw, "text_config", source)}
    known = "mtp_num_hidden_layers" in text
    if known and size_of(text, "mtp_num_hidden_layers", source, least=0) < 1:
        raise ValueError(
            f"{source}: mtp_num_hidden_layers=0: the checkpoint has no module for drafting; use a head of another "
            "method, or leave the section `speculative` out"
        )
    if flag_of(text, "mtp_use_dedicated_embeddings", source):
        raise ValueError(f"{source}: mtp_use_dedicated_embeddings=true is not supported; only false is")
