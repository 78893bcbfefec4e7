"""`QuantMethod`: what a checkpoint's quantization_config says of its linear layers, and the table of those we know.

Adding one is a file beside this one (the method, its `LinearMethod`) and a row in `QUANT_METHODS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.layers.experts import ExpertsMethod, ExpertsShape, UnquantizedExperts
from workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod


class QuantMethod(ABC):
    """A plain value, equal on every rank; part of a model's configuration."""

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


# From quantization_config and what it is of, for errors.
QuantReader = Callable[[Mapping[str, Any], str], QuantMethod]

# By quantization_config.quant_method; a row imports its reader when it is asked for.
QUANT_METHODS: dict[str, Callable[[], QuantReader]] = {}


def read_quant_method(config: Mapping[str, Any], source: str) -> QuantMethod:
    """Of a config.json; `source` names it in errors. Raises ValueError that lists what exists for any other."""
    quantization = config.get("quantization_config")
    if not quantization:
        return Unquantized()
    name = quantization.get("quant_method")
    if name not in QUANT_METHODS:
        known = ", ".join(sorted(QUANT_METHODS)) or "none yet"
        raise ValueError(
            f"{source}: quantization_config.quant_method={name!r} is not supported; supported: {known}; "
            "use the checkpoint in bf16 or fp16"
        )
    return QUANT_METHODS[name]()(quantization, source)
