"""Layers and tensor names of Granite: Llama layers with factors on embedding, residual branches and logits; some have
experts and an MLP in parallel."""

from dataclasses import replace

import torch

from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import DecoderLayer, FeedForward
from workers.layers.mlp import GatedMLP
from workers.layers.moe import MixtureOfExperts
from workers.models import llama
from workers.models.family import ModelFamily
from workers.models.granite.config import DENSE, GraniteConfig, is_served, read_config
from workers.models.llama import LlamaForCausalLM, make_attention
from workers.models.moe import stacked_experts
from workers.models.name_map import NameMap
from workers.models.phi3 import packed_rows


def make_layer(config: GraniteConfig, layer: int, group: TPGroup) -> DecoderLayer:
    mlp: FeedForward
    if config.routing is None:
        mlp = GatedMLP(config.hidden_size, config.shared_width or config.intermediate_size, group)
    else:
        mlp = MixtureOfExperts(
            config.hidden_size,
            config.intermediate_size,
            config.routing,
            group,
            shared_width=config.shared_width,
            whole_experts=config.whole_experts,
        )
    attention = make_attention(config, layer, group, config.hidden_size)
    return DecoderLayer(
        config.hidden_size,
        config.rms_eps,
        attention,
        mlp,
        group,
        residual_multiplier=config.residual_multiplier,
    )


class GraniteForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)

    def __init__(
        self,
        config: GraniteConfig,
        group: TPGroup,
        max_position: int,
        device: torch.device,
        capture: tuple[int, ...] = (),
    ) -> None:
        super().__init__(
            config,
            group,
            max_position,
            device,
            capture,
            embedding_scale=config.embedding_multiplier,
            logit_divisor=config.logits_scaling,
        )


def weight_names(config: GraniteConfig) -> NameMap:
    """Return the names in Hugging Face's checkpoints, which stack experts, and pack the gate and up projections of the
    shared MLP."""
    names = llama.weight_names(config)
    if config.architecture == DENSE:
        return names
    ours, theirs = "layers.{layer}.mlp", "model.layers.{layer}"
    experts = f"{theirs}.block_sparse_moe"
    shared = ours if config.routing is None else f"{ours}.shared_experts"
    rules = {
        f"{ours}.router": f"{experts}.router.layer",
        f"{ours}.experts": f"{experts}.{{expert}}.{{part}}",
        f"{shared}.gate_up": f"{theirs}.shared_mlp.{{part}}",
        f"{shared}.down_proj": f"{theirs}.shared_mlp.output_linear",
    }
    halves = dict.fromkeys(("gate_proj", "up_proj"), config.shared_width)
    packed = [packed_rows(f"{theirs}.shared_mlp", "input_linear", halves)] if config.shared_width else []
    if config.routing is not None:
        stacked = ("input_linear.weight", "output_linear.weight")
        packed += stacked_experts(experts, config.routing.num_experts, *stacked)
    return replace(names, rules={**rules, **names.rules, **rules}, packed=tuple(packed))


FAMILY = ModelFamily(read_config, GraniteForCausalLM, weight_names, is_served)
