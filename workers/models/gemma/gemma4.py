"""Gemma 4 (text). Its layers may have two head sizes, keys that are also values, the KV of an earlier layer, an
embedding each, and experts in parallel with the MLP."""

from dataclasses import replace

import torch

from aerie.kernels.experts.gated import GATED
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.attention import Attention
from aerie.workers.layers.mlp import GatedMLP
from aerie.workers.layers.norm import FullPrecisionRMSNorm
from aerie.workers.layers.rotary import RotaryTable
from aerie.workers.models import llama
from aerie.workers.models.decoder import Decoder, in_default_dtype
from aerie.workers.models.gemma.gemma4_config import Gemma4Config, read_config
from aerie.workers.models.gemma.gemma4_layer import ExpertsBeside, Gemma4Layer, Gemma4Tail, PerLayerEmbedding
from aerie.workers.models.moe import stacked_experts
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.registry import ModelFamily


def make_layer(config: Gemma4Config, layer: int, group: TPGroup) -> Gemma4Layer:
    heads, hidden, eps = config.heads[layer], config.hidden_size, config.rms_eps
    attention = Attention(
        layer,
        group,
        input_size=hidden,
        output_size=hidden,
        num_heads=config.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        norm_eps=eps,
        norm=FullPrecisionRMSNorm,
        value_norm=True,
        keys_as_values=heads.keys_as_values,
        kv_layer=config.kv_layer(layer),
        rule=config.score_rule(layer),
    )
    experts = None
    if config.experts is not None:
        one, activation = config.experts, GATED[config.activation]
        experts = ExpertsBeside(hidden, one.width, one.routing, eps, group, activation, config.whole_experts)
    return Gemma4Layer(
        hidden,
        eps,
        attention,
        GatedMLP(hidden, config.mlp_width(layer), group, config.activation),
        group,
        experts,
        Gemma4Tail(hidden, config.input_size, eps, config.activation),
    )


class Gemma4ForCausalLM(Decoder):
    """See `Decoder`. max_position: rows of the rotary tables, on `device`."""

    def __init__(
        self,
        config: Gemma4Config,
        group: TPGroup,
        max_position: int,
        device: torch.device,
        capture: tuple[int, ...] = (),
    ) -> None:
        keys = [(heads.rope, heads.head_dim) for heads in config.heads]
        tables = {each: RotaryTable(*each, max_position, device) for each in dict.fromkeys(keys)}
        inputs = (config.vocab_size, config.hidden_size, config.num_layers, config.input_size, config.rms_eps, group)
        super().__init__(
            config,
            group,
            [tables[each] for each in keys],
            [make_layer(config, layer, group) for layer in range(config.num_layers)],
            capture,
            FullPrecisionRMSNorm,
            embedding_scale=in_default_dtype(config.hidden_size**0.5),
            logit_cap=config.logit_cap,
            layer_inputs=PerLayerEmbedding(*inputs) if config.input_size else None,
        )


def weight_names(config: Gemma4Config) -> NameMap:
    """Return the names in Hugging Face's checkpoints. Ignored: projections to KV of layers that read the KV of
    another layer."""
    names, layer = llama.text_weight_names(config), "layers.{layer}"
    theirs = f"model.{layer}"
    rules = {
        f"{layer}.experts.router_norm": f"{theirs}.router",
        f"{layer}.experts.router.scales": f"{theirs}.router",
        f"{layer}.experts.router": f"{theirs}.router.proj",
        f"{layer}.experts.matrices": f"{theirs}.experts.{{expert}}.{{part}}",
        f"{layer}.experts.pre_norm": f"{theirs}.pre_feedforward_layernorm_2",
        f"{layer}.experts.post_norm": f"{theirs}.post_feedforward_layernorm_2",
        f"{layer}.tail.scalar": theirs,
        f"{layer}.tail.gate": f"{theirs}.per_layer_input_gate",
        f"{layer}.tail.projection": f"{theirs}.per_layer_projection",
        f"{layer}.tail.norm": f"{theirs}.post_per_layer_input_norm",
        "layer_inputs.embedding": "model.embed_tokens_per_layer",
        "layer_inputs.projection": "model.per_layer_model_projection",
        "layer_inputs.norm": "model.per_layer_projection_norm",
    }
    shared = [i for i in range(config.num_layers) if config.kv_layer(i) is not None]
    unused = [f"model.layers.{i}.self_attn.[kv]_*" for i in shared]
    experts = config.experts
    packed = () if experts is None else stacked_experts(f"{theirs}.experts", experts.routing.num_experts)
    return replace(names, rules={**rules, **names.rules}, ignored=(*names.ignored, *unused), packed=packed)


FAMILY = ModelFamily(read_config, Gemma4ForCausalLM, weight_names)
