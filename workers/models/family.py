"""`ModelFamily`: what a file of this folder declares about the architectures that it serves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from workers.distributed.tp_group import TPGroup
from workers.models.config import ModelConfig
from workers.models.decoder import TargetModel
from workers.models.name_map import NameMap

ConfigT = TypeVar("ConfigT", bound=ModelConfig)


def _all(config: Mapping[str, Any]) -> bool:
    return True


@dataclass(frozen=True)
class ModelFamily(Generic[ConfigT]):
    """The functions by which a model family is served.

    read_config: (config.json, name of the checkpoint for errors) -> configuration. Raises ValueError for unsupported
        settings.
    model: (configuration, ranks, rows of the rotary table, its device, layers to capture) -> this rank's module.
    weight_names: the checkpoint's names of the model's tensors.
    serves: whether this family serves a config.json of its architectures; the adapter gets the others.
    """

    read_config: Callable[[dict[str, Any], str], ConfigT]
    model: Callable[[ConfigT, TPGroup, int, torch.device, tuple[int, ...]], TargetModel]
    weight_names: Callable[[ConfigT], NameMap]
    serves: Callable[[Mapping[str, Any]], bool] = _all
