"""Tiny random checkpoints of whatever decoder transformers knows, by its model_type."""

from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_models import VOCAB

# Sizes by the names that configurations give them; each configuration takes those that it has.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    "vocab_size": VOCAB,
    "rotary_dim": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.2,
    "sliding_window": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


# A text part of which every layer reads the target's KV.
_OF_ASSISTANT: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_kv_shared_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32},
    "layer_types": ["sliding_attention", "full_attention"],
}
_NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

# What the sizes leave inconsistent, by model_type.
_BESIDE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon": {"alibi": False},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB, "layer_types": None},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "global_head_dim": 32, "hidden_size_per_layer_input": 8},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_OF_ASSISTANT, **_NO_LAYER_INPUTS}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **_OF_ASSISTANT}},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3},
    "zaya": {"num_experts_per_tok": 1},
}


def known_config(kind: str, **overrides: Any) -> Any:
    """transformers' configuration of that model_type, tiny, its parts too."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    usual = made()
    settings = {name: value for name, value in _SIZES.items() if can_be_set(usual, name)}
    if "kv_lora_rank" in settings:
        settings["num_key_value_heads"] = 4  # latents have a head each
    for name in getattr(made, "sub_configs", {}):
        part = getattr(usual, name, None)
        if getattr(part, "model_type", None) in CONFIG_MAPPING:
            settings[name] = known_config(part.model_type).to_dict()
    return made(**(settings | _BESIDE.get(kind, {}) | overrides))


def can_be_set(config: Any, name: str) -> bool:
    """Whether a configuration has the field: neither a property nor what differs by layer."""
    kind = type(config)
    given = getattr(kind, "attribute_map", {}).get(name, name)
    if isinstance(getattr(kind, given, None), property):
        return False
    try:
        return hasattr(config, name)
    except Exception:  # transformers tells of a field that differs by layer by an error of its own
        return name in getattr(kind, "__dataclass_fields__", {})


def make_known(folder: Path, kind: str, seed: int = 0, **overrides: Any) -> Path:
    """A random checkpoint of that model_type whose answers are not one token over and over."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(known_config(kind, **overrides), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            least, most = (0.5, 1.5) if "norm" in name or ".ln" in name else (-0.2, 0.2)
            torch.nn.init.uniform_(parameter, least, most)
        elif parameter.numel() and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    return folder
