"""Mixtures of experts of Qwen2 and Qwen3: the dense model with experts instead of MLPs in all or some layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import DecoderLayer, FeedForward
from workers.layers.moe import MixtureOfExperts
from workers.models import llama
from workers.models.config_fields import architecture_of, flag_of, ids_of, size_of
from workers.models.family import ModelFamily
from workers.models.llama import LlamaForCausalLM, make_attention, make_mlp
from workers.models.moe import LlamaMoeConfig, expert_cuts, expert_inputs, moe_rules, num_experts_of
from workers.models.name_map import NameMap
from workers.models.qwen.hybrid_names import shared_expert_rules
from workers.ops.experts.route import Routing

_SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(LlamaMoeConfig):
    """See `LlamaConfig`.

    moe_layers: layers with experts; the others have MLPs of intermediate_size.
    expert_width: intermediate size of an expert.
    shared_width: intermediate size of the shared expert (Qwen2); 0: none.
    """

    expert_width: int
    moe_layers: frozenset[int]
    shared_width: int = 0

    @property
    def cut_sizes(self) -> dict[str, int]:
        shared = {_SHARED: self.shared_width} if self.shared_width else {}
        return self._dense_sizes | expert_cuts(self.routing, self.expert_width, 0, self.whole_experts) | shared

    @property
    def _dense_sizes(self) -> dict[str, int]:
        return super().cut_sizes if len(self.moe_layers) < self.num_layers else {}

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        inputs = super().linear_inputs(tensor_parallel)
        if not self._dense_sizes:
            del inputs["intermediate_size"]
        shared = {_SHARED: self.shared_width // tensor_parallel} if self.shared_width else {}
        return inputs | expert_inputs(self.expert_width, 0, self.whole_experts, tensor_parallel) | shared


def read_config(config: dict[str, Any], source: str) -> Qwen3MoeConfig:
    dense = llama.read_config(config, source)
    if architecture_of(config).startswith("Qwen2"):
        dense = replace(dense, qkv_bias=flag_of(config, "qkv_bias", source, True))
    routing = Routing(
        num_experts=num_experts_of(config, source),
        experts_per_token=size_of(config, "num_experts_per_tok", source),
        normalise=flag_of(config, "norm_topk_prob", source),
        shared_gate=config.get(_SHARED) is not None,
    )
    routing.check(source)
    step, without = size_of(config, "decoder_sparse_step", source, 1), ids_of(config, "mlp_only_layers", source)
    layers = frozenset(i for i in range(dense.num_layers) if i not in without and (i + 1) % step == 0)
    width = size_of(config, "moe_intermediate_size", source)
    shared = size_of(config, _SHARED, source, 0)
    return Qwen3MoeConfig(**vars(dense), routing=routing, expert_width=width, moe_layers=layers, shared_width=shared)


def make_layer(config: Qwen3MoeConfig, layer: int, group: TPGroup) -> DecoderLayer:
    mlp: FeedForward
    if layer in config.moe_layers:
        mlp = MixtureOfExperts(
            config.hidden_size, config.expert_width, config.routing, group, config.shared_width, config.whole_experts
        )
    else:
        mlp = make_mlp(config, group)
    attention = make_attention(config, layer, group, config.hidden_size)
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, mlp, group)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)


def weight_names(config: Qwen3MoeConfig) -> NameMap:
    dense, ours, theirs = llama.weight_names(config), "layers.{layer}", "model.layers.{layer}"
    rules = shared_expert_rules(ours, theirs) if config.shared_width else moe_rules(ours, theirs)
    return NameMap(rules | dict(dense.rules), ignored=dense.ignored)


def is_served(config: Mapping[str, Any]) -> bool:
    """Return False for models with windows, so that the adapter serves them."""
    return not config.get("use_sliding_window")


FAMILY = ModelFamily(read_config, Qwen3MoeForCausalLM, weight_names, is_served)
