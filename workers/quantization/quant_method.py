"""`QuantMethod`: a checkpoint's quantization_config, for its linear layers and experts.
`aerie.workers.quantization.table` lists all; adding one: docs/add-a-quantisation.md."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod


class QuantMethod(ABC):
    """A plain value, equal on every rank; part of a model's configuration."""

    def fallback(self, device: torch.device) -> str | None:
        """Return a log message if weights are not multiplied as the checkpoint intends, else None."""
        return None

    def fitted(self, with_weight: Callable[[], frozenset[str]]) -> "QuantMethod":
        """Return the method of a checkpoint in which the modules `with_weight()` have a tensor `weight`, although
        quantization_config may not say so."""
        return self

    @abstractmethod
    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        """Return the method of the layer with the checkpoint's modules `names` ("model.layers.0.self_attn.q_proj",
        ...), one per part of `shape`. Some modules may be unquantised, for example the vocabulary head.

        Raises ValueError if they disagree, or if the shape cannot be stored.
        """

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        """Return the method of a layer's routed experts. names: names of the first expert's matrices
        ("model.layers.3.mlp.experts.0.gate_proj", ...).

        Raises ValueError if they are not supported.
        """
        raise ValueError(f"{names[0]}: experts quantised like this are not supported; use the checkpoint in bf16")


@dataclass(frozen=True)
class Unquantized(QuantMethod):
    """Every weight in bfloat16, float16 or float32."""

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        return UnquantizedLinearMethod(shape)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        return UnquantizedExperts(shape)


def all_or_none(names: Sequence[str], ignores: Callable[[str], bool]) -> bool:
    """Return whether all modules of a layer are unquantised. Raises ValueError if only some are."""
    left = [name for name in names if ignores(name)]
    if left and len(left) < len(names):
        raise ValueError(
            f"quantization_config: of {', '.join(names)}, which are multiplied together, only {', '.join(left)} "
            "are left unquantised; use the checkpoint in bf16"
        )
    return bool(left)


def list_of_names(quantization: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    """Return the modules that quantization_config lists under `key`; () without the key. Raises ValueError naming
    `source`."""
    names = quantization.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{source}: quantization_config.{key}={names!r}: must be a list of modules' names")
    return tuple(names)
