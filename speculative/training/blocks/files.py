"""Builds, saves and loads DFlash heads, in z-lab's folder layout, which SGLang and vLLM read too."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from speculative.drafts.blocks.dflash import DFlash
from speculative.training import TrainingError
from speculative.training.blocks.head import BlockHead
from speculative.training.draft import DraftKind, DraftVocabulary, TrainedDraft, Unrolling
from speculative.training.eagle3_files import MODEL_TYPES, make_readable
from speculative.training.samples import Sample
from workers.models.llama import read_config

ARCHITECTURE = "DFlashDraftModel"
_MIN_TARGET_LAYERS = 6


def block_config(target: PreTrainedModel, block_size: int, num_layers: int, mask_token_id: int) -> dict[str, Any]:
    """The config.json of a head that reads three of the target's layers, from the second to the third last.

    Raises `TrainingError` for a target of an architecture or depth that is not supported.
    """
    config = target.config
    if config.model_type not in MODEL_TYPES:
        raise TrainingError(f"target: model_type={config.model_type!r} is not supported; use {', '.join(MODEL_TYPES)}")
    count = config.num_hidden_layers
    if count < _MIN_TARGET_LAYERS:
        raise TrainingError(f"target: has {count} layers; a DFlash head captures three of at least 6")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "block_size": block_size,
        "num_target_layers": count,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": [1, (count - 2) // 2, count - 3]},
    }


def read_block_config(config: Mapping[str, Any], target: PreTrainedModel, folder: Path) -> DFlash:
    """The engine's description of the head. Raises `TrainingError` for one that the engine refuses."""
    try:
        return DFlash.read(str(folder), config, read_config(target.config.to_dict(), "target"))
    except ValueError as error:
        raise TrainingError(str(error)) from None


def build_block_head(target: PreTrainedModel, method: DFlash, seed: int) -> BlockHead:
    """A float32 head on the target's device."""
    torch.manual_seed(seed)
    head = BlockHead(method)
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)
    head.use_target(target.get_input_embeddings(), target.get_output_embeddings())
    return head.to(target.device)


class BlockKind(DraftKind):
    """A new DFlash head with the target's vocabulary."""

    def __init__(self, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(arguments, target)
        self.refuse_head_options("dflash")
        mask = arguments.mask_token
        if mask is None:
            mask = target.config.pad_token_id
        if mask is None:
            raise TrainingError("mask_token: the target has no padding token to use; give the id of an unused token")
        self.config = block_config(target, arguments.block_size, arguments.draft_layers, mask)
        self.method = read_block_config(self.config, target, arguments.output)

    def unrolling(self) -> Unrolling:
        decay = math.exp(-1 / self.arguments.gamma)
        return Unrolling(self.method.form.max_depth, decay, self.arguments.anchors)

    def build(self, samples: Sequence[Sample], stops: Sequence[int]) -> tuple[TrainedDraft, DraftVocabulary]:
        return build_block_head(self.target, self.method, self.arguments.seed), self._vocabulary()

    def save(self, head: TrainedDraft, vocabulary: DraftVocabulary, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in head.named_parameters()}
        save_file({name: each.contiguous() for name, each in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        make_readable(folder)

    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        head = build_block_head(self.target, read_block_config(config, self.target, folder), 0)
        head.load_state_dict({name: each.float() for name, each in load_file(folder / "model.safetensors").items()})
        return head, self._vocabulary()

    def _vocabulary(self) -> DraftVocabulary:
        size = self.target.config.vocab_size
        return DraftVocabulary.of(torch.arange(size), size).to(self.target.device)
