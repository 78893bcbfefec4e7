"""Writes and reads an EAGLE-3 head in the folder layout of the published ones (SafeAILab, SGLang, vLLM read it)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from speculative.training.draft_model import DraftShape, Eagle3Head
from speculative.training.errors import TrainingError
from speculative.training.vocabulary import DraftVocabulary

ARCHITECTURE = "LlamaForCausalLMEagle3"


def draft_config(shape: DraftShape, token_ids: dict[str, Any]) -> dict[str, Any]:
    """The head's `config.json`. Layer ids are outputs there: id i is the stream that enters layer i + 1."""
    scaled = shape.rope["rope_type"] != "default"
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope["rope_theta"],
        "rope_scaling": {k: v for k, v in shape.rope.items() if k != "rope_theta"} if scaled else None,
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in shape.target_layers],
            "use_aux_hidden_state": True,
        },
        **token_ids,
    }


def save_draft(head: Eagle3Head, vocabulary: DraftVocabulary, token_ids: dict[str, Any], folder: Path) -> None:
    """Writes `config.json` and bf16 `model.safetensors`; the embedding is the target's and is not repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in head.named_parameters()}
    save_file(
        {**weights, "d2t": vocabulary.d2t().cpu(), "t2d": vocabulary.t2d.cpu()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.dumps(draft_config(head.shape, token_ids), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    make_readable(folder)


def make_readable(folder: Path) -> None:
    """Gives the weights the permissions of config.json: safetensors (0.8) writes files that only their owner reads."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)


def load_draft(folder: Path, device: torch.device) -> tuple[Eagle3Head, DraftVocabulary]:
    """The head in float32 on the device, and its vocabulary. Raises `TrainingError` for another architecture."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != [ARCHITECTURE]:
        raise TrainingError(f"draft={folder}: architectures={config['architectures']}; must be [{ARCHITECTURE!r}]")
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    first, second, third = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    shape = DraftShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        draft_vocab_size=config["draft_vocab_size"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        rope={**scaling, "rope_theta": config["rope_theta"]},
        target_layers=(first + 1, second + 1, third + 1),
    )
    tensors = load_file(folder / "model.safetensors")
    offsets = tensors.pop("d2t")
    t2d = tensors.pop("t2d")
    head = Eagle3Head(shape)
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    vocabulary = DraftVocabulary(offsets + torch.arange(len(offsets)), t2d)
    return head.to(device), vocabulary.to(device)
