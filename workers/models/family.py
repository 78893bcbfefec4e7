"""`ModelFamily`: what a file of this folder says of the architectures that it serves."""

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
    """read_config: from a config.json and what it is of (for errors); raises ValueError for what would be ignored.
    model: makes this rank's module: (config, ranks, rows of its rotary table, device of that, layers to capture).
    weight_names: what the checkpoint calls its tensors.
    serves: whether a config.json of its architectures is for this family; the others are left to the adapter.
    """

    read_config: Callable[[dict[str, Any], str], ConfigT]
    model: Callable[[ConfigT, TPGroup, int, torch.device, tuple[int, ...]], TargetModel]
    weight_names: Callable[[ConfigT], NameMap]
    serves: Callable[[Mapping[str, Any]], bool] = _all
