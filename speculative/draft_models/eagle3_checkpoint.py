"""The published layout of EAGLE-3's checkpoints: what the model that serves one (`speculative.draft_models.eagle3`) and
the model that trains one (`speculative.training.draft_model`) must agree on beside the names of their parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ARCHITECTURE = "LlamaForCausalLMEagle3"
MIN_TARGET_LAYERS = 7  # of fewer, the layers that are captured by default are not three


def default_capture(num_layers: int) -> tuple[int, int, int]:
    """The layers of a target whose input is captured where a checkpoint does not say (EAGLE-3's code)."""
    return 2, num_layers // 2, num_layers - 3


def layer_ids(capture: tuple[int, ...]) -> list[int]:
    """`eagle_aux_hidden_state_layer_ids` of config.json: ids name layers whose output is meant, which is the input of
    the next."""
    return [layer - 1 for layer in capture]


def captured_layers(path: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of a target of `num_layers` whose input a draft with this config.json reads. Raises ValueError."""
    given = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    given = given or raw.get("eagle_aux_hidden_state_layer_ids")
    capture = tuple(int(i) + 1 for i in given) if given else default_capture(num_layers)
    if len(capture) != 3 or len(set(capture)) != 3 or not all(0 <= i < num_layers for i in capture):
        raise ValueError(
            f"draft {path}: captures the input of layers {capture}, which the target of {num_layers} layers does "
            "not have three of; set eagle_config.eagle_aux_hidden_state_layer_ids in the draft's config"
        )
    return capture


def target_ids(offsets: Tensor) -> Tensor:
    """[draft vocabulary] int64: the target's id of each of a draft's, from its `d2t`."""
    return torch.arange(offsets.shape[0], device=offsets.device) + offsets.long()


def offsets(ids: Tensor) -> Tensor:
    """`d2t` of what `target_ids` returns."""
    return ids - torch.arange(ids.shape[0], device=ids.device)
