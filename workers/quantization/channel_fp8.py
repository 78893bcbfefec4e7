"""FP8 weights with a scale per output, and inputs quantised per token, as compressed-tensors writes them: `FP8-dynamic`
checkpoints (`quant_method: compressed-tensors`)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workers.quantization.fp8_quant import Fp8Quant
from workers.quantization.fp8_weight import Fp8Scheme
from workers.quantization.quant_method import QuantMethod, list_of_names
from workers.quantization.tensor_fp8 import CHANNEL, TENSOR, TOLD

# Values that quantization_config may have for a group's tensors.
_WEIGHTS = {"num_bits": (8,), "type": ("float",), "strategy": ("channel", "tensor"), "symmetric": (True,)}
_INPUTS = {"num_bits": (8,), "type": ("float",), "strategy": ("token", "tensor"), "symmetric": (True,)}
_REMEDY = "only FP8 with scales of channels or tensors and rounded inputs is; use the checkpoint in bf16"


@dataclass(frozen=True)
class ChannelFp8(Fp8Quant):
    """ignored: modules that are left in bf16; an entry "re:..." is a regular expression.
    tells: the checkpoint means inputs to have a scale per tensor.
    """

    ignored: tuple[str, ...]
    stored: Fp8Scheme = CHANNEL
    tells: bool = False

    @property
    def scheme(self) -> Fp8Scheme:
        return self.stored

    def fallback(self, device: torch.device) -> str | None:
        return super().fallback(device) or (TOLD if self.tells else None)

    def ignores(self, name: str) -> bool:
        return any(
            re.match(entry[3:], name) is not None if entry.startswith("re:") else entry == name
            for entry in self.ignored
        )


def read_channel_fp8(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """See `workers.quantization.table.QuantReader`."""
    given_groups = quantization.get("config_groups")
    groups = list(given_groups.values()) if isinstance(given_groups, dict) else []
    if len(groups) != 1 or not isinstance(groups[0], dict) or groups[0].get("targets") != ["Linear"]:
        raise ValueError(f"{source}: quantization_config.config_groups: must be one group of all Linear; {_REMEDY}")
    for name, wanted in (("weights", _WEIGHTS), ("input_activations", _INPUTS)):
        given = groups[0].get(name)
        given = given if isinstance(given, dict) else {}
        for key, supported in wanted.items():
            if given.get(key) not in supported:
                raise ValueError(
                    f"{source}: quantization_config: {name}.{key}={given.get(key)!r} is not supported; {_REMEDY}"
                )
    scheme = TENSOR if groups[0]["weights"]["strategy"] == "tensor" else CHANNEL
    tells = groups[0]["input_activations"]["strategy"] == "tensor"
    return ChannelFp8(list_of_names(quantization, "ignore", source), scheme, tells)
