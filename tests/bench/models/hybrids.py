"""Qwen3.5-27B and Qwen3.5-35B-A3B for `tests.bench.round`: their text models' config.json, a floor by bytes, and the
same in small. Weights are dummies: their routers choose by the tokens alone, and spread."""

from typing import Any

from aerie.speculative.drafts.trimmed_head import AUTO_ROWS

HYBRID: dict[str, Any] = {
    "hidden_act": "silu",
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 248320,
}
QWEN_27B = HYBRID | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
}
QWEN_35B = HYBRID | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_SMALL = {
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 256,
}
CONFIGS = {
    "qwen3.5-27b": QWEN_27B,
    "qwen3.5-35b-a3b": QWEN_35B,
    "qwen3.5-tiny": QWEN_27B | _SMALL | {"intermediate_size": 96},
    "qwen3.8-27b": QWEN_27B | {"mtp_num_hidden_layers": 0},  # with a block draft, see `published`
    "qwen3.8-tiny": QWEN_27B | _SMALL | {"intermediate_size": 96, "mtp_num_hidden_layers": 0},
    "qwen3.5-moe-tiny": QWEN_35B
    | _SMALL
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
DRAFT_VOCAB = AUTO_ROWS  # rows of the draft's head, with a token map, see `SpeculativeConfig`


def floor_bytes(name: str, rows: int, tokens: float, passes: int, draft_rows: int, ranks: int, requests: int) -> float:
    """Bytes that a round with the model's own module must read or write on one of `ranks`: weights once a pass, KV, and
    each request's states, read and written. Of the experts, those that at least one row needs if routing is uniform.
    rows: of the target's pass. tokens: of all contexts. passes, draft_rows: the module's, and the rows of one.
    Embeddings and activations are left out."""
    c = CONFIGS[name]
    hidden, layers, head_dim = c["hidden_size"], c["num_hidden_layers"], c["head_dim"]
    full = layers // c["full_attention_interval"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    kv_heads = c["num_key_value_heads"]
    attention = 2 * hidden * head_dim * (3 * c["num_attention_heads"] + 2 * kv_heads) + 4 * tokens * kv_heads * head_dim
    recurrent = 2 * hidden * (2 * keys + 3 * values + 2 * c["linear_num_value_heads"])
    state = 2 * 4 * requests * values * c["linear_key_head_dim"]
    head = 2 * hidden * c["vocab_size"]

    def mlp(count: int) -> float:
        if "num_experts" not in c:
            return float(2 * 3 * hidden * c["intermediate_size"])
        missed = (1 - c["num_experts_per_tok"] / c["num_experts"]) ** count
        expert = 2 * 3 * hidden * c["moe_intermediate_size"]
        return expert * (c["num_experts"] * (1 - missed) + 1) + 2 * hidden * c["num_experts"]

    target = full * attention + (layers - full) * (recurrent + state) + layers * mlp(rows) + head
    draft_head = min(head, 2 * hidden * DRAFT_VOCAB)
    return (target + passes * (2 * 2 * hidden * hidden + attention + mlp(draft_rows) + draft_head)) / ranks
