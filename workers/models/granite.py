"""IBM's Granite 3, and 4 without recurrent layers: Llama layers with factors on embedding, residual branches and
logits; some have experts and an MLP in parallel."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.experts.route import Routing
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.rotary import RopeConfig
from aerie.workers.models import llama
from aerie.workers.models.config_fields import MAX_EXPERTS, architecture_of, number_of, size_of
from aerie.workers.models.llama import LlamaConfig, LlamaForCausalLM, make_attention
from aerie.workers.models.moe import ExpertLayers, LlamaMoeConfig, make_feed_forward, stacked_experts
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.phi3 import packed_rows
from aerie.workers.models.registry import ModelFamily

_DENSE, _HYBRID = "GraniteForCausalLM", "GraniteMoeHybridForCausalLM"
_SHARED = "shared_intermediate_size"
_ATTENTION = {"attention", "full_attention"}  # spellings in a hybrid's layer_types
_UNROTATED = RopeConfig(kind="proportional", proportion=0.0)


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaMoeConfig):
    """See `LlamaMoeConfig`.

    rotates: whether heads are rotated; otherwise the model has no positions.
    """

    residual_multiplier: float
    attention_multiplier: float
    rotates: bool

    @property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        return super().layer_ropes if self.rotates else (_UNROTATED,) * self.num_layers

    def score_rule(self, layer: int) -> ScoreRule:
        return ScoreRule(self.attention_multiplier)


def read_config(config: dict[str, Any], source: str) -> GraniteConfig:
    """Read config.json. Raises ValueError for unsupported settings."""
    architecture = architecture_of(config)
    dense = llama.read_config(config, source)
    shared = size_of(config, _SHARED, source, 1024 if architecture == _HYBRID else 0, min_value=0)
    shared = 0 if architecture in (_DENSE, "GraniteMoeForCausalLM") else shared
    experts = None if architecture == _DENSE else _experts(config, dense, shared, source)
    if experts is None and shared:
        dense = replace(dense, intermediate_size=shared, mlp_name=_SHARED)
    factors = {
        "embedding_scale": number_of(config, "embedding_multiplier", source, 1.0),
        "logit_divisor": number_of(config, "logits_scaling", source, 1.0),
    }
    return GraniteConfig(
        **vars(dense) | factors,
        residual_multiplier=number_of(config, "residual_multiplier", source, 1.0),
        attention_multiplier=number_of(config, "attention_multiplier", source, 1.0),
        experts=experts,
        rotates=architecture != _HYBRID or config.get("position_embedding_type") == "rope",
    )


def _experts(config: dict[str, Any], dense: LlamaConfig, shared_width: int, source: str) -> ExpertLayers | None:
    """Return the expert layers of the configuration; None without experts."""
    num_experts = size_of(config, "num_local_experts", source, 8, min_value=0, max_value=MAX_EXPERTS)
    if num_experts == 0:
        return None
    routing = Routing(num_experts, size_of(config, "num_experts_per_tok", source, 2), normalise=True)
    routing.check(source)
    return ExpertLayers(
        routing=routing,
        layers=frozenset(range(dense.num_layers)),
        width=dense.intermediate_size,
        shared_width=shared_width,
        width_name="intermediate_size",
        shared_name=_SHARED,
    )


def is_served(config: Mapping[str, Any]) -> bool:
    """Return False for models that `llama.is_served` leaves to the adapter, and for hybrids with recurrent layers,
    which the adapter refuses."""
    kinds = config.get("layer_types", config.get("layers_block_type"))
    is_attention = isinstance(kinds, list) and _ATTENTION.issuperset(kinds)
    return llama.is_served(config) and (architecture_of(config) != _HYBRID or is_attention)


def make_layer(config: GraniteConfig, layer: int, group: TPGroup) -> DecoderLayer:
    attention, mlp = make_attention(config, layer, group, config.hidden_size), make_feed_forward(config, layer, group)
    factor = config.residual_multiplier
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, mlp, group, residual_multiplier=factor)


class GraniteForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)


def weight_names(config: GraniteConfig) -> NameMap:
    """Return the names in Hugging Face's checkpoints, which stack experts, and pack the gate and up projections of the
    shared MLP."""
    names = llama.weight_names(config)
    if config.architecture == _DENSE:
        return names
    path, name = "layers.{layer}.mlp", "model.layers.{layer}"
    experts = f"{name}.block_sparse_moe"
    shared = path if config.experts is None else f"{path}.shared_experts"
    rules = {
        f"{path}.router": f"{experts}.router.layer",
        f"{path}.experts": f"{experts}.{{expert}}.{{part}}",
        f"{shared}.gate_up": f"{name}.shared_mlp.{{part}}",
        f"{shared}.down_proj": f"{name}.shared_mlp.output_linear",
    }
    width = config.intermediate_size if config.experts is None else config.experts.shared_width
    halves = dict.fromkeys(("gate_proj", "up_proj"), width)
    packed = [packed_rows(f"{name}.shared_mlp", "input_linear", halves)] if width else []
    if config.experts is not None:
        stacked = ("input_linear.weight", "output_linear.weight")
        packed += stacked_experts(experts, config.experts.routing.num_experts, *stacked)
    # ours before Llama's, because the first rule that matches a path applies
    rest = {path: name for path, name in names.rules.items() if path not in rules}
    return replace(names, rules=rules | rest, packed=tuple(packed))


FAMILY = ModelFamily(read_config, GraniteForCausalLM, weight_names, is_served)
