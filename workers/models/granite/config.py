"""`GraniteConfig`: Granite 3, and Granite 4 without recurrent layers, from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from attention.capability import Capability
from attention.scores import ScoreRule
from workers.layers.rotary import RopeConfig
from workers.models import llama
from workers.models.config_fields import MAX_EXPERTS, architecture_of, number_of, size_of
from workers.models.llama import LlamaConfig
from workers.models.moe import check_experts_device
from workers.ops.experts.route import Routing

DENSE, _HYBRID = "GraniteForCausalLM", "GraniteMoeHybridForCausalLM"
_SHARED = "shared_intermediate_size"
_ATTENTION = {"attention", "full_attention"}  # spellings in a hybrid's layer_types
_UNROTATED = RopeConfig(kind="proportional", proportion=0.0)


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """See `LlamaConfig`.

    intermediate_size: size of an MLP, or of an expert.
    shared_width: intermediate size of the MLP in parallel with the experts, or instead of them (Granite 4); 0: none.
    routing: None without experts.
    rotates: whether there is RoPE; otherwise the model ignores positions.
    """

    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_scaling: float
    shared_width: int
    routing: Routing | None
    rotates: bool

    @property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        return super().layer_ropes if self.rotates else (_UNROTATED,) * self.num_layers

    def score_rule(self, layer: int) -> ScoreRule:
        return ScoreRule(self.attention_multiplier)

    def with_whole_experts(self, source: str) -> Self:
        return super().with_whole_experts(source) if self.routing is None else replace(self, whole_experts=True)

    def check_device(self, device: Capability, dtype: torch.dtype, source: str) -> None:
        if self.routing is not None:
            check_experts_device(device, dtype, source)

    @property
    def cut_sizes(self) -> dict[str, int]:
        sizes = {_SHARED: self.shared_width} if self.shared_width else {}
        if self.routing is not None and self.whole_experts:
            return sizes | {"num_local_experts": self.routing.num_experts}
        return sizes if self._is_shared_alone else sizes | {"intermediate_size": self.intermediate_size}

    @property
    def _is_shared_alone(self) -> bool:
        return self.routing is None and self.shared_width > 0

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        inputs = super().linear_inputs(tensor_parallel)
        if self.whole_experts:
            inputs["intermediate_size"] = self.intermediate_size
        if self._is_shared_alone:
            del inputs["intermediate_size"]
        return inputs | ({_SHARED: self.shared_width // tensor_parallel} if self.shared_width else {})


def read_config(config: dict[str, Any], source: str) -> GraniteConfig:
    """Read config.json. Raises ValueError for unsupported settings."""
    architecture = architecture_of(config)
    dense = llama.read_config(config, source)
    shared = size_of(config, _SHARED, source, 1024 if architecture == _HYBRID else 0, least=0)
    is_dense = architecture == DENSE
    return GraniteConfig(
        **vars(dense),
        embedding_multiplier=number_of(config, "embedding_multiplier", source, 1.0),
        residual_multiplier=number_of(config, "residual_multiplier", source, 1.0),
        attention_multiplier=number_of(config, "attention_multiplier", source, 1.0),
        logits_scaling=number_of(config, "logits_scaling", source, 1.0),
        shared_width=0 if is_dense or architecture == "GraniteMoeForCausalLM" else shared,
        routing=None if is_dense else _routing(config, source),
        rotates=architecture != _HYBRID or config.get("position_embedding_type") == "rope",
    )


def _routing(config: dict[str, Any], source: str) -> Routing | None:
    num_experts = size_of(config, "num_local_experts", source, 8, least=0, most=MAX_EXPERTS)
    if num_experts == 0:
        return None
    routing = Routing(num_experts, size_of(config, "num_experts_per_tok", source, 2), normalise=True)
    routing.check(source)
    return routing


def is_served(config: Mapping[str, Any]) -> bool:
    """Return False for models that `llama.is_served` leaves to the adapter, and for hybrids with recurrent layers,
    which the adapter refuses."""
    kinds = config.get("layer_types", config.get("layers_block_type"))
    is_attention = isinstance(kinds, list) and _ATTENTION.issuperset(kinds)
    return llama.is_served(config) and (architecture_of(config) != _HYBRID or is_attention)
