"""Layout and weight names of EAGLE-3 checkpoints, shared by serving (`aerie.speculative.drafts.eagle3`) and training
(`aerie.speculative.training.eagle3`)."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from aerie.speculative.drafts.layers import IGNORED_WEIGHTS, layer_names, same_names
from aerie.workers.models.config_fields import ids_of, section_of, size_of
from aerie.workers.models.name_map import NameMap

ARCHITECTURE = "LlamaForCausalLMEagle3"
MIN_TARGET_LAYERS = 7  # with fewer layers, `default_capture` repeats one

_NUMBERED_LAYER = re.compile(r"(?:layers|midlayer)\.(\d+)\.")
_ADDITIONAL_LAYER = re.compile(r"additional_layers\.(\d+)\.")
_AUX_NORMS = ("aux_norm_low.", "aux_norm_mid.", "aux_norm_high.")  # former names of fc_norm


def default_capture(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's default for the target's layers whose input is captured."""
    return 2, num_layers // 2, num_layers - 3


def layer_ids(capture: tuple[int, ...]) -> list[int]:
    """Return `eagle_aux_hidden_state_layer_ids` of config.json for `capture`. An id names the layer before, whose
    output is the captured layer's input."""
    return [layer - 1 for layer in capture]


def captured_layers(path: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose input a draft reads; `num_layers` stands for the last layer's output. Raises
    ValueError if the target does not have them.

    Checkpoints name layers by their output or, like `speculators` and some others, by their input. No draft reads the
    output of layer 0, so ids that start with 1 name outputs, and others inputs. (SGLang decides in the same way since
    pull request 25454.)
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
    """Map checkpoint names to parameters.

    The first layer is `midlayer` (SafeAILab, SpecForge), `layers.0` (speculators, vLLM, newer SGLang) or `midlayer.0`
    (TensorRT-LLM). Others are named likewise, or `additional_layers` (older SGLang). The norm before their attention is
    `input_layernorm` or `hidden_norm`.
    """
    rules = same_names("input_norm", "fc_norm.{i}") | layer_names("midlayer") | layer_names("layers.{layer}")
    aliases = [("model.", ""), ("layers.0.", "midlayer."), ("midlayer.0.", "midlayer.")]
    for i in range(1, num_layers):
        aliases += [(f"midlayer.{i}.", f"layers.{i}."), (f"additional_layers.{i - 1}.", f"layers.{i}.")]
        aliases += [(f"layers.{i}.hidden_norm.", f"layers.{i}.input_layernorm.")]
    aliases += [(name, f"fc_norm.{i}.") for i, name in enumerate(_AUX_NORMS)] + [("draft_id_to_target_id", "d2t")]
    return NameMap(rules, tuple(aliases), (*IGNORED_WEIGHTS, "verifier_lm_head.*"))


def count_layers(names: Iterable[str]) -> int:
    """Return the number of layers that the tensors of these names belong to."""
    names = [name.removeprefix("model.") for name in names]
    first = {0} if any(name.startswith(("midlayer.", "layers.")) for name in names) else set()
    numbered = {int(match[1]) for match in map(_NUMBERED_LAYER.match, names) if match}
    additional = {int(match[1]) + 1 for match in map(_ADDITIONAL_LAYER.match, names) if match}
    return len(first | numbered | additional)


def target_ids(offsets: Tensor) -> Tensor:
    """Return the target's token id of each draft id, [draft vocabulary] int64, from `d2t`."""
    return torch.arange(offsets.shape[0], device=offsets.device) + offsets.long()


def offsets(ids: Tensor) -> Tensor:
    """Return `d2t` for the result of `target_ids`."""
    return ids - torch.arange(ids.shape[0], device=ids.device)
