"""`QuantMethod`: what a checkpoint's quantization_config says of its linear layers and of its experts. Those that exist
are in `workers.quantization.table`, adding one: docs/add-a-model.md."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workers.layers.experts import ExpertsMethod, ExpertsShape, UnquantizedExperts
from workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod


class QuantMethod(ABC):
    """A plain value, equal on every rank; part of a model's configuration."""

    def fallback(self, device: torch.device) -> str | None:
        """What a start logs where weights are multiplied otherwise than the checkpoint means; None for nothing."""
        return None

    @abstractmethod
    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        """For the layer that holds the checkpoint's modules `names` ("model.layers.0.self_attn.q_proj", ...), one for
        each part of `shape`; some may be left as they were, for instance the vocabulary head. Raises ValueError if
        they do not agree, or if the shape cannot be held."""

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        """For the routed experts of a layer, all of which are kept alike; names: of the first one's matrices
        ("model.layers.3.mlp.experts.0.gate_proj", ...). Raises ValueError where there is no such thing."""
        raise ValueError(f"{names[0]}: experts quantised like this are not supported; use the checkpoint in bf16")


@dataclass(frozen=True)
class Unquantized(QuantMethod):
    """Every weight in bfloat16, float16 or float32."""

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        return UnquantizedLinearMethod(shape)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        return UnquantizedExperts(shape)


def all_or_none(names: Sequence[str], ignores: Callable[[str], bool]) -> bool:
    """Whether all the modules that a layer holds are left unquantised; raises ValueError if some are."""
    left = [name for name in names if ignores(name)]
    if left and len(left) < len(names):
        raise ValueError(
            f"quantization_config: of {', '.join(names)}, which are multiplied together, only {', '.join(left)} "
            "are left unquantised; use the checkpoint in bf16"
        )
    return bool(left)


def list_of_names(quantization: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    """The modules that quantization_config lists under `key`, () if it does not. Raises ValueError naming `source`."""
    names = quantization.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{source}: quantization_config.{key}={names!r}: must be a list of modules' names")
    return tuple(names)
