"""Tiny random checkpoints in the formats that Hugging Face and the published EAGLE heads use."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS, MLP = 96, 40, 64, 4, 96


MOE: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # transformers takes it for the rotated part
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
}
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
ORIGINAL = {"original_max_position_embeddings": 64}
GRANITE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 6.0,
}
# What an architecture has beside what all have.
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": MOE | {"num_experts": 6, "norm_topk_prob": True, "num_hidden_layers": 4},
    "Qwen3_5": HYBRID,
    "Qwen3_5Moe": HYBRID | MOE | {"num_experts": 6, "shared_expert_intermediate_size": 32},
    "Qwen3Next": HYBRID | MOE | {"num_experts": 6, "shared_expert_intermediate_size": 32},
    "Qwen2Moe": MOE | {"num_experts": 6, "shared_expert_intermediate_size": 32, "num_hidden_layers": 4},
    "Phi3": {"pad_token_id": 0, "num_hidden_layers": 4},
    "SmolLM3": {"pad_token_id": 0, "num_hidden_layers": 4},
    "Mistral": {"num_hidden_layers": 4},
    "Ministral": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Gemma2": {"num_hidden_layers": 4, "sliding_window": 12, "query_pre_attn_scalar": 24},
    "Gemma3": {
        "num_hidden_layers": 5,
        "sliding_window": 12,
        "query_pre_attn_scalar": 24,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "Gemma4": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2,
        "sliding_window": 12,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    "Gemma4Unified": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 12,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "GptOss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "Olmo2": {"num_hidden_layers": 4},
    "Olmo3": {
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, **ORIGINAL},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "Granite": GRANITE,
    "GraniteMoe": GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "GraniteMoeShared": GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 48},
    "GraniteMoeHybrid": GRANITE
    | {"num_local_experts": 0, "shared_intermediate_size": 48, "position_embedding_type": "rope"}
    | {"layer_types": ["attention"] * 4, "mamba_n_heads": 8, "mamba_d_head": 16},
    "Glm4Moe": MOE
    | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_hidden_layers": 4}
    | {"use_qk_norm": True, "attention_bias": True},
    "Glm4MoeLite": MOE | LATENT | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "DeepseekV2": MOE | LATENT | {"n_routed_experts": 6, "n_shared_experts": 2, "topk_method": "greedy"},
    "DeepseekV3": MOE | LATENT | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
}


def make_target(folder: Path, seed: int = 0, calm: float = 1.0, **overrides: Any) -> Path:
    """A random target; overrides go to its configuration, but for architecture: "Llama", or another prefix of
    transformers' classes. calm: the weight of what layers add to the embedding; small values make the next token a
    function of the last one mostly, which `make_eagle` with `copying` guesses well."""
    import transformers

    architecture = overrides.pop("architecture", "Llama")
    text = "Text" if architecture.startswith(("Qwen3_5", "Gemma3", "Gemma4")) else ""
    config_class = getattr(transformers, f"{architecture}{text}Config")
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "initializer_range": 0.2,
        **FAMILY_SETTINGS.get(architecture, {}),
        **overrides,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**settings)).eval()
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            torch.nn.init.uniform_(buffer, -0.2, 0.2)
        if "layer_scalar" in name:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or name.endswith("scale"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if "embed_tokens" in name:
            parameter.data /= calm
    model.save_pretrained(folder)
    return folder


def add_mtp(target: Path, seed: int = 1, copying: bool = False) -> torch.nn.Module:
    """Gives a DeepSeek-V3 or GLM-4.5 target a random module for multi-token prediction, in its own checkpoint and by
    the published names; returns transformers' module with the same weights. copying: it passes the newest token's
    embedding on almost unchanged."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import MtpLayer

    config = AutoConfig.from_pretrained(target, attn_implementation="eager")
    index, path = config.num_hidden_layers, target / "model.safetensors"
    text = AutoModelForCausalLM.from_config(config)
    layer_class, norm_class = type(text.model.layers[0]), type(text.model.norm)
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    torch.manual_seed(seed)
    module = MtpLayer(config, layer_class, norm_class, index).eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(parameter, 0.0, 0.2)
    tensors = load_file(str(path))
    if copying:
        eye = torch.eye(config.hidden_size)
        module.enorm.weight.fill_(1.0)
        module.eh_proj.weight.copy_(torch.cat((eye, 0.01 * eye), dim=1))
        module.post_norm.weight.copy_(tensors["model.norm.weight"])
        for name, parameter in module.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter *= 0.02
    theirs = f"model.layers.{index}"
    for name, tensor in module.state_dict().items():
        ours = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        tensors |= _split_experts(f"{theirs}.{ours}", tensor)
    tensors[f"{theirs}.embed_tokens.weight"] = tensors[f"{theirs}.shared_head.head.weight"] = torch.zeros(3, 3)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, str(path), metadata={"format": "pt"})
    settings = {"num_nextn_predict_layers": 1} | json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(settings))
    return module


def add_qwen_mtp(target: Path, seed: int = 1, copying: bool = False, stacked: bool = False) -> torch.nn.Module:
    """`add_mtp` for a Qwen3-Next or Qwen3.5. stacked: a module's experts are in one tensor, as Qwen3.5 publishes them;
    else a tensor each."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import MtpLayer

    config = AutoConfig.from_pretrained(target, attn_implementation="eager").get_text_config()
    config._attn_implementation = "eager"  # not that of a model of images
    text = AutoModelForCausalLM.from_config(config)
    layer_class, norm_class = type(text.model.layers[0]), type(text.model.norm)
    config.layer_types = [*config.layer_types, "full_attention"]
    torch.manual_seed(seed)
    module = MtpLayer(config, layer_class, norm_class, config.num_hidden_layers).eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        # norms are saved less one
        torch.nn.init.uniform_(parameter, -0.5, 0.5) if "norm" in name else torch.nn.init.normal_(parameter, 0.0, 0.2)
    path = target / "model.safetensors"
    tensors = load_file(str(path))
    if copying:
        eye = torch.eye(config.hidden_size)
        module.enorm.weight.zero_()
        module.eh_proj.weight.copy_(torch.cat((eye, 0.01 * eye), dim=1))
        module.post_norm.weight.copy_(tensors["model.norm.weight"])
        for name, parameter in module.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter *= 0.02
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    for name, tensor in module.state_dict().items():
        first, _, rest = name.partition(".")
        whole = f"mtp.layers.0.{rest}" if first == "mtp_block" else f"mtp.{names[first]}.{rest}"
        tensors |= {whole: tensor} if stacked else _split_experts(whole, tensor)
    save_file({n: t.clone() for n, t in tensors.items()}, str(path), metadata={"format": "pt"})
    settings = json.loads((target / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (target / "config.json").write_text(json.dumps(settings))
    return module


def _split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensor by its name, or where it holds all experts' matrices, each by its own."""
    layer, experts, part = name.partition(".mlp.experts.")
    if not experts:
        return {name: tensor}
    parts = {part: tensor}
    if part == "gate_up_proj":
        parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True))
    return {
        f"{layer}.mlp.experts.{expert}.{part}.weight": matrix
        for part, stacked in parts.items()
        for expert, matrix in enumerate(stacked)
    }


def make_eagle3(folder: Path, target: Path, seed: int = 1, **overrides: Any) -> Path:
    """A random EAGLE-3 head for `target`, sharing its embedding, with its own vocabulary. It reads what the default
    says, or in a target of few layers the inputs of the second to the fourth."""
    config = json.loads((target / "config.json").read_text())
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    config.setdefault("head_dim", hidden // config["num_attention_heads"])  # a target of latent rows has none
    config.setdefault("rms_norm_eps", 1e-6)  # one with LayerNorm has none
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randperm(vocab, generator=generator)[:DRAFT_VOCAB].sort().values

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    tensors = {
        "fc.weight": normal(hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": normal(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": normal(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": normal(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": normal(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": normal(mlp, hidden),
        "midlayer.mlp.up_proj.weight": normal(mlp, hidden),
        "midlayer.mlp.down_proj.weight": normal(hidden, mlp),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(DRAFT_VOCAB, hidden),
        "d2t": picked - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, picked, True),
    }
    keys = (
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    settings = {k: config[k] for k in keys} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "num_hidden_layers": 1,
        "torch_dtype": "float32",
    }
    if config.get("num_hidden_layers", 7) < 7:
        settings["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return _write(folder, settings | overrides, tensors)


def make_eagle(folder: Path, target: Path, seed: int = 1, copying: bool = False) -> Path:
    """A random EAGLE head for `target`: embedding and vocabulary head are the target's. copying: it passes the newest
    token's embedding on almost unchanged."""
    config = json.loads((target / "config.json").read_text())
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    config.setdefault("head_dim", hidden // config["num_attention_heads"])
    config.setdefault("rms_norm_eps", 1e-6)
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    tensors = {
        "fc.weight": normal(hidden, 2 * hidden),
        "fc.bias": normal(hidden),
        "layers.0.self_attn.q_proj.weight": normal(heads * dim, hidden),
        "layers.0.self_attn.k_proj.weight": normal(kv_heads * dim, hidden),
        "layers.0.self_attn.v_proj.weight": normal(kv_heads * dim, hidden),
        "layers.0.self_attn.o_proj.weight": normal(hidden, heads * dim),
        "layers.0.mlp.gate_proj.weight": normal(mlp, hidden),
        "layers.0.mlp.up_proj.weight": normal(mlp, hidden),
        "layers.0.mlp.down_proj.weight": normal(hidden, mlp),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
    }
    if copying:
        # stands in for the target's final norm, which EAGLE's head lacks
        weights = load_file(str(target / "model.safetensors"))
        norm = weights["model.norm.weight"] + ("linear_num_key_heads" in config)  # hybrids' norms are 1 + w
        factor = norm / weights["model.embed_tokens.weight"].std()
        tensors["fc.weight"] = torch.cat((factor.diag(), torch.zeros(hidden, hidden)), dim=1)
        tensors["fc.bias"].zero_()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"layers.0.{name}.weight"] *= 0.02
    settings = {**config, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    return _write(folder, settings, tensors)


def _write(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
