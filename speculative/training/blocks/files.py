"""Builds, saves and loads block heads: DFlash and DFlash2 in z-lab's folder layout, DSpark in DeepSpec's."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from speculative.drafts.blocks.dflash import DFlash
from speculative.drafts.blocks.dflash2 import DFlash2
from speculative.drafts.blocks.dspark import DSpark
from speculative.training import TrainingError
from speculative.training.blocks.conditional import DFlash2Head, DSparkHead
from speculative.training.blocks.head import BlockHead
from speculative.training.blocks.loss import Objective
from speculative.training.draft import DraftKind, DraftVocabulary, TrainedDraft, Unrolling
from speculative.training.eagle3_files import MODEL_TYPES, write_checkpoint
from speculative.training.samples import Sample
from workers.models.registry import family_of

_MODEL_TYPES = (*MODEL_TYPES, "qwen3_5_text")  # model_type of supported targets
_MAX_CAPTURED = 5  # captured target layers, as in z-lab's heads


@dataclass(frozen=True)
class BlockOptions:
    """Sizes of a new head.

    block_size: rows of a block, including the newest token.
    rank: rank of the Markov head or the selector; unused by DFlash.
    """

    method: str
    block_size: int
    num_layers: int
    mask_token_id: int
    rank: int


@dataclass(frozen=True)
class Published:
    """A kind of published block heads. config: returns the kind's own keys of config.json, given `BlockOptions` and
    captured layers. tv_weight: see `Objective`."""

    method: type[DFlash]
    head: Callable[[Any, Objective], BlockHead]
    config: Callable[[BlockOptions, list[int]], dict[str, Any]]
    tv_weight: float


def _z_lab(options: BlockOptions, layers: list[int]) -> dict[str, Any]:
    nested = {"mask_token_id": options.mask_token_id, "target_layer_ids": layers}
    return {"architectures": ["DFlashDraftModel"], "dflash_config": nested}


def _z_lab_2(options: BlockOptions, layers: list[int]) -> dict[str, Any]:
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": options.rank, "selector_top_k": 16}
    nested = {"mask_token_id": options.mask_token_id, "target_layer_ids": layers, **sizes}
    return {"architectures": ["DFlash2DraftModel"], "dflash_config": nested}


def _deepspec(options: BlockOptions, layers: list[int]) -> dict[str, Any]:
    markov = {"markov_rank": options.rank, "markov_head_type": "vanilla"}
    confidence = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    where = {"mask_token_id": options.mask_token_id, "target_layer_ids": layers}
    return {"architectures": ["Qwen3DSparkModel"], **where, **markov, **confidence}


# By `--method`.
KINDS = {
    "dflash": Published(DFlash, BlockHead, _z_lab, 0.0),
    "dspark": Published(DSpark, DSparkHead, _deepspec, 0.9),
    "dflash2": Published(DFlash2, DFlash2Head, _z_lab_2, 0.0),
}


def block_config(target: PreTrainedModel, options: BlockOptions) -> dict[str, Any]:
    """Return the config.json of a new head. Raises `TrainingError` for a target of an unsupported architecture."""
    config = target.config
    if config.model_type not in _MODEL_TYPES:
        raise TrainingError(f"target: model_type={config.model_type!r} is not supported; use {', '.join(_MODEL_TYPES)}")
    count = config.num_hidden_layers
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _whole_rotation(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "block_size": options.block_size,
        "num_target_layers": count,
        **KINDS[options.method].config(options, captured_layers(count)),
    }


def captured_layers(num_layers: int) -> list[int]:
    """Return the layers whose output a head reads: up to five, from the second to the third last. Targets of fewer than
    six layers: all but the last."""
    steps = min(_MAX_CAPTURED, num_layers - 3) - 1
    if steps < 2:
        return list(range(num_layers - 1))
    return [round(1 + i * (num_layers - 4) / steps) for i in range(steps + 1)]


def _whole_rotation(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target's rotary embedding for a head's full width: Qwen3's layers rotate all of it."""
    own = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
    return {key: value for key, value in rope.items() if key not in own}


def read_block_config(kind: str, config: Mapping[str, Any], target: PreTrainedModel, folder: Path) -> DFlash:
    """Return the engine's description of the head. Raises `TrainingError` for one that the engine refuses."""
    architecture = type(target).__name__
    raw = {**target.config.to_dict(), "architectures": [architecture]}
    try:
        return KINDS[kind].method.read(
            str(folder), config, family_of(architecture, "target").read_config(raw, "target")
        )
    except ValueError as error:
        raise TrainingError(str(error)) from None


def build_block_head(target: PreTrainedModel, method: DFlash, objective: Objective, seed: int) -> BlockHead:
    """Return a new float32 head on the target's device."""
    torch.manual_seed(seed)
    head = KINDS[method.name].head(method, objective)
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
    head.initialise()
    head.use_target(target)
    return head.to(target.device)


def load_block_head(folder: Path, kind: str, target: PreTrainedModel) -> tuple[BlockHead, DraftVocabulary]:
    """Return a saved head and the tokens that it may propose. Raises `TrainingError` for one that the engine
    refuses."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head = build_block_head(target, read_block_config(kind, config, target, folder), Objective(), 0)
    head.load_state_dict({name: each.float() for name, each in load_file(folder / "model.safetensors").items()})
    return head, DraftVocabulary.whole(target)


class BlockKind(DraftKind):
    """A new DFlash, DSpark or DFlash2 head with the target's vocabulary."""

    def __init__(self, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(arguments, target)
        self.kind: str = arguments.method
        self.refuse_head_options(self.kind)
        mask = arguments.mask_token
        if mask is None:
            mask = target.config.pad_token_id
        if mask is None:
            raise TrainingError("mask_token: the target has no padding token to use; give the id of an unused token")
        weight = KINDS[self.kind].tv_weight if arguments.tv_weight is None else arguments.tv_weight
        self.objective = Objective(weight)
        options = BlockOptions(self.kind, arguments.block_size, arguments.draft_layers, mask, arguments.head_rank)
        self.config = block_config(target, options)
        self.method = read_block_config(self.kind, self.config, target, arguments.output)

    def unrolling(self) -> Unrolling:
        decay = math.exp(-1 / self.arguments.gamma)
        arguments = self.arguments
        return Unrolling(self.method.form.max_depth, decay, arguments.anchors, arguments.random_depths)

    def build(self, samples: Sequence[Sample], stops: Sequence[int]) -> tuple[TrainedDraft, DraftVocabulary]:
        head = build_block_head(self.target, self.method, self.objective, self.arguments.seed)
        return head, DraftVocabulary.whole(self.target)

    def save(self, head: TrainedDraft, vocabulary: DraftVocabulary, folder: Path) -> None:
        write_checkpoint(folder, self.config, dict(head.named_parameters()))

    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        return load_block_head(folder, self.kind, self.target)
