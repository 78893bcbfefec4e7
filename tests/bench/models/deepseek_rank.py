"""One rank's share of DeepSeek-V3 at eight ranks, for `tests.bench.round`: its config.json, a floor by bytes, and the
same in small; and as many of its layers, whole, as two GPUs of 141 GB hold. Of a rank's share heads, MLP, experts and
vocabulary are an eighth; latent rows, the router and what is of hidden size are whole. With dummy weights the router
has no bias to prefer experts by."""

from typing import Any

DSV3_RANK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 2304,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "vocab_size": 16256,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
TINY_RANK = DSV3_RANK | {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 256,
    "quantization_config": None,
}
WHOLE_LAYERS = DSV3_RANK | {
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
}
CONFIGS = {"dsv3-rank": DSV3_RANK, "dsv3-layers": WHOLE_LAYERS, "dsv3-tiny": TINY_RANK}


def floor_bytes(name: str, rows: int, tokens: float, passes: int, draft_rows: int, ranks: int = 1) -> float:
    """Bytes that a round must read on one of `ranks`: weights once a pass, of experts those that uniform routing gives
    to somebody, and latent rows. rows: of the target's pass. tokens: of all contexts. passes, draft_rows: the module's,
    and the rows of one. Embeddings and activations are left out."""
    c = CONFIGS[name]
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"] // ranks, c["kv_lora_rank"]
    width, value = latent + c["qk_rope_head_dim"], c["v_head_dim"]
    quantised = 1 if c["quantization_config"] else 2
    projections = hidden * (c["q_lora_rank"] + width) + heads * value * hidden
    projections += c["q_lora_rank"] * heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    absorbed = 2 * latent * heads * (c["qk_nope_head_dim"] + value)
    attention = quantised * projections + absorbed + 2 * tokens * width
    expert = quantised * 3 * hidden * c["moe_intermediate_size"] // ranks
    router, head = 2 * hidden * c["n_routed_experts"], 2 * hidden * c["vocab_size"] // ranks

    def expert_layer(count: int) -> float:
        missed = (1 - c["num_experts_per_tok"] / c["n_routed_experts"]) ** count
        return attention + router + expert * (c["n_routed_experts"] * (1 - missed) + c["n_shared_experts"])

    dense = attention + quantised * 3 * hidden * c["intermediate_size"] // ranks
    first = c["first_k_dense_replace"]
    target = first * dense + (c["num_hidden_layers"] - first) * expert_layer(rows) + head
    return float(target + passes * (expert_layer(draft_rows) + 2 * 2 * hidden * hidden + head))
