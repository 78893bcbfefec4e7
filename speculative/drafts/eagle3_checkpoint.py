"""The published layout of EAGLE-3's checkpoints: what the model that serves one (`speculative.drafts.eagle3`) and
the model that trains one (`speculative.training.eagle3`) must agree on beside the names of their parameters."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from speculative.drafts.layers import IGNORED_WEIGHTS, deeper_layer_names, layer_names
from workers.models.config_fields import ids_of, section_of, size_of
from workers.models.name_map import NameMap

ARCHITECTURE = "LlamaForCausalLMEagle3"
MIN_TARGET_LAYERS = 7  # of fewer, the layers that are captured by default are not three

_NUMBERED_LAYER = re.compile(r"(?:layers|midlayer)\.(\d+)\.")
_ADDITIONAL_LAYER = re.compile(r"additional_layers\.(\d+)\.")
_AUX_NORMS = ("aux_norm_low.", "aux_norm_mid.", "aux_norm_high.")  # what fc_norm was called before


def default_capture(num_layers: int) -> tuple[int, int, int]:
    """The layers of a target whose input is captured where a checkpoint does not say (EAGLE-3's code)."""
    return 2, num_layers // 2, num_layers - 3


def layer_ids(capture: tuple[int, ...]) -> list[int]:
    """`eagle_aux_hidden_state_layer_ids` of config.json: ids name layers whose output is meant, which is the input of
    the next."""
    return [layer - 1 for layer in capture]


def captured_layers(path: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of a target of `num_layers` whose input a draft with this config.json reads; `num_layers` is what
    leaves the last one. Raises ValueError.

    Checkpoints name layers in two ways: by those whose output is meant, and (all of `speculators`, some others) by
    those whose input is. The first layer's output is the lowest that anyone reads, so that ids that begin with 1 are
    of outputs, and others of inputs (SGLang tells them apart so since its pull request 25454).
    """
    source, key = f"draft {path}", "eagle_aux_hidden_state_layer_ids"
    given = ids_of(section_of(raw, "eagle_config", source), key, source) or ids_of(raw, key, source)
    if given:
        of_outputs = given[0] == 1 and "transformer_layer_config" not in raw
        capture = tuple(i + of_outputs for i in given)
    else:
        capture = default_capture(num_layers)
    count = size_of(raw, "num_aux_hidden_states", source, len(capture))
    if len(capture) != count or len(set(capture)) != count or not all(0 <= i <= num_layers for i in capture):
        raise ValueError(
            f"draft {path}: captures the input of layers {capture}, which the target of {num_layers} layers does "
            f"not have {count} of; set eagle_config.eagle_aux_hidden_state_layer_ids in the draft's config, or use the "
            "head that was trained for this target"
        )
    return capture


def weight_names(num_layers: int) -> NameMap:
    """What checkpoints call the tensors: the first layer `midlayer` (SafeAILab, SpecForge), `layers.0` (speculators,
    vLLM, newer SGLang) or `midlayer.0` (TensorRT-LLM), the others likewise or `additional_layers` (older SGLang), and
    the norm before their attention `input_layernorm` or `hidden_norm`."""
    rules = layer_names("midlayer") | deeper_layer_names() | {"input_norm": "input_norm", "fc_norm.{i}": "fc_norm.{i}"}
    aliases = [("model.", ""), ("layers.0.", "midlayer."), ("midlayer.0.", "midlayer.")]
    for i in range(1, num_layers):
        aliases += [(f"midlayer.{i}.", f"layers.{i}."), (f"additional_layers.{i - 1}.", f"layers.{i}.")]
        aliases += [(f"layers.{i}.hidden_norm.", f"layers.{i}.input_layernorm.")]
    aliases += [(name, f"fc_norm.{i}.") for i, name in enumerate(_AUX_NORMS)] + [("draft_id_to_target_id", "d2t")]
    return NameMap(rules, tuple(aliases), (*IGNORED_WEIGHTS, "verifier_lm_head.*"))


def count_layers(names: Iterable[str]) -> int:
    """Layers that tensors of these names belong to; 0 if there are none."""
    names = [name.removeprefix("model.") for name in names]
    first = {0} if any(name.startswith(("midlayer.", "layers.")) for name in names) else set()
    numbered = {int(match[1]) for match in map(_NUMBERED_LAYER.match, names) if match}
    additional = {int(match[1]) + 1 for match in map(_ADDITIONAL_LAYER.match, names) if match}
    return len(first | numbered | additional)


def target_ids(offsets: Tensor) -> Tensor:
    """[draft vocabulary] int64: the target's id of each of a draft's, from its `d2t`."""
    return torch.arange(offsets.shape[0], device=offsets.device) + offsets.long()


def offsets(ids: Tensor) -> Tensor:
    """`d2t` of what `target_ids` returns."""
    return ids - torch.arange(ids.shape[0], device=ids.device)
