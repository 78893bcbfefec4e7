"""`ModelConfig`: the one place that knows how Hugging Face spells things."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.layers.rotary import RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder of the Llama family, as its config.json says.

    qkv_bias: Qwen2, and Llama with attention_bias, which then has o_bias too. qk_norm: Qwen3 (an RMSNorm per head on
    q and k). dtype: of the checkpoint.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROPE_KINDS = ("default", "linear", "llama3")


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; raises ValueError naming the path if it is missing or not an object."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"path={folder}: has no config.json; give the folder of a Hugging Face checkpoint") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not JSON ({error}); download the checkpoint again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return config


def model_config_from_hf(config: dict[str, Any], source: str) -> ModelConfig:
    """`ModelConfig` of a Llama-like config.json; `source` names it in errors.

    Raises ValueError where the model has something Aerie would otherwise ignore.
    """
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        intermediate = int(config["intermediate_size"])
        vocab = int(config["vocab_size"])
    except KeyError as error:
        raise ValueError(f"{source}: config.json lacks {error}, which a Llama-like model needs") from None
    architecture = str((config.get("architectures") or ["LlamaForCausalLM"])[0])
    _refuse_unsupported(config, layers, source)
    eos = config.get("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position=int(config.get("max_position_embeddings") or 2048),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, source),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture.startswith("Qwen2") or bool(config.get("attention_bias", False)),
        o_bias=bool(config.get("attention_bias", False)) and not architecture.startswith("Qwen2"),
        qk_norm=architecture.startswith("Qwen3"),
        dtype=_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32"), torch.bfloat16),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )


def _refuse_unsupported(config: dict[str, Any], num_layers: int, source: str) -> None:
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"{source}: hidden_act={act!r} is not supported; only silu is")
    if config.get("mlp_bias"):
        raise ValueError(f"{source}: mlp_bias=true is not supported")
    if config.get("use_sliding_window") and int(config.get("max_window_layers", 0)) < num_layers:
        raise ValueError(
            f"{source}: sliding-window attention is not supported; set use_sliding_window=false if the "
            "model works without it"
        )
    if config.get("quantization_config"):
        raise ValueError(f"{source}: quantised weights are not supported; use the checkpoint in bf16 or fp16")


def _rope(config: dict[str, Any], source: str) -> RopeConfig:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in _ROPE_KINDS:
        raise ValueError(f"{source}: rope_type={kind!r} is not supported; it is one of {', '.join(_ROPE_KINDS)}")
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position=int(scaling.get("original_max_position_embeddings", 8192)),
    )
