"""GLM-4.5, 4.6 and 4.7: Llama layers with partial RoPE, and DeepSeek-V3's experts after the first layers."""

from dataclasses import dataclass
from typing import Any

from aerie.workers.models import llama
from aerie.workers.models.config import rotated_dim_of
from aerie.workers.models.config_fields import flag_of
from aerie.workers.models.deepseek import read_experts
from aerie.workers.models.moe import LlamaMoeConfig, LlamaMoeForCausalLM, layer_rules
from aerie.workers.models.name_map import NameMap, decoder_names
from aerie.workers.models.registry import AFTER_LAYERS, ModelFamily


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(LlamaMoeConfig):
    """See `LlamaMoeConfig`. num_mtp_layers: MTP modules in the checkpoint, after its layers."""

    num_mtp_layers: int


def read_config(config: dict[str, Any], source: str) -> Glm4MoeConfig:
    """Read config.json. Raises ValueError for unsupported settings."""
    dense = llama.read_config({"rms_norm_eps": 1e-5, **config}, source)
    config = {"n_shared_experts": 1, "first_k_dense_replace": 1} | {k: v for k, v in config.items() if v is not None}
    own = vars(dense) | {
        "o_bias": False,
        "qk_norm": flag_of(config, "use_qk_norm", source),
        "rotated_dim": rotated_dim_of(config, dense.head_dim, source, 0.5),
    }
    return Glm4MoeConfig(
        **own,
        experts=read_experts(config, source, is_v3=True),
        num_mtp_layers=AFTER_LAYERS.count(config, source) or 0,
    )


def weight_names(config: Glm4MoeConfig) -> NameMap:
    """Return the names in Hugging Face's checkpoints. Ignored: MTP modules."""
    ignored = AFTER_LAYERS.names(config.num_layers, config.num_mtp_layers)
    return decoder_names(layer_rules, config.tie_embeddings, ignored=ignored)


FAMILY = ModelFamily(read_config, LlamaMoeForCausalLM, weight_names)
