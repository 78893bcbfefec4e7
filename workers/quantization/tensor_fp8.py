"""FP8 weights with one scale per matrix: `quant_method: fp8` without blocks, `modelopt` FP8, and compressed-tensors'
`float-quantized` with strategy "tensor". Stored and multiplied as a scale per output (`channel_fp8`). Inputs are
rounded with a scale per token, also where the checkpoint has a scale per tensor for them: it is not needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workers.quantization.fp8_quant import Fp8Quant
from workers.quantization.fp8_weight import Fp8Scheme
from workers.quantization.module_lists import contains, is_listed, only
from workers.quantization.quant_method import QuantMethod, list_of_names

UNUSED = ("input_scale",)
TENSOR = Fp8Scheme("weight_scale", None, per_matrix=True, unused=UNUSED)
CHANNEL = Fp8Scheme("weight_scale", None, unused=UNUSED)
TOLD = "inputs are rounded to FP8 with a scale per token, not per tensor, which is more exact"


@dataclass(frozen=True)
class TensorFp8(Fp8Quant):
    """ignored: modules that are left in bf16, with all in them: components of names, or patterns with `*`.
    tells: the checkpoint means inputs to have a scale per tensor.
    """

    ignored: tuple[str, ...]
    tells: bool
    stored: Fp8Scheme = TENSOR

    @property
    def scheme(self) -> Fp8Scheme:
        return self.stored

    def ignores(self, name: str) -> bool:
        return any(contains(entry, name) or is_listed(entry, name) for entry in self.ignored)

    def fallback(self, device: torch.device) -> str | None:
        return super().fallback(device) or (TOLD if self.tells else None)


def read_tensor_fp8(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Read `quant_method: fp8` without weight_block_size. See `workers.quantization.table.QuantReader`."""
    only(quantization, source, "activation_scheme", "dynamic", "static")
    left = [list_of_names(quantization, key, source) for key in ("modules_to_not_convert", "ignored_layers")]
    return TensorFp8(("lm_head", *left[0], *left[1]), quantization.get("activation_scheme") == "static")


def read_modelopt_fp8(settings: Mapping[str, Any], source: str) -> QuantMethod | None:
    """Read modelopt's `quant_algo` of FP8; None for another."""
    algorithm = settings.get("quant_algo")
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return None
    left = [list_of_names(settings, key, source) for key in ("ignore", "exclude_modules")]
    is_tensor = algorithm == "FP8"
    return TensorFp8((*left[0], *left[1]), is_tensor, TENSOR if is_tensor else CHANNEL)
