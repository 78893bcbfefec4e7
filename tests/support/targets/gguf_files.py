"""Writes tiny checkpoints as GGUF files with llama.cpp's own library, by the rules of its converter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

TypeOf = Callable[[str, Any], Type]
_ARCHITECTURES = {"Llama": "llama", "Qwen2Moe": "qwen2moe", "Qwen3Moe": "qwen3moe", "Qwen2": "qwen2", "Qwen3": "qwen3"}
_ARCHITECTURES |= {"Gemma2": "gemma2", "Gemma3": "gemma3", "Phi3": "phi3", "GptOss": "gpt-oss", "Mistral": "llama"}
PRODUCTS = ("_proj.weight", "gate_up_proj", "down_proj")  # ends of what `quantised` quantises


def plain(_: str, __: Any) -> Type:
    return Type.F32


def write_gguf(target: Path, path: Path, type_of: TypeOf = plain, tokens: int | None = None) -> Path:
    """Write `target`, a checkpoint of `tests.support.tiny_models.make_target`, as `path`; and beside it, in the folder
    "means", the checkpoint of what the file means. type_of: type of a tensor, by its name in the checkpoint."""
    config = json.loads((target / "config.json").read_text())
    kind = config["architectures"][0].removesuffix("ForCausalLM")
    arch = _ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, arch)
    _add_config(writer, config, kind)
    _add_tokens(writer, tokens or config["vocab_size"])
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(key, config["num_hidden_layers"])
    means, experts = {}, {}
    for name, tensor in load_file(str(target / "model.safetensors")).items():
        if kind == "GptOss" and ".mlp.experts." in name:
            means[name] = _add_gpt_oss(writer, name, tensor, type_of)
            continue
        raw, quant, means[name] = _quantised(name, tensor, type_of)
        if ".mlp.experts." in name:
            start, number, end = _split(name)
            experts.setdefault((start + end, quant), {})[number] = raw
            continue
        if kind in ("Llama", "Mistral") and (".q_proj." in name or ".k_proj." in name):
            raw = _permuted(raw, config["num_attention_heads" if ".q_" in name else "num_key_value_heads"])
        if kind.startswith("Gemma") and name.endswith("norm.weight"):
            raw = raw + 1
        _add(writer, names.get_name(name, (".weight", ".bias")), raw, quant)
    for (name, quant), matrices in experts.items():
        _add(writer, names.get_name(name, (".weight",)), np.stack([matrices[i] for i in range(len(matrices))]), quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = path.parent / "means"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(means, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return path


def _quantised(name: str, tensor: torch.Tensor, type_of: TypeOf) -> tuple[Any, Type, torch.Tensor]:
    """Return a tensor's bytes, their type, and what they mean."""
    quant = type_of(name, tensor) if name.endswith(PRODUCTS) or "embed_tokens" in name else Type.F32
    raw = gguf.quantize(tensor.float().numpy(), quant)
    value = gguf.dequantize(raw.view(np.uint8) if quant != Type.F32 else raw, quant)
    return raw, quant, torch.from_numpy(np.array(value)).view(tensor.shape)


def _add(writer: gguf.GGUFWriter, name: str | None, raw: Any, quant: Type) -> None:
    assert name is not None
    suffix = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
    writer.add_tensor(suffix, np.ascontiguousarray(raw), raw_dtype=quant)


def _split(name: str) -> tuple[str, int, str]:
    start, _, rest = name.partition(".mlp.experts.")
    number, _, end = rest.partition(".")
    return f"{start}.mlp.experts.", int(number), end


def _permuted(rows: Any, heads: int) -> Any:
    """As `LlamaModel.permute` does."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _add_gpt_oss(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, type_of: TypeOf) -> torch.Tensor:
    """Add a layer's experts, whose gate and up rows take turns in the checkpoint. Return what they mean there."""
    start, _, end = name.partition(".mlp.experts.")
    layer, is_bias = start.rpartition(".")[2], end.endswith("_bias")
    rows = tensor if is_bias else tensor.mT
    means = torch.empty_like(rows)
    for part, first, step in (("gate", 0, 2), ("up", 1, 2)) if end.startswith("gate_up") else (("down", 0, 1),):
        own = rows[:, first::step].contiguous()
        raw, quant, means[:, first::step] = _quantised(name, own, type_of)
        _add(writer, f"blk.{layer}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}", raw, quant)
    return (means if is_bias else means.mT).contiguous()


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], kind: str) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full.get("rope_theta", 10000.0))
    if full.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if original := full.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(original)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if kind == "Gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "Phi3":
        writer.add_rope_dimension_count(int(full.get("partial_rotary_factor", 1.0) * 16))
    if count := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if shared := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Add a vocabulary that no test reads texts with."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{i}>" for i in range(count)])
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_token_merges([])
    writer.add_eos_token_id(1)
