"""Modules for multi-token prediction (MTP) that are part of a target's checkpoint. A module projects the target's final
hidden state and the next token's embedding to one vector, and runs one more decoder layer on it. The same module drafts
every depth, with the target's embedding and vocabulary head."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from aerie.kernels.fp8.rows import Fp8Rows
from aerie.speculative.drafts.config import check_target
from aerie.speculative.drafts.method import DraftMethod, DraftModel
from aerie.speculative.drafts.recognition import draft_architecture
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear import ReplicatedLinear
from aerie.workers.layers.norm import RMSNorm, ZeroCentredRMSNorm
from aerie.workers.layers.rotary import RotaryTable
from aerie.workers.models import deepseek, moe
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.config_fields import flag_of, section_of
from aerie.workers.models.deepseek import DeepseekConfig
from aerie.workers.models.glm4_moe import Glm4MoeConfig
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.qwen import hybrid
from aerie.workers.models.qwen.hybrid import HybridConfig, layer_rules, packed_experts
from aerie.workers.models.registry import family_of, mtp_modules_of


@dataclass(frozen=True)
class Mtp(DraftMethod):
    """A module.

    model: configuration of its layer.
    layer_name: the checkpoint's name of that layer.
    norm: class of its norms.
    """

    name: ClassVar[str] = "mtp"
    shared_modules: ClassVar[tuple[str, ...]] = ("embed_tokens", "lm_head")
    trims_head: ClassVar[bool] = True
    norm: ClassVar[type[RMSNorm]] = RMSNorm
    model: DeepseekConfig | Glm4MoeConfig | HybridConfig

    @property
    @abstractmethod
    def layer_name(self) -> str: ...

    @abstractmethod
    def make_layer(self, group: TPGroup) -> DecoderLayer: ...

    @classmethod
    def folder(cls, draft_path: str, target_path: str) -> str:
        """Return the configured draft's folder, or else the target's."""
        return draft_path or target_path

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "MtpModel":
        return MtpModel(self, group, max_position, device)


@dataclass(frozen=True)
class DeepseekMtp(Mtp):
    """The first MTP module of a checkpoint, stored as one more layer after the target's: DeepSeek-V3 (arXiv 2412.19437,
    section 2.2) and GLM's mixtures of experts. layer: its number in the checkpoint."""

    model: DeepseekConfig | Glm4MoeConfig
    layer: int

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        modules = mtp_modules_of(raw)
        return super().recognises(raw) and modules is not None and modules.after_layers

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        source = f"draft {path}"
        whole = family_of(draft_architecture(raw), source).read_config(dict(raw), source)
        assert isinstance(whole, DeepseekConfig | Glm4MoeConfig), "the families with such modules"
        check_target(path, whole, whole.hidden_size, target)
        if whole.num_mtp_layers < 1:
            raise ValueError(
                f"{source}: num_nextn_predict_layers={whole.num_mtp_layers}: the checkpoint has no module for "
                "drafting; use a head of another method, or leave the section `speculative` out"
            )
        layer = whole.num_layers
        assert whole.experts is not None, "both families have some"
        layers = frozenset({0} if layer in whole.experts.layers else ())
        experts = replace(whole.experts, layers=layers)
        model = replace(whole, num_layers=1, experts=experts, whole_experts=target.whole_experts)
        return cls(path, model, target.vocab_size, (), layer)

    def make_layer(self, group: TPGroup) -> DecoderLayer:
        if isinstance(self.model, DeepseekConfig):
            return deepseek.make_layer(self.model, 0, group)
        return moe.make_layer(self.model, 0, group)

    @property
    def layer_name(self) -> str:
        return f"model.layers.{self.layer}"

    @property
    def weight_names(self) -> NameMap:
        """Map checkpoint names to parameters. The module's copies of embedding and head, and the target's tensors, are
        not read."""
        theirs, others = self.layer_name, range(self.layer + self.model.num_mtp_layers)
        layer_rules = (deepseek if isinstance(self.model, DeepseekConfig) else moe).layer_rules
        rules = {"norm": f"{theirs}.shared_head.norm", "lm_head": f"{theirs}.shared_head.head"}
        return NameMap(
            rules | layer_rules("layer", theirs) | {"{module}": f"{theirs}.{{module}}"},
            ignored=(
                *(f"model.layers.{other}.*" for other in others if other != self.layer),
                *("model.embed_tokens.*", "model.norm.*", "lm_head.*", "*.rotary_emb.inv_freq"),
                *(f"{theirs}.embed_tokens.*", f"{theirs}.shared_head.head.*"),
            ),
        )


@dataclass(frozen=True)
class QwenMtp(Mtp):
    """The MTP module of Qwen3-Next, Qwen3.5, 3.6 and 3.8: one layer of gated attention, with an MLP or experts. It has
    KV and no recurrent layer."""

    layer_name: ClassVar[str] = "mtp.layers.0"
    norm: ClassVar[type[RMSNorm]] = ZeroCentredRMSNorm
    model: HybridConfig

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        modules = mtp_modules_of(raw)
        return super().recognises(raw) and modules is not None and not modules.after_layers

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        source = f"draft {path}"
        whole = family_of(draft_architecture(raw), source).read_config(dict(raw), source)
        assert isinstance(whole, HybridConfig), "the architectures are hybrids"
        check_target(path, whole, whole.hidden_size, target)
        _check_module(raw, source)
        experts = None if whole.experts is None else replace(whole.experts, layers=frozenset({0}))
        model = replace(whole, num_layers=1, recurrent=frozenset(), experts=experts, whole_experts=target.whole_experts)
        return cls(path, model, target.vocab_size, ())

    def make_layer(self, group: TPGroup) -> DecoderLayer:
        return hybrid.make_layer(self.model, 0, group)

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


class MtpModel(DraftModel):
    """A module on one rank. The output of its last norm is its recurrent state, which later draft steps use in place of
    the target's hidden state.

    Both families read the output of the target's last norm. With its input instead, a Qwen3.5 accepted 1.80 instead of
    2.74 tokens per round (ModelTC/LightLLM#1402; also llama.cpp#24025).

    layer: attention and MLP; layer 0 of the draft's KV.
    """

    reads_last_layer = True

    def __init__(self, method: Mtp, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group)
        model = method.model
        self.rotary = RotaryTable(model.rope, model.rotated_dim, max_position, device)
        self.enorm, self.hnorm, self.norm = (method.norm(model.hidden_size, model.rms_eps) for _ in range(3))
        self.eh_proj = ReplicatedLinear(2 * model.hidden_size, model.hidden_size)
        self.layer = method.make_layer(group)

    def keep(self, ids: Tensor, features: Tensor, context: ForwardContext) -> None:
        normed, _ = self._input(ids, features)
        self.layer.self_attn.keep(normed, self.rotary.at(context.positions), context)

    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        normed, residual = self._input(ids, hidden)
        added, residual = self.layer(normed, residual, self.rotary.at(context.positions), context)
        state, _ = self.norm.add(added, residual, self.group)
        return state

    def _input(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor | Fp8Rows, Tensor]:
        """Return the input of the layer's attention, and the residual stream."""
        residual = self.eh_proj(torch.cat((self.enorm(self.embed_tokens(ids)), self.hnorm(hidden)), dim=-1))
        return self.layer.input_layernorm.for_product(residual, self.layer.self_attn.fp8_inputs), residual


def _check_module(raw: Mapping[str, Any], source: str) -> None:
    """Raise ValueError if the checkpoint has no module, or one with its own embedding. Qwen3-Next's config.json does
    not say whether there is one; its weights show it."""
    modules, text = mtp_modules_of(raw), {**raw, **section_of(raw, "text_config", source)}
    assert modules is not None
    if modules.count(raw, source) == 0:
        raise ValueError(
            f"{source}: {modules.count_key}=0: the checkpoint has no module for drafting; use a head of another "
            "method, or leave the section `speculative` out"
        )
    if flag_of(text, "mtp_use_dedicated_embeddings", source):
        raise ValueError(f"{source}: mtp_use_dedicated_embeddings=true is not supported; only false is")
