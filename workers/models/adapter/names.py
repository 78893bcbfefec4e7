"""Checkpoint names of a transformers model's tensors: its module paths, after transformers' renamings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from workers.models.name_map import NameMap

OURS = "theirs."  # prefix of a transformers module path in ours
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


@dataclass(frozen=True)
class TransformersNames(NameMap):
    """renamed: see `renamings`. experts: see `expert_names`."""

    renamed: tuple[tuple[str, str], ...] = ()
    experts: tuple[str, ...] | None = None

    def module_name(self, path: str, part: str = "", expert: int | None = None) -> str:
        name = path.removeprefix(OURS)
        if expert is not None:
            assert self.experts is not None, "experts are ours where each has matrices of its own"
            return f"{name}.{expert}.{self.experts[_EXPERT_PARTS.index(part)]}"
        return f"{name.rpartition('.')[0]}.{part}" if part else name

    def canonical(self, name: str) -> str:
        for pattern, new in self._patterns_renamed:
            name = pattern.sub(new, name)
        return name

    @cached_property
    def _patterns_renamed(self) -> list[tuple[re.Pattern[str], str]]:
        return [(re.compile(pattern), new) for pattern, new in self.renamed]
