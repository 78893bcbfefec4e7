"""Names and structure of a transformers model's modules, for `aerie.workers.models.adapter.config`: the tensors' names
in the checkpoint, linear layers with one input (which can be merged into one product), and checks that raise
UnservableError for models that are not supported."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from aerie.workers.models.adapter.matching import match_experts
from aerie.workers.models.adapter.survey import AttentionCall, UnservableError, is_plain_embedding
from aerie.workers.models.config_fields import MAX_LAYERS
from aerie.workers.models.name_map import NameMap

OURS = "theirs."  # prefix of transformers' module paths in our model
_NUM_MODULES = ("num_nextn_predict_layers", "num_mtp_layers")  # fields with the number of MTP modules
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


def conversions(model: PreTrainedModel) -> list[Any]:
    """Return transformers' conversions from the checkpoint's tensors to the model's."""
    return list(get_model_conversion_mapping(model))


def renamings(conversions: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Return (pattern of a checkpoint name, replacement), in the order in which they are tried."""
    return tuple(
        (source, target)
        for conversion in conversions
        if isinstance(conversion, WeightRenaming)
        for source, target in zip(conversion.source_patterns, conversion.target_patterns, strict=True)
    )


def expert_names(conversions: Sequence[Any]) -> tuple[str, ...] | None:
    """Return the checkpoint's names of gate_proj, up_proj and down_proj of one expert; None if experts are stacked."""
    sources = {}
    for conversion in conversions:
        if isinstance(conversion, WeightConverter):
            for target in conversion.target_patterns:
                sources[target.rsplit(".", 1)[-1]] = conversion.source_patterns
    names = [*sources.get("gate_up_proj", ()), *sources.get("down_proj", ())]
    matches = (re.search(r"experts\.\*\.(\w+)\.weight", name) for name in names)
    parts = tuple(match[1] for match in matches if match)
    return parts if len(parts) == len(names) == len(_EXPERT_PARTS) else None


def stacked_experts_of(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return the modules of experts that `match_experts` matches: (path with a `NameMap`'s holes for numbers, number of
    experts)."""
    stacked: dict[str, int] = {}
    for path, module in model.named_modules():
        if match_experts(module) is not None:
            words = (f"{{n{i}}}" if word.isdigit() else word for i, word in enumerate(path.split(".")))
            stacked[".".join(words)] = module.down_proj.shape[0]
    return tuple(stacked.items())


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
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"(^|\.)position_ids$"]
    number = next((vars(config)[name] for name in _NUM_MODULES if vars(config).get(name) is not None), 0)
    patterns += [rf"(^|\.)layers\.{num_layers + index}\." for index in range(min(int(number), MAX_LAYERS))]
    return tuple(sorted(patterns))


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


Group = tuple[str, ...]  # paths of linear layers, in the order of their calls


@dataclass(frozen=True)
class LinearCall:
    """One call of a linear layer. version: number of in-place changes of `x` before the call."""

    path: str
    x: Tensor
    version: int
    has_bias: bool


def record_linear_calls(model: nn.Module) -> list[LinearCall]:
    """Return a list to which the model's next pass adds its calls of linear layers, in order."""
    calls: list[LinearCall] = []

    def record(path: str, module: nn.Linear) -> None:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if inputs:  # transformers' models pass the input by position
                calls.append(LinearCall(path, inputs[0], inputs[0]._version, module.bias is not None))

        module.register_forward_pre_hook(hook)

    for path, module in model.named_modules():
        if type(module) is nn.Linear:
            record(path, module)
    return calls


def groups_of(calls: list[LinearCall]) -> tuple[Group, ...]:
    """Return the groups of layers of one module with the same input, either all with a bias or all without. Layers that
    are called several times in a pass are in no group."""
    counts = Counter(call.path for call in calls)
    groups: dict[tuple[str, int, int, bool], list[str]] = {}
    for call in calls:  # the calls keep their inputs alive, so that ids are unique
        if counts[call.path] == 1:
            parent = call.path.rpartition(".")[0]
            groups.setdefault((parent, id(call.x), call.version, call.has_bias), []).append(call.path)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


_LAYER_KINDS = {"full_attention", "sliding_attention"}
_FROM_PADDING = "create_position_ids_from_input_ids"  # method of embeddings that count positions from padding (RoBERTa)


def check_class(config: PreTrainedConfig) -> None:
    """Check a model's class and kinds of layers, without building it."""
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if made is None:
        raise UnservableError(
            f"has a decoder of model_type={config.model_type!r}, of which transformers has no causal language model"
        )
    if made._is_stateful:
        raise UnservableError(f"is a {made.__name__}, which keeps a state that only its own family could serve")
    if not made._supports_attention_backend:
        raise UnservableError(f"is a {made.__name__}, whose attention transformers does not let others replace")
    layers, shared = (getattr(config, name, None) or 0 for name in ("num_hidden_layers", "num_kv_shared_layers"))
    if 0 < layers <= shared:
        raise UnservableError("is a draft whose layers all read the KV of another model")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_KINDS
    if kinds:
        raise UnservableError(f"has layers of {', '.join(sorted(kinds))}, which only a family of its own could serve")


def check_model(model: PreTrainedModel, expert_names: tuple[str, ...] | None) -> None:
    """Refuse modules that Aerie's layers would compute differently, and tensors that a checkpoint does not have.

    expert_names: see `aerie.workers.models.adapter.names.expert_names`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not is_plain_embedding(embedding):
        raise UnservableError(f"has an embedding of its own ({type(embedding).__name__})")
    for path, module in model.named_modules():
        stacked = "down_proj" in module._parameters and module._parameters["down_proj"].dim() == 3
        if expert_names is not None and stacked and match_experts(module) is None:
            raise UnservableError(f"has experts ({path}) with an activation or gate that Aerie has no operation for")
        if hasattr(module, _FROM_PADDING):
            raise UnservableError(f"counts positions ({path}) from its padding token, as no decoder of Aerie does")
    _check_ties(model, {id(part.weight) for part in (embedding, head) if part is not None})


def _check_ties(model: nn.Module, allowed: set[int]) -> None:
    """Refuse parameters with two names, because a checkpoint has only one of them. allowed: ids of parameters that may
    have two."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and id(parameter) not in allowed:
            raise UnservableError(f"has one tensor as {other} and as {name}, which the adapter cannot load")


def check_layers(config: PreTrainedConfig, calls: tuple[AttentionCall, ...]) -> None:
    """Refuse layers without attention."""
    layers = getattr(config, "num_hidden_layers", len(calls))
    if layers != len(calls):
        raise UnservableError(f"has {layers} layers, of which {len(calls)} have attention that could be served")
