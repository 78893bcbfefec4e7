"""GLM-4.7-Flash: DeepSeek-V3's layers (`workers.models.deepseek`); config.json lists the layers with experts."""

from dataclasses import replace
from typing import Any

from workers.models import deepseek
from workers.models.config_fields import MAX_LAYERS, architecture_of, size_of
from workers.models.deepseek import DeepseekConfig, DeepseekForCausalLM, weight_names
from workers.models.family import ModelFamily

_DENSE, _SPARSE = "dense", "sparse"
# transformers' defaults for fields that config.json leaves out.
_DEFAULTS = {"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1}


def read_config(config: dict[str, Any], source: str) -> DeepseekConfig:
    """Read config.json. Raises ValueError for unsupported settings."""
    whole = {
        **_DEFAULTS,
        **config,
        "first_k_dense_replace": _num_dense(config, source),
        "architectures": ["DeepseekV3ForCausalLM"],
    }
    return replace(deepseek.read_config(whole, source), architecture=architecture_of(config))


def _num_dense(config: dict[str, Any], source: str) -> int:
    """Return the number of layers without experts, which are the first ones."""
    layers = size_of(config, "num_hidden_layers", source, most=MAX_LAYERS)
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return size_of(config, "first_k_dense_replace", source, 1, least=0)
    dense = kinds.index(_SPARSE) if isinstance(kinds, list) and _SPARSE in kinds else layers
    if kinds != [_DENSE] * dense + [_SPARSE] * (layers - dense):
        raise ValueError(
            f"{source}: config.json: mlp_layer_types: must be {layers} (num_hidden_layers) names, {_DENSE!r} and then "
            f"{_SPARSE!r}; layers of other kinds are not supported"
        )
    return dense


FAMILY = ModelFamily(read_config, DeepseekForCausalLM, weight_names)
