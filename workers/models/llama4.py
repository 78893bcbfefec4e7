"""Llama 4's text part, for texts of at most one attention chunk: Llama layers with experts, some without RoPE.

A router's sigmoid multiplies the input of the chosen expert, not its output. RoPE rotates adjacent pairs, so the rows
of the q and k projections are reordered when they are loaded. The norms of q and k have no weights, so the order does
not matter to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from aerie.kernels.experts.route import Routing, TokenSlots
from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.moe import GatedMLP, MixtureOfExperts
from aerie.workers.layers.norm import UnitRMSNorm
from aerie.workers.layers.rotary import RopeConfig
from aerie.workers.layers.weighted import WrongTensorError
from aerie.workers.models import llama
from aerie.workers.models.config import text_part
from aerie.workers.models.config_fields import flag_of, ids_of, number_of, size_of
from aerie.workers.models.llama import LlamaForCausalLM, make_attention, make_mlp
from aerie.workers.models.moe import (
    ExpertLayers,
    LlamaMoeConfig,
    moe_rules,
    num_experts_of,
    outputs_first,
    stacked_experts,
)
from aerie.workers.models.name_map import NameMap, Packed, decoder_names, text_part_names
from aerie.workers.models.registry import ModelFamily

_BY_ROW = ("weight", "bias", "weight_scale", "weight_packed")  # kinds of tensors with a row for each output


@dataclass(frozen=True, kw_only=True)
class Llama4Config(LlamaMoeConfig):
    """See `LlamaMoeConfig`. Each layer with experts has a shared expert, too, of the same size.

    rotated: for each layer, whether it has RoPE (and with `qk_norm` norms of q and k).
    """

    rotated: tuple[bool, ...]

    @property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        return tuple(self.rope if rotated else RopeConfig(kind="none") for rotated in self.rotated)


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
    fields |= {"mlp_name": "intermediate_size_mlp"}
    fields |= {"intermediate_size": size_of(text, "intermediate_size_mlp", source, 16384)}
    width, name = dense.intermediate_size, dense.mlp_name
    experts = ExpertLayers(
        routing=routing, layers=frozenset(moe), width=width, shared_width=width, width_name=name, shared_name=name
    )
    return Llama4Config(**fields, experts=experts, rotated=tuple(bool(flag) for flag in flags))


class InputScaledExperts(MixtureOfExperts):
    """One expert per row, whose input is multiplied by the sigmoid of its logit, and a shared expert."""

    def __init__(self, config: Llama4Config, group: TPGroup) -> None:
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None, "every Llama 4 has some"
        super().__init__(hidden, experts.width, experts.routing, group, whole_experts=config.whole_experts)
        self.shared_experts = GatedMLP(hidden, experts.shared_width, group)

    def partial(self, x: Tensor | Fp8Rows, live: TokenSlots | None = None) -> Tensor:
        plain = x if isinstance(x, Tensor) else x.plain
        assert plain is not None and self.shared_experts is not None, "the router needs rows in the model's dtype"
        router = self.router(plain, live)
        scale = router.logits().amax(-1, keepdim=True).sigmoid().to(plain.dtype)
        routed = self.experts.method.multiply(plain * scale, router)
        return self.shared_experts.partial(x).add_(routed)

    def finish(self, options: GEMMOptions) -> None:
        """Do not join the shared expert, because its input differs from the routed one's."""


def make_layer(config: Llama4Config, layer: int, group: TPGroup) -> DecoderLayer:
    has_experts = config.experts is not None and layer in config.experts.layers
    mlp = InputScaledExperts(config, group) if has_experts else make_mlp(config, group)
    own = replace(config, qk_norm=config.qk_norm and config.rotated[layer])
    attention = make_attention(own, layer, group, config.hidden_size, UnitRMSNorm)
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, mlp, group)


class Llama4ForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)


def weight_names(config: Llama4Config) -> NameMap:
    """Return the names in Hugging Face's checkpoints, which stack 16-bit experts, inputs first."""
    experts, layer, hidden = config.experts, "model.layers.{layer}", config.hidden_size
    assert experts is not None, "every Llama 4 has some"
    gate_up, down = stacked_experts(f"{layer}.feed_forward.experts", experts.routing.num_experts)
    packed = (
        _halves(f"{layer}.self_attn.q_proj", config.num_heads, config.head_dim),
        _halves(f"{layer}.self_attn.k_proj", config.num_kv_heads, config.head_dim),
        outputs_first(gate_up, 2 * experts.width, hidden),
        outputs_first(down, hidden, experts.width),
    )
    return text_part_names(decoder_names(_layer_rules, config.tie_embeddings, packed=packed))


def _layer_rules(path: str, name: str) -> dict[str, str]:
    """Return the name rules of one kind of layer; Llama's for what Llama 4 has in common with it."""
    mlp = {
        f"{path}.mlp.gate_up": f"{name}.feed_forward.{{part}}",
        f"{path}.mlp.{{module}}": f"{name}.feed_forward.{{module}}",
    }
    rules = moe_rules(path, name, "feed_forward", "router", "shared_expert") | mlp
    others = llama.layer_rules(path, name)
    return rules | {pattern: others[pattern] for pattern in others if pattern not in rules}


def _halves(name: str, heads: int, head_dim: int) -> Packed:
    """Return the rule that moves the even rows of each head before its odd ones, so that RoPE rotates halves."""

    def split(full: Tensor, kind: str) -> Sequence[Tensor]:
        """Move rows of a matrix or of its scales."""
        if full.dim() == 0 or full.numel() == 1:  # a scale of the whole matrix
            return [full]
        if kind not in _BY_ROW or full.shape[0] != heads * head_dim:
            raise WrongTensorError(f"has shape {tuple(full.shape)}; q and k are served with rows of {heads} heads")
        pairs = full.view(heads, head_dim // 2, 2, *full.shape[1:])
        return [pairs.transpose(1, 2).flatten(0, 2)]

    return Packed(f"{name}.{{kind}}", (f"{name}.{{kind}}",), split)


FAMILY = ModelFamily(read_config, Llama4ForCausalLM, weight_names)
