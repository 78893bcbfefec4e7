"""Gemma 4's configuration."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from aerie.attention.kv_cache.layout import LayerGroup
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.experts.route import Routing
from aerie.workers.layers.rotary import RopeConfig
from aerie.workers.models import llama
from aerie.workers.models.config import head_groups, rope_of, text_part
from aerie.workers.models.config_fields import MAX_EXPERTS, architecture_of, flag_of, section_of, size_of
from aerie.workers.models.gemma.gemma3 import activation_of, cap_of
from aerie.workers.models.mistral import FULL, SLIDING, windows_of
from aerie.workers.models.moe import ExpertLayers, LlamaMoeConfig

# transformers' defaults for fields that config.json leaves out.
_COMMON: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma4": {"max_position_embeddings": 131072, "sliding_window": 512, "hidden_size_per_layer_input": 256},
    "Gemma4Unified": {
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
}
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_PERIOD = 6  # one layer in so many has no window: the last


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Heads of the layers of one kind.

    keys_as_values: see `aerie.workers.layers.attention.Attention`.
    """

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    keys_as_values: bool = False


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(LlamaMoeConfig):
    """See `LlamaMoeConfig`. Experts are beside the MLPs.

    num_kv_heads, head_dim: values of the first layer.
    heads: heads of each layer.
    windows: each layer's window in tokens; None: it attends to all.
    kinds: each layer's `layer_types`.
    num_shared: number of layers at the end without KV of their own; each reads the KV of the last earlier layer of its
        kind.
    shared_width: intermediate size of the MLPs of those layers.
    input_size: size of a layer's own embedding (per-layer embedding); 0: none.
    activation: activation of MLPs and experts.
    within_images: whether layers with a window are `ScoreRule.within_images`.
    """

    heads: tuple[Heads, ...]
    windows: tuple[int | None, ...]
    kinds: tuple[str, ...]
    num_shared: int
    shared_width: int
    input_size: int
    activation: str
    within_images: bool

    def kv_layer(self, layer: int) -> int | None:
        """Return the layer whose KV `layer` attends to; None: its own."""
        return None if layer < self.num_layers - self.num_shared else self.last_kv_layer(self.kinds[layer])

    def last_kv_layer(self, kind: str) -> int:
        """Return the last layer of that kind with KV of its own."""
        return max(i for i in range(self.num_layers - self.num_shared) if self.kinds[i] == kind)

    def mlp_width(self, layer: int) -> int:
        return self.intermediate_size if self.kv_layer(layer) is None else self.shared_width

    def score_rule(self, layer: int) -> ScoreRule:
        within_images = self.within_images and self.kinds[layer] == SLIDING
        return ScoreRule(1.0, window=self.windows[layer], within_images=within_images)

    @property
    def has_mlps(self) -> bool:
        return True

    def check_shards(self, tensor_parallel: int, source: str) -> None:
        for heads in dict.fromkeys(self.heads):
            uniform = replace(self, heads=(), num_kv_heads=heads.num_kv_heads)
            super(Gemma4Config, uniform).check_shards(tensor_parallel, source)

    def kv_groups(self, tensor_parallel: int, dtype: torch.dtype) -> tuple[LayerGroup, ...]:
        own = self.heads[: self.num_layers - self.num_shared]
        return head_groups(((heads.num_kv_heads, heads.head_dim) for heads in own), tensor_parallel, dtype)

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        inputs = super().linear_inputs(tensor_parallel)
        for heads in dict.fromkeys(self.heads):
            name = f"num_attention_heads * head_dim ({heads.head_dim})"
            inputs[name] = self.num_heads * heads.head_dim // tensor_parallel
        return inputs | ({"hidden_size_per_layer_input": self.input_size} if self.input_size else {})


def read_config(config: dict[str, Any], source: str) -> Gemma4Config:
    """Read the configuration of a text model, or the text_config of a model of images, sound and text. Raises
    ValueError for settings that are not supported."""
    kind = "Gemma4Unified" if architecture_of(config).startswith("Gemma4Unified") else "Gemma4"
    declared = {key: value for key, value in text_part(config, source).items() if value is not None}
    config = _COMMON | _DEFAULTS[kind] | declared
    if config.get("use_bidirectional_attention") == "all":
        raise ValueError(f"{source}: use_bidirectional_attention='all': tokens that see later ones are not supported")
    dense = llama.read_config({**config, "hidden_act": "silu", "rope_parameters": None}, source)
    kinds = _kinds(config, dense.num_layers)
    windows = windows_of(config | {"layer_types": list(kinds)}, dense.num_layers, dense.max_position, source)
    heads = _heads(config, kinds, source)
    num_shared = size_of(config, "num_kv_shared_layers", source, 0, min_value=0)
    if not set(kinds).issubset(kinds[: dense.num_layers - num_shared]):
        raise ValueError(
            f"{source}: config.json: num_kv_shared_layers={num_shared}: leaves no layer of each kind with KV to share; "
            "correct it, or download the checkpoint again"
        )
    twice = 2 if flag_of(config, "use_double_wide_mlp", source) else 1
    own = vars(dense) | {"qk_norm": True, "num_kv_heads": heads[0].num_kv_heads, "head_dim": heads[0].head_dim}
    own |= {"logit_cap": cap_of(config, "final_logit_softcapping", source)}
    return Gemma4Config(
        **own,
        heads=heads,
        windows=windows,
        kinds=kinds,
        num_shared=num_shared,
        shared_width=twice * dense.intermediate_size,
        input_size=size_of(config, "hidden_size_per_layer_input", source, 0, min_value=0),
        experts=_experts(config, dense.num_layers, source) if flag_of(config, "enable_moe_block", source) else None,
        activation=activation_of(config, source),
        within_images=config.get("use_bidirectional_attention") == "vision",
    )


def _kinds(config: dict[str, Any], num_layers: int) -> tuple[str, ...]:
    """Return each layer's kind. The last layer never has a window, regardless of config.json."""
    default_kinds = [SLIDING if (i + 1) % _PERIOD else FULL for i in range(num_layers)]
    kinds = config.get("layer_types") or default_kinds
    return (*kinds[:-1], FULL) if isinstance(kinds, list) else (FULL,)


def _heads(config: dict[str, Any], kinds: tuple[str, ...], source: str) -> tuple[Heads, ...]:
    """Return each layer's heads. transformers writes sizes of each layer to per_layer_config; published files have
    global_head_dim and num_global_key_value_heads."""
    ropes = section_of(config, "rope_parameters", source)
    rope = {
        kind: rope_of({"rope_parameters": _ROPES[kind] | dict(section_of(ropes, kind, source))}, source)
        for kind in set(kinds)
    }
    by_layer, k_eq_v = section_of(config, "per_layer_config", source), flag_of(config, "attention_k_eq_v", source)
    general = {key: config[key] for key in ("head_dim", "num_key_value_heads")}
    at_full = {"head_dim": config["global_head_dim"]}
    if k_eq_v and "num_global_key_value_heads" in config:
        at_full["num_key_value_heads"] = config["num_global_key_value_heads"]
    heads = []
    for layer, kind in enumerate(kinds):
        own = by_layer.get(str(layer), {}) if by_layer else at_full if kind == FULL else {}
        sizes = general | dict(own)
        heads.append(
            Heads(
                num_kv_heads=size_of(sizes, "num_key_value_heads", source),
                head_dim=size_of(sizes, "head_dim", source, min_value=2),
                rope=rope[kind],
                keys_as_values=k_eq_v and kind == FULL,
            )
        )
    return tuple(heads)


def _experts(config: dict[str, Any], num_layers: int, source: str) -> ExpertLayers:
    routing = Routing(
        num_experts=size_of(config, "num_experts", source, max_value=MAX_EXPERTS),
        experts_per_token=size_of(config, "top_k_experts", source),
        normalise=True,
        scales_experts=True,
    )
    routing.check(source)
    width = size_of(config, "moe_intermediate_size", source)
    return ExpertLayers(routing=routing, layers=frozenset(range(num_layers)), width=width)
