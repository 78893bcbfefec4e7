"""What GGUF files store otherwise than Hugging Face's checkpoints, by architecture: keys of the configuration, names of
tensors, and changed values. Sources: llama.cpp's converter (convert_hf_to_gguf) and its graphs (`src/models`).

Llama's q and k rows are in the order of llama.cpp's RoPE, which rotates pairs of neighbours. Norms of Gemma are stored
with the one that Gemma's layers add.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aerie.workers.models.gguf.header import FileTensor, GgufFile

Config = dict[str, Any]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint, and how to make it from a tensor of the file.

    name: name in Hugging Face's checkpoints. One "{expert}" in it: the file's tensor has one of each expert.
    heads: number of heads whose rows are put back into Hugging Face's order; 0: rows are in order.
    centred: whether one is subtracted.
    is_row: whether a vector becomes a matrix of one row.
    packed: whether the bytes of the blocks are the tensor; else it is dequantised.
    """

    name: str
    source: FileTensor
    heads: int = 0
    centred: bool = False
    is_row: bool = False
    packed: bool = False


class Facts:
    """The metadata of a file, by keys without the architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.architecture = file, str(file.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number. Raises ValueError if it is missing and has no default, or differs between layers."""
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            what = "is missing" if value is None else f"is {value!r:.60}, not one number"
            raise ValueError(f"{self.file.paths[0]}: {self.architecture}.{key} {what}; serve the model in safetensors")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors


@dataclass(frozen=True)
class Family:
    """How one architecture is stored.

    architecture: that of config.json.
    config: further keys of config.json.
    names: further tensors of a layer, by their names in files.
    permuted, centred: see the module.
    """

    architecture: str
    config: Callable[[Facts], Config] = field(default=lambda facts: {})
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    centred: bool = False


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
_LAYER |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm"}
_LAYER |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_LAYER |= {f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")}
_LAYER |= {"ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_SHARED |= {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_SANDWICH = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_SANDWICH |= {"post_ffw_norm": "post_feedforward_layernorm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT_OSS = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
_GPT_OSS |= {"attn_sinks": "self_attn.sinks"}
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # part of config.json
_PLACED = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)|(\w+)\.(weight|bias)")
_OTHER = ("embed_tokens", "norm", "router", "mlp.gate", "shared_expert_gate", "sinks")  # ends of names


def _llama(facts: Facts) -> Config:
    if facts.get("expert_count"):
        raise ValueError(
            f"{facts.file.paths[0]}: llama with experts (Mixtral) is not served from GGUF; use safetensors"
        )
    return {"attention_bias": facts.has("blk.0.attn_q.bias")}


def _moe(facts: Facts) -> Config:
    return {
        "num_experts": facts.number("expert_count"),
        "num_experts_per_tok": facts.number("expert_used_count"),
        "moe_intermediate_size": facts.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen2_moe(facts: Facts) -> Config:
    shared = facts.number("expert_shared_feed_forward_length", facts.number("feed_forward_length", 0))
    return _moe(facts) | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def _gemma(facts: Facts) -> Config:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": facts.number("attention.sliding_window"),
        "query_pre_attn_scalar": _gemma_query_scalar(facts),
        "attn_logit_softcapping": facts.get("attn_logit_softcapping"),
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
    }


def _gemma_query_scalar(facts: Facts) -> float:
    """Return what queries are divided by the root of. Files do not say it: the models of 27B, recognised by their
    layers as in llama.cpp, have hidden_size / heads, and the others have head_dim."""
    if facts.number("block_count") in (46, 62):
        return float(facts.number("embedding_length") // facts.number("attention.head_count"))
    return float(facts.number("attention.key_length"))


def _gemma3(facts: Facts) -> Config:
    return _gemma(facts) | {
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": facts.number("attention.sliding_window_pattern", 6),
        "attn_logit_softcapping": None,
    }


def _windowed(facts: Facts) -> Config:
    return {"sliding_window": facts.get("attention.sliding_window") or None}


def _phi3(facts: Facts) -> Config:
    head_dim = facts.number("embedding_length") // facts.number("attention.head_count")
    return _windowed(facts) | {"partial_rotary_factor": facts.number("rope.dimension_count", head_dim) / head_dim}


def _gpt_oss(facts: Facts) -> Config:
    return _windowed(facts) | {
        "num_local_experts": facts.number("expert_count"),
        "num_experts_per_tok": facts.number("expert_used_count"),
        "intermediate_size": facts.number("expert_feed_forward_length"),
        "attention_bias": True,
    }


FAMILIES = {  # key: general.architecture
    "llama": Family("LlamaForCausalLM", _llama, permuted=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen2moe": Family("Qwen2MoeForCausalLM", _qwen2_moe, _SHARED),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3moe": Family("Qwen3MoeForCausalLM", _moe),
    "gemma2": Family("Gemma2ForCausalLM", _gemma, _SANDWICH, centred=True),
    "gemma3": Family("Gemma3ForCausalLM", _gemma3, _SANDWICH, centred=True),
    "phi3": Family("Phi3ForCausalLM", _phi3, _FUSED),
    "gpt-oss": Family("GptOssForCausalLM", _gpt_oss, _GPT_OSS),
}


def family_of(file: GgufFile) -> Family:
    """Return the file's family. Raises ValueError, with the supported ones, for another."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise ValueError(
            f"{file.paths[0]}: architecture {architecture or 'none'} is not served from GGUF; served are "
            f"{', '.join(FAMILIES)}; use the model in safetensors"
        )
    return FAMILIES[architecture]


def read_config(file: GgufFile, vectors: Callable[[str], list[float]]) -> Config:
    """Return config.json, without eos_token_id and quantization_config. vectors: values of a tensor. Raises ValueError
    for a model that is not supported."""
    family, facts = family_of(file), Facts(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{file.paths[0]}: has no token_embd.weight; it is no language model, or is incomplete")
    heads, hidden = facts.number("attention.head_count"), facts.number("embedding_length")
    config = {
        "architectures": [family.architecture],
        "hidden_size": hidden,
        "num_hidden_layers": facts.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.number("attention.head_count_kv", heads),
        "head_dim": facts.number("attention.key_length", hidden // heads),
        "intermediate_size": facts.number("feed_forward_length", 0) or hidden,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": facts.number("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": not facts.has("output.weight"),
        "dtype": "float32" if {tensor.type for tensor in file.tensors.values()} == {"F32"} else "bfloat16",
    }
    config |= family.config(facts)
    scaling = _rope_scaling(facts, config, vectors)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _rope_scaling(facts: Facts, config: Config, vectors: Callable[[str], list[float]]) -> Config:
    """Return `rope_scaling` as Hugging Face's configurations have it; {} without. vectors: reads a small tensor's
    values."""
    original = int(facts.number("rope.scaling.original_context_length", config["max_position_embeddings"]))
    if facts.has("rope_factors_long.weight"):
        config["original_max_position_embeddings"] = original
        long, short = (vectors(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
        return {"rope_type": "longrope", "type": "longrope", "long_factor": long, "short_factor": short}
    if facts.has("rope_freqs.weight"):
        return _llama3(facts, config, vectors("rope_freqs.weight"))
    kind = facts.get("rope.scaling.type") or ("linear" if facts.get("rope.scale_linear") else "none")
    factor = float(facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 1.0)))
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return yarn | ({"truncate": False} if facts.architecture == "gpt-oss" else {})
    raise ValueError(f"{facts.file.paths[0]}: rope.scaling.type={kind!r} is not supported; use safetensors")


def _llama3(facts: Facts, config: Config, factors: list[float]) -> Config:
    """Return Llama 3's RoPE scaling, of which files have only the resulting factor of each frequency. All published
    models have these constants, which the factors confirm."""
    scaling = {
        "rope_type": "llama3",
        "factor": float(round(max(factors), 4)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta, dim = config["rope_theta"], 2 * len(factors)
    for i, factor in enumerate(factors):
        turns = 8192 / (2 * math.pi * theta ** (2 * i / dim))  # in the original context
        smooth = min(1.0, max(0.0, (turns - 1.0) / 3.0))
        expected = 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
        if not math.isclose(factor, expected, rel_tol=1e-3):
            raise ValueError(
                f"{facts.file.paths[0]}: rope_freqs.weight is not that of Llama 3.1 to 3.3, and other factors are not "
                "supported; use the model in safetensors"
            )
    return scaling


def stored_tensors(file: GgufFile, config: Config, packable: Callable[[str], bool]) -> list[StoredTensor]:
    """Return the checkpoint's tensors. packable: whether a type is packed without loss. Raises ValueError for a tensor
    that the architecture does not have."""
    family = family_of(file)
    heads = (
        {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if family.permuted else {}
    )
    stored = []
    for tensor in file.tensors.values():
        if tensor.name in _NOT_WEIGHTS:
            continue
        match = _PLACED.fullmatch(tensor.name)
        layer, own, kind, top, top_kind = match.groups() if match else (None,) * 5
        module = {**_LAYER, **family.names}.get(own or "") if layer else _TOP.get(top or "")
        if module is None:
            raise ValueError(f"{file.paths[0]}: has {tensor.name}, which {family.architecture} has not")
        module = f"model.layers.{layer}.{module}" if layer else module
        name = module if module.endswith("sinks") else f"{module}.{kind or top_kind}"
        stored.append(
            StoredTensor(
                name,
                tensor,
                heads=heads.get(own or "", 0) if family.permuted else 0,
                centred=family.centred and "norm" in tensor.name,
                is_row=module.endswith("shared_expert_gate") and len(tensor.shape) == 1,
                packed=packable(tensor.type) and is_linear(name),
            )
        )
    return stored


def is_linear(name: str) -> bool:
    """Return whether a tensor of the checkpoint is the matrix of a linear layer, or of experts."""
    return name.endswith(".weight") and not name.removesuffix(".weight").endswith(_OTHER)
