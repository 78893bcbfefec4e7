"""Mixtures of experts of Qwen2 and Qwen3: the dense model with experts instead of MLPs in all or some layers. Those of
Qwen's hybrids and of its models of images are read and named alike."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aerie.kernels.experts.route import Routing
from aerie.workers.models import llama
from aerie.workers.models.config_fields import architecture_of, flag_of, ids_of, size_of
from aerie.workers.models.llama import layers_with_windows
from aerie.workers.models.moe import (
    ExpertLayers,
    LlamaMoeConfig,
    LlamaMoeForCausalLM,
    layer_rules,
    moe_rules,
    num_experts_of,
)
from aerie.workers.models.name_map import NameMap, decoder_names
from aerie.workers.models.registry import ModelFamily

_SHARED = "shared_expert_intermediate_size"


def read_config(config: dict[str, Any], source: str) -> LlamaMoeConfig:
    dense = llama.read_config(config, source)
    if architecture_of(config).startswith("Qwen2"):
        dense = replace(dense, qkv_bias=flag_of(config, "qkv_bias", source, True))
    return LlamaMoeConfig(**vars(dense), experts=read_experts(config, source, normalise=False))


def read_experts(config: dict[str, Any], source: str, normalise: bool) -> ExpertLayers:
    """Read which layers have experts, and what they are. normalise: the default of `norm_topk_prob`."""
    routing = Routing(
        num_experts=num_experts_of(config, source),
        experts_per_token=size_of(config, "num_experts_per_tok", source),
        normalise=flag_of(config, "norm_topk_prob", source, normalise),
        shared_gate=config.get(_SHARED) is not None,
    )
    routing.check(source)
    step, without = size_of(config, "decoder_sparse_step", source, 1), ids_of(config, "mlp_only_layers", source)
    layers = range(size_of(config, "num_hidden_layers", source))
    return ExpertLayers(
        routing=routing,
        layers=frozenset(i for i in layers if i not in without and (i + 1) % step == 0),
        width=size_of(config, "moe_intermediate_size", source),
        shared_width=size_of(config, _SHARED, source, 0),
        shared_name=_SHARED,
    )


def shared_layer_rules(path: str, name: str) -> dict[str, str]:
    """Return the rules of a `NameMap` for a layer with a gated shared expert, whose gate is a part of the router."""
    return moe_rules(path, name, router="{part}", shared="shared_expert") | llama.layer_rules(path, name)


def weight_names(config: LlamaMoeConfig) -> NameMap:
    is_shared = config.experts is not None and config.experts.routing.shared_gate
    return decoder_names(shared_layer_rules if is_shared else layer_rules, config.tie_embeddings)


def is_served(config: Mapping[str, Any]) -> bool:
    """Return False for models with windows, so that the adapter serves them."""
    return not layers_with_windows(config)


FAMILY = ModelFamily(read_config, LlamaMoeForCausalLM, weight_names, is_served)
