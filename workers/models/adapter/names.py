"""Checkpoint names of a transformers model's tensors: its module paths, after transformers' renamings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from aerie.workers.models.adapter.matching import match_experts
from aerie.workers.models.config_fields import MAX_LAYERS
from aerie.workers.models.name_map import NameMap

OURS = "theirs."  # prefix of transformers' module paths in our model
_NUM_MODULES = ("num_nextn_predict_layers", "num_mtp_layers")  # fields with the number of MTP modules
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


def conversions(model: PreTrainedModel) -> list[Any]:
    """Return transformers' conversions from the checkpoint's tensors to the model's."""
    return list(get_model_conversion_mapping(model))


def renamings(found: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Return (pattern of a checkpoint name, replacement), in the order in which they are tried."""
    return tuple(
        (source, target)
        for each in found
        if isinstance(each, WeightRenaming)
        for source, target in zip(each.source_patterns, each.target_patterns, strict=True)
    )


def expert_names(found: Sequence[Any]) -> tuple[str, ...] | None:
    """Return the checkpoint's names of gate_proj, up_proj and down_proj of one expert; None if experts are stacked."""
    sources = {}
    for each in found:
        if isinstance(each, WeightConverter):
            for target in each.target_patterns:
                sources[target.rsplit(".", 1)[-1]] = each.source_patterns
    names = [*sources.get("gate_up_proj", ()), *sources.get("down_proj", ())]
    matches = (re.search(r"experts\.\*\.(\w+)\.weight", name) for name in names)
    parts = tuple(match[1] for match in matches if match)
    return parts if len(parts) == len(names) == len(_EXPERT_PARTS) else None


def stacked_experts_of(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return the modules of experts that `match_experts` matches: (path with a `NameMap`'s holes for numbers, number of
    experts)."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        if match_experts(module) is not None:
            words = (f"{{n{i}}}" if word.isdigit() else word for i, word in enumerate(path.split(".")))
            found[".".join(words)] = module.down_proj.shape[0]
    return tuple(found.items())


def part_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the prefixes of the names of all tensors of the decoder `model`. A model of images and text has other
    modules, whose tensors are ignored."""
    base = model.base_model_prefix
    inner = getattr(model, base)
    heads = (f"{name}." for name, _ in model.named_children() if name != base)
    return (*heads, *(f"{base}.{name}." for name, _ in inner.named_children()))


def unused_tensors(model: PreTrainedModel, config: PreTrainedConfig, num_layers: int) -> tuple[str, ...]:
    """Return patterns (`re.search`) of tensors in published checkpoints that the decoder lacks: transformers' own
    patterns, and MTP modules, which are stored as layers after the decoder's."""
    found = [*(model._keys_to_ignore_on_load_unexpected or ()), r"(^|\.)position_ids$"]
    number = next((vars(config)[name] for name in _NUM_MODULES if vars(config).get(name) is not None), 0)
    found += [rf"(^|\.)layers\.{num_layers + index}\." for index in range(min(int(number), MAX_LAYERS))]
    return tuple(sorted(found))


def prefixes_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the prefix of the decoder's base module, then those of its sibling modules. Checkpoints of the base alone
    (GPT-2's) have names without a prefix."""
    base = model.base_model_prefix
    return (f"{base}.", *(f"{name}." for name, _ in model.named_children() if name != base))


# Prefixes of a decoder's base in checkpoints of models of images and text; the first match is used.
_INNER = ("language_model.model.", "model.language_model.model.", "model.language_model.", "model.text_model.")
_INNER_HEADS = ("language_model.lm_head.", "model.language_model.lm_head.")


@dataclass(frozen=True)
class TransformersNames(NameMap):
    """See `NameMap`.

    renamed: see `renamings`.
    experts: see `expert_names`.
    parts: see `part_names`; empty for a text-only model, whose tensors are all loaded.
    unused: see `unused_tensors`. They apply only to tensors that the decoder does not have.
    prefixes: see `prefixes_of`.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    experts: tuple[str, ...] | None = None
    parts: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()

    def module_name(self, path: str, part: str = "", expert: int | None = None) -> str:
        name = path.removeprefix(OURS)
        if expert is not None:
            parts = self.experts or _EXPERT_PARTS  # for stacked experts, `packed` names them
            return f"{name}.{expert}.{parts[_EXPERT_PARTS.index(part)]}"
        return f"{name.rpartition('.')[0]}.{part}" if part else name

    def ignores(self, name: str) -> bool:
        is_other = bool(self.parts) and not name.startswith(self.parts)
        return super().ignores(name) or is_other or any(re.search(pattern, name) for pattern in self.unused)

    def canonical(self, name: str) -> str:
        if self.parts:
            name = self._alone(name)
        for pattern, new in self._patterns_renamed:
            name = pattern.sub(new, name)
        is_bare = bool(self.prefixes) and not self.parts and not name.startswith(self.prefixes)
        return f"{self.prefixes[0]}{name}" if is_bare else name

    def _alone(self, name: str) -> str:
        """Return the name that a tensor of the decoder has in a text-only model; other names as they are."""
        base = self.parts[-1].partition(".")[0]
        renamed = [(old, "lm_head.") for old in _INNER_HEADS] + [(old, f"{base}.") for old in _INNER]
        return next((new + name.removeprefix(old) for old, new in renamed if name.startswith(old)), name)

    @cached_property
    def _patterns_renamed(self) -> list[tuple[re.Pattern[str], str]]:
        return [(re.compile(pattern), new) for pattern, new in self.renamed]
