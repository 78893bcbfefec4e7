"""LoRA adapters in training: a target merged with one, and EAGLE-3 heads that follow it with an adapter of their own.
The engine serves both beside the base's pair (docs/lora.md)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from aerie.speculative.training import TrainingError
from aerie.speculative.training.draft import DraftKind, DraftVocabulary, TrainedDraft, make_readable
from aerie.speculative.training.eagle3 import load_draft
from aerie.speculative.training.samples import Sample
from aerie.workers.lora.adapter_config import CONFIG_FILE, MERGE, MODULE_PREFIX, WEIGHTS_FILE, read_adapter_config
from aerie.workers.lora.adapter_file import adapter_modules
from aerie.workers.lora.base_copies import is_copy

ALPHA = 2  # `lora_alpha` / rank of a head's adapter: the factor of B A x


def merge_adapter(target: PreTrainedModel, folder: Path) -> None:
    """Add an adapter to the target's weights, in place. Raises TrainingError for an adapter that cannot be served, or
    does not fit."""
    faults, vocabulary = list[str](), (target.get_input_embeddings(), target.get_output_embeddings())
    try:
        for name, matrices in adapter_modules(
            folder, read_adapter_config(folder), faults, partial(_copy_fault, target)
        ):
            module = target.get_submodule(name)
            weight: Tensor = module.weight.data
            change = (matrices.up.float() @ matrices.down.float()) * matrices.scale
            if isinstance(module, nn.Embedding):
                change = change.T
            if module in vocabulary and target.config.tie_word_embeddings:  # it changes one of the two
                module.weight = nn.Parameter(weight.clone(), requires_grad=False)
                weight = module.weight.data
            weight += change.to(weight)
    except (AttributeError, RuntimeError, ValueError) as error:
        raise TrainingError(f"adapter={folder}: does not fit the target: {error}") from None
    if faults:
        raise TrainingError(f"adapter={folder}: {faults[0]}")


def _copy_fault(target: PreTrainedModel, module: str, copy: Any) -> str:
    """Return the fault of an adapter's whole weight of a module; "" if it repeats the target's."""
    weight: Tensor = target.get_submodule(module).weight.data
    same = tuple(copy.get_shape()) == weight.shape and is_copy(copy[:].to(weight.device), weight)
    return "" if same else f"differs from the target's weight; {MERGE}"


class LoraLinear(nn.Module):
    """A linear layer that is not trained, and an adapter that is: y = W x + ALPHA B A x, where B is zero at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)
        nn.init.normal_(self.lora_A.weight, std=base.in_features**-0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [.., in_features]. Return [.., out_features]."""
        added: Tensor = self.lora_B(self.lora_A(x))
        out: Tensor = self.base(x)
        return out + ALPHA * added


def add_adapter(head: nn.Module, rank: int, seed: int) -> None:
    """Replace the head's linear layers except its vocabulary head by `LoraLinear`s, and freeze everything else."""
    torch.manual_seed(seed)
    head.requires_grad_(False)
    for name, module in list(head.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            owner, _, last = name.rpartition(".")
            setattr(head.get_submodule(owner), last, LoraLinear(module, rank))


def save_adapter(model: nn.Module, base: Path, folder: Path) -> None:
    """Write what `add_adapter` has added, as peft does. base: the model's own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors = {f"{MODULE_PREFIX}{name}": parameter.detach().cpu().contiguous() for name, parameter in matrices.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    rank = min(min(parameter.shape) for parameter in matrices.values())
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": ALPHA * rank,
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in matrices}),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    make_readable(folder)


class AdapterKind(DraftKind):
    """An adapter of a trained EAGLE-3 head, for a target merged with an adapter."""

    def __init__(self, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(arguments, target)
        if arguments.method != "eagle3":
            raise TrainingError(f"method={arguments.method}: adapters are trained for eagle3 heads only")
        if arguments.draft is None:
            raise TrainingError(
                "adapter: needs --draft, the folder of the EAGLE-3 head that the base model is served with"
            )
        self.refuse_head_options("eagle3 and --adapter")

    def build(self, samples: Sequence[Sample], stops: Sequence[int]) -> tuple[TrainedDraft, DraftVocabulary]:
        head, vocabulary = load_draft(self.arguments.draft, self.target)
        add_adapter(head, self.arguments.lora_rank, self.arguments.seed)
        return head, vocabulary

    def save(self, head: TrainedDraft, vocabulary: DraftVocabulary, folder: Path) -> None:
        save_adapter(head, self.arguments.draft, folder)

    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        head, vocabulary = self.build([], [])
        matrices = load_file(folder / WEIGHTS_FILE)
        names = {name.removeprefix(MODULE_PREFIX): tensor.float() for name, tensor in matrices.items()}
        head.load_state_dict(names, strict=False)
        return head.to(self.target.device), vocabulary
