"""Scales of FP8 KV from the checkpoint: per layer, one for keys and one for values."""

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from aerie.kernels.kv.fp8 import FP8_MAX, KVScales
from aerie.workers.layers.weighted import WeightedModule, WeightKey, WrongTensorError

logger = logging.getLogger(__name__)


class KVScaleWeights(WeightedModule):
    """The tensors `k_scale` and `v_scale` of a layer's attention, stored as floats on the host, because kernels take
    them as arguments. 1 if the checkpoint has none. Unused unless KV is FP8.

    layer: index in the KV pool.
    missing: whether the checkpoint has none.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.values = {"k_scale": 1.0, "v_scale": 1.0}
        self.missing = True

    def weight_keys(self) -> Iterable[WeightKey]:
        return [WeightKey(kind) for kind in self.values]

    def load(self, key: WeightKey, full: Tensor) -> None:
        if full.numel() != 1:
            raise WrongTensorError(f"has shape {tuple(full.shape)}: KV in FP8 has one scale per layer")
        if not full.is_meta:
            value = float(full)
            if not 0 < value < math.inf:
                raise WrongTensorError(f"is {value}: a scale is a finite number above 0")
            self.values[key.kind] = value
        self.missing = False

    def fill_missing(self, key: WeightKey) -> bool:
        return True

    def check_values(self, key: WeightKey, full: Tensor) -> None:
        if float(full) != self.values[key.kind]:
            raise WrongTensorError(f"is {float(full):g}, and cached KV has the scale {self.values[key.kind]:g}")

    def fill_dummy(self, generator: torch.Generator) -> None:
        pass


def kv_scales(model: nn.Module) -> dict[int, KVScales]:
    """Return the KV scales by layer index in the KV pool."""
    return {each.layer: KVScales(each.values["k_scale"], each.values["v_scale"]) for each in _of(model)}


def warn_of_missing(model: nn.Module, name: str) -> None:
    """Log a warning if layers of the model have no scales. name: name of the model."""
    missing = [each.layer for each in _of(model) if each.missing]
    if missing:
        logger.warning(
            "%s: KV is kept in FP8, and the checkpoint has no k_scale and v_scale of %d layers: they get 1, and "
            "numbers beyond %g saturate",
            name,
            len(missing),
            FP8_MAX,
        )


def _of(model: nn.Module) -> list[KVScaleWeights]:
    return [module for module in model.modules() if isinstance(module, KVScaleWeights)]
