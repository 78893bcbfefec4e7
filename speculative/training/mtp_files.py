"""Loads the MTP module of a checkpoint, trains it further with `aerie train-draft --method mtp`, and saves it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculative.drafts import mtp_deepseek, mtp_qwen
from speculative.drafts.config import draft_architecture
from speculative.drafts.mtp import Mtp
from speculative.training import TrainingError, deepseek_layers, hybrid_layers
from speculative.training.draft import DraftKind, DraftVocabulary, TrainedDraft
from speculative.training.eagle3_files import write_checkpoint
from speculative.training.mtp_head import MtpHead
from workers.models.registry import family_of
from workers.models.weights import checkpoint_tensors

# Name suffixes of tensors that stay in float32: router biases, and the decay of recurrent layers.
FLOAT32 = ("bias", "A_log")


@dataclass(frozen=True)
class _Family:
    """method: reads config.json. head: builds the module. tensors: returns a module's tensors by their published
    names."""

    method: type[Mtp]
    architectures: tuple[str, ...]
    head: Callable[[Any], MtpHead]
    tensors: Callable[[MtpHead], dict[str, Tensor]]


_FAMILIES = (
    _Family(
        mtp_deepseek.DeepseekMtp,
        mtp_deepseek.ARCHITECTURES,
        deepseek_layers.mtp_head,
        deepseek_layers.module_tensors,
    ),
    _Family(mtp_qwen.QwenMtp, mtp_qwen.ARCHITECTURES, hybrid_layers.mtp_head, hybrid_layers.module_tensors),
)


def module_tensors(head: MtpHead) -> dict[str, Tensor]:
    """Return the module's tensors by their published names."""
    family = next(each for each in _FAMILIES if isinstance(head.method, each.method))
    return family.tensors(head)


def read_module(folder: Path) -> MtpHead:
    """Return the module of a checkpoint, in float32 on the CPU. Raises `TrainingError` if it has none that can be
    trained."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = next((each for each in _FAMILIES if draft_architecture(raw) in each.architectures), None)
    if family is None:
        known = ", ".join(name for each in _FAMILIES for name in each.architectures)
        raise TrainingError(
            f"target={folder}: architectures={raw.get('architectures')} has no MTP module; only {known} "
            "have; train a head with --method eagle3"
        )
    try:
        source = f"target {folder}"
        target = family_of(raw["architectures"][0], source).read_config(raw, source)
        method = family.method.read(str(folder), raw, target)
        head = family.head(method)
        wanted = family.tensors(head)
        tensors = {name: tensor for name, tensor, _ in checkpoint_tensors(folder)}
        for packed in method.weight_names.packed:
            for name in tensors.keys() - wanted.keys():
                tensors.update(packed.pieces(name, tensors[name]) or ())
    except ValueError as error:
        raise TrainingError(str(error)) from None
    if any(f"{name}_scale_inv" in tensors or tensors[name].itemsize < 2 for name in wanted.keys() & tensors.keys()):
        raise TrainingError(f"target={folder}: its module is quantised, which cannot be trained; give one in bfloat16")
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name not in tensors:
                raise TrainingError(f"target={folder}: lacks {name}; download it again")
            tensor.copy_(tensors[name])
    return head


def save_module(head: MtpHead, folder: Path) -> None:
    """Write the module alone, with its target's config.json, in the layout that `speculative.path` accepts."""
    raw = json.loads((Path(head.method.path) / "config.json").read_text(encoding="utf-8"))
    write_checkpoint(folder, raw, module_tensors(head), FLOAT32)


class MtpKind(DraftKind):
    """The target's own MTP module, trained further."""

    def __init__(self, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(arguments, target)
        self.refuse_head_options("mtp")
        self.loaded = self.load(arguments.target)

    def build(self, samples: Sequence[Any], stops: Sequence[int]) -> tuple[TrainedDraft, DraftVocabulary]:
        return self.loaded

    def save(self, head: TrainedDraft, vocabulary: DraftVocabulary, folder: Path) -> None:
        assert isinstance(head, MtpHead)
        save_module(head, folder)

    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        head = read_module(folder)
        head.use_head(self.target.get_output_embeddings())
        return head.to(self.target.device), DraftVocabulary.whole(self.target)
