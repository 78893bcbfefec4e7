"""Configurations as they are published: what they are read as, how many parameters the models have, and what a rank
holds. Nothing is allocated."""

from typing import Any

import pytest
import torch

from aerie.attention.recurrent.layout import snapshot_bytes
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.deepseek import DeepseekConfig
from aerie.workers.models.loading import allocate
from aerie.workers.models.registry import family_of
from tests.support.slow import one_of_each

META = torch.device("meta")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000, "torch_dtype": "bfloat16"}

V2_LITE: dict[str, Any] = {
    **COMMON,
    **MLA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
V2 = V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 160,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}
V3 = V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": FP8,
}
KIMI_K2 = V3 | {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "rope_theta": 50000.0,
    "rope_scaling": YARN | {"factor": 32, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
QWEN3_30B: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
HYBRID: dict[str, Any] = {
    **COMMON,
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mamba_ssm_dtype": "float32",
    "partial_rotary_factor": 0.25,
}
QWEN35_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": HYBRID
    | {
        "vocab_size": 248320,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "rope_parameters": {"mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000},
        "eos_token_id": 248044,
    },
}
MOE = {"num_key_value_heads": 2, "num_attention_heads": 16, "linear_num_value_heads": 32, "hidden_size": 2048}
MOE |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
QWEN35_35B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": HYBRID
    | MOE
    | {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8},
}
QWEN3_NEXT: dict[str, Any] = {
    **HYBRID,
    **MOE,
    "architectures": ["Qwen3NextForCausalLM"],
    "intermediate_size": 5120,
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
# As the FP8 checkpoints of Qwen3.5 list what stays in bf16, for every layer.
HYBRID_FP8 = FP8 | {
    "modules_to_not_convert": [
        "lm_head",
        "model.language_model.embed_tokens",
        *(
            f"model.language_model.layers.{i}.linear_attn.{part}"
            for i in range(64)
            for part in ("in_proj_a", "in_proj_b")
        ),
        *(f"model.language_model.layers.{i}.mlp.{part}" for i in range(64) for part in ("gate", "shared_expert_gate")),
    ]
}
V3_1 = V3 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}
QWEN3_8B: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
}
QWEN25_72B = {name: value for name, value in QWEN3_8B.items() if name not in ("head_dim", "attention_bias")} | {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 80,
}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "output_activations": None,
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
LLAMA_8B: dict[str, Any] = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 8192},
    "quantization_config": CHANNELS,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
}
# As their cards name them: config.json, and billions of parameters.
PUBLISHED = {
    "gpt-oss-20b": (GPT_OSS_20B, 20.9),
    "gpt-oss-120b": (GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128}, 116.8),
    "DeepSeek-V2-Lite": (V2_LITE, 15.7),
    "DeepSeek-V2": (V2, 235.7),
    "DeepSeek-V3": (V3, 671.0),
    "DeepSeek-V3.1": (V3_1, 671.0),
    "Kimi-K2": (KIMI_K2, 1026.4),
    "Qwen3-30B-A3B": (QWEN3_30B, 30.5),
    "Qwen3-30B-A3B-FP8": (QWEN3_30B | {"quantization_config": FP8}, 30.5),
    "Qwen3-235B-A22B": (QWEN3_235B, 235.1),
    "Qwen3-8B-FP8": (QWEN3_8B | {"quantization_config": FP8}, 8.2),
    "Qwen2.5-72B": (QWEN25_72B, 72.7),
    "Qwen3.5-27B": (QWEN35_27B, 26.9),
    "Qwen3.5-27B-FP8": (QWEN35_27B | {"quantization_config": HYBRID_FP8}, 26.9),
    "Qwen3.5-35B-A3B-FP8": (QWEN35_35B | {"quantization_config": HYBRID_FP8}, 34.7),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 79.7),
    "Llama-3.1-8B-FP8-dynamic": (LLAMA_8B, 8.0),
    "Llama-3.1-70B-FP8-dynamic": (LLAMA_70B, 70.6),
}


def read(raw: dict[str, Any]) -> ModelConfig:
    config: ModelConfig = family_of(raw["architectures"][0], "model x").read_config(raw, "model x")
    return config


def parameters(config: ModelConfig, ranks: int, dtype: torch.dtype | None = None) -> int:
    """Count rank 0's parameters, on the meta device: of one dtype, or all except scales of weights."""
    family = family_of(config.architecture, "model x")
    model = allocate(
        lambda: family.model(config, TPGroup(0, ranks), 8, META, ()),
        family.weight_names(config),
        config.quant,
        torch.bfloat16,
        META,
    )
    named = [(name, p) for name, p in model.named_parameters() if ".scales." not in name]
    return sum(p.numel() for _, p in named if dtype is None or p.dtype == dtype)


@pytest.mark.parametrize("name", one_of_each({name: raw["architectures"][0] for name, (raw, _) in PUBLISHED.items()}))
def test_models_have_as_many_parameters_as_their_cards_say(name: str) -> None:
    raw, billions = PUBLISHED[name]
    assert parameters(read(raw), 1) / 1e9 == pytest.approx(billions, abs=0.06)


def test_what_is_not_experts_or_linear_stays_in_bf16() -> None:
    """Embedding, vocabulary head, norms, routers."""
    config = read(V3)
    assert isinstance(config, DeepseekConfig)
    router = config.experts.routing.num_experts * config.hidden_size
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    assert parameters(config, 1, torch.bfloat16) == 2 * 129280 * 7168 + 58 * router + norms
    assert parameters(config, 1, torch.float32) == 58 * 256


def test_gates_and_convolutions_of_hybrids_stay_in_bf16() -> None:
    """Qwen3.5-27B-FP8's embedding, vocabulary head and norms, and conv, b, a and norm of recurrent layers."""
    config = read(QWEN35_27B | {"quantization_config": HYBRID_FP8})
    recurrent = 4 * (2 * 16 + 48) * 128 + 2 * 48 * 5120 + 128
    assert parameters(config, 1, torch.bfloat16) == 2 * 248320 * 5120 + 48 * recurrent
    assert parameters(config, 1, torch.float32) == 129 * 5120 + 16 * 2 * 256 + 48 * 2 * 48


def test_a_rank_keeps_the_states_of_its_heads() -> None:
    """Qwen3.5-27B: 151 MB in float32 and 2.9 MB of convolutions a request, over ranks."""
    config = read(QWEN35_27B)
    for ranks in (1, 2, 8):
        (group,) = config.state_groups(ranks, torch.bfloat16)
        assert len(group.layers) == 48
        states, conv = 48 * 48 * 128 * 128 * 4, 48 * 3 * (2 * 16 + 48) * 128 * 2
        assert snapshot_bytes([group], torch.float32) == (states + conv) // ranks
        assert snapshot_bytes([group], torch.bfloat16) == (states // 2 + conv) // ranks
        (attention,) = config.kv_groups(ranks, torch.bfloat16)
        assert attention.layers == tuple(range(3, 64, 4))


def test_a_rank_of_eight_has_an_eighth_of_what_is_cut() -> None:
    config = read(V3)
    replicated = 61 * (1536 + 576) * 7168
    whole, share = parameters(config, 1, torch.float8_e4m3fn), parameters(config, 8, torch.float8_e4m3fn)
    assert share == (whole - replicated) // 8 + replicated
    (group,) = config.kv_groups(8, torch.bfloat16)
    assert group.bytes_per_token == 61 * 576 * 2


def test_attention_is_scaled_for_long_contexts() -> None:
    """softmax scale 192^-1/2 (0.1 m ln 40 + 1)^2; cos and sin are left alone where both scales are equal."""
    for raw, m in ((V2_LITE, 0.707), (V3, 1.0)):
        config = read(raw)
        assert isinstance(config, DeepseekConfig)
        assert config.attention_scale == pytest.approx(192**-0.5 * (1 + 0.1 * m * 3.6888794541) ** 2)
        assert config.rope.magnitude == 1.0


@pytest.mark.parametrize("raw,ranks", [(V3, 8), (KIMI_K2, 16), (QWEN3_30B | {"quantization_config": FP8}, 4)])
def test_they_can_be_cut(raw: dict[str, Any], ranks: int) -> None:
    read(raw).check_shards(ranks, "model x")
    assert parameters(read(raw), ranks) > 0
