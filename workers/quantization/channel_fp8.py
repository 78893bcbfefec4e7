"""FP8 weights with a scale per output, and inputs quantised per token, as compressed-tensors writes them: `FP8-dynamic`
checkpoints (`quant_method: compressed-tensors`)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.quantization.fp8_quant import Fp8Quant
from workers.quantization.fp8_weight import Fp8Scheme
from workers.quantization.quant_method import QuantMethod, list_of_names

_SCHEME = Fp8Scheme("weight_scale", None)
# What quantization_config must say of a group's tensors.
_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_REMEDY = "only FP8 with scales of channels and dynamic scales of tokens is; use the checkpoint in bf16"


@dataclass(frozen=True)
class ChannelFp8(Fp8Quant):
    """ignored: modules that are left in bf16; an entry "re:..." is a regular expression."""

    ignored: tuple[str, ...]

    @property
    def scheme(self) -> Fp8Scheme:
        return _SCHEME

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
        for key, only in wanted.items():
            if given.get(key) != only:
                raise ValueError(
                    f"{source}: quantization_config: {name}.{key}={given.get(key)!r} is not supported; {_REMEDY}"
                )
    return ChannelFp8(list_of_names(quantization, "ignore", source))
