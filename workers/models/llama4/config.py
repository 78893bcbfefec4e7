"""Configuration of Llama 4's text part."""

from dataclasses import dataclass
from typing import Any

from workers.layers.rotary import RopeConfig
from workers.models import llama
from workers.models.config import text_part
from workers.models.config_fields import flag_of, ids_of, number_of, size_of
from workers.models.moe import LlamaMoeConfig, expert_cuts, expert_inputs, num_experts_of
from workers.ops.experts.route import Routing


@dataclass(frozen=True, kw_only=True)
class Llama4Config(LlamaMoeConfig):
    """See `LlamaConfig`. intermediate_size: size of an expert and of the shared expert.

    rotated: for each layer, whether it has RoPE (and with `qk_norm` norms of q and k).
    moe_layers: layers with experts.
    dense_width: intermediate size of the MLPs of other layers.
    """

    rotated: tuple[bool, ...]
    moe_layers: frozenset[int]
    dense_width: int

    @property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        return tuple(self.rope if rotated else RopeConfig(kind="none") for rotated in self.rotated)

    @property
    def cut_sizes(self) -> dict[str, int]:
        sizes = {"intermediate_size": self.intermediate_size}  # of the shared expert
        if len(self.moe_layers) < self.num_layers:
            sizes["intermediate_size_mlp"] = self.dense_width
        return sizes | expert_cuts(self.routing, self.intermediate_size, 0, self.whole_experts)

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        inputs = super().linear_inputs(tensor_parallel)
        if len(self.moe_layers) < self.num_layers:
            inputs["intermediate_size_mlp"] = self.dense_width // tensor_parallel
        return inputs | expert_inputs(self.intermediate_size, 0, self.whole_experts, tensor_parallel)


def read_config(config: dict[str, Any], source: str) -> Llama4Config:
    """Read the configuration of a text model, or the text_config of a model of images and text. `max_position` ends
    where chunked attention or its temperature would take effect."""
    text = text_part(config, source)
    dense = llama.read_config(text, source)
    layers = dense.num_layers
    longest = min(dense.max_position, size_of(text, "attention_chunk_size", source, 8192))
    if flag_of(text, "attn_temperature_tuning", source, True):
        longest = min(longest, int(number_of(text, "floor_scale", source, 8192.0)) - 1)
    if longest < 1:
        raise ValueError(f"{source}: config.json: floor_scale: must be at least 2; download the checkpoint again")
    chosen = size_of(text, "num_experts_per_tok", source, 1)
    if chosen != 1:
        raise ValueError(f"{source}: num_experts_per_tok={chosen} is not supported; a Llama 4 has 1")
    step = size_of(text, "interleave_moe_layer_step", source, 1)
    moe = ids_of(text, "moe_layers", source) or range(step - 1, layers, step)
    interval = size_of(text, "no_rope_layer_interval", source, 4)
    # 1: a layer with RoPE
    flags = text.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) != layers:
        raise ValueError(
            f"{source}: config.json: no_rope_layers: must be {layers} (num_hidden_layers) numbers; download the "
            "checkpoint again"
        )
    # softmax of one logit: the experts' output has weight 1
    routing = Routing(num_experts_of(text, source), 1, normalise=True)
    routing.check(source)
    fields = vars(dense) | {"max_position": longest, "qk_norm": flag_of(text, "use_qk_norm", source, True)}
    return Llama4Config(
        **fields,
        routing=routing,
        rotated=tuple(bool(flag) for flag in flags),
        moe_layers=frozenset(moe),
        dense_width=size_of(text, "intermediate_size_mlp", source, 16384),
    )
