"""OLMo 2 and 3: norms only after attention and MLP, and one norm each over all heads of q and of k. OLMo 3 has windows
in three of four layers."""

from typing import Any

from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import SandwichLayer
from aerie.workers.layers.norm import FullPrecisionRMSNorm, NoNorm
from aerie.workers.layers.rotary import RopeConfig
from aerie.workers.models import llama
from aerie.workers.models.config import rope_of
from aerie.workers.models.config_fields import architecture_of
from aerie.workers.models.llama import LlamaForCausalLM, make_attention, make_mlp, weight_names
from aerie.workers.models.mistral import FULL, SLIDING, LocalRopeConfig, ropes_of, windows_of
from aerie.workers.models.registry import ModelFamily

# transformers' defaults for fields that config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Olmo2ForCausalLM": {"vocab_size": 50304},
    "Olmo3ForCausalLM": {"vocab_size": 50304, "sliding_window": 4096, "rope_theta": 500000.0},
}
_PERIOD = 4  # one layer of OLMo 3 in so many has no window: the last


def read_config(config: dict[str, Any], source: str) -> LocalRopeConfig:
    """Read config.json. Raises ValueError for unsupported settings."""
    kind = architecture_of(config)
    config = _DEFAULTS[kind] | {"rms_norm_eps": 1e-5} | {k: v for k, v in config.items() if v is not None}
    dense = llama.read_config({**config, "rope_parameters": None, "rope_scaling": None}, source)
    default_kinds = [
        SLIDING if kind.startswith("Olmo3") and (i + 1) % _PERIOD else FULL for i in range(dense.num_layers)
    ]
    kinds = (config.get("layer_types") or default_kinds) if kind.startswith("Olmo3") else default_kinds
    windows = windows_of({**config, "layer_types": kinds}, dense.num_layers, dense.max_position, source)
    theta = _DEFAULTS[kind].get("rope_theta", 10000.0)
    ropes = ropes_of(config, source, theta, theta)
    # older exporters scale RoPE only in layers without a window
    rope, local = ropes or (rope_of(config, source), RopeConfig(theta=dense.rope.theta))
    own = vars(dense) | {"rope": rope, "qk_norm": True}
    return LocalRopeConfig(**own, windows=windows, is_local=tuple(name == SLIDING for name in kinds), local_rope=local)


def make_layer(config: LocalRopeConfig, layer: int, group: TPGroup) -> SandwichLayer:
    attention = make_attention(config, layer, group, config.hidden_size, norms_projections=True)
    mlp = make_mlp(config, group)
    return SandwichLayer(config.hidden_size, config.rms_eps, attention, mlp, group, FullPrecisionRMSNorm, before=NoNorm)


class OlmoForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)
    norm_type = FullPrecisionRMSNorm


FAMILY = ModelFamily(read_config, OlmoForCausalLM, weight_names, llama.is_served)
