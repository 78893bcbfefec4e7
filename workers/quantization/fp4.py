"""Checkpoints of 4-bit floats: MXFP4 and NVFP4. Weights stay in 4 bits; activations stay in the model's dtype, even if
the checkpoint would quantise them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod
from workers.quantization.fp4_scheme import Fp4Scheme
from workers.quantization.fp8_quant import read_modelopt_fp8
from workers.quantization.module_lists import is_listed
from workers.quantization.packed_experts import PackedExperts
from workers.quantization.packed_linear import PackedLinear
from workers.quantization.quant_method import QuantMethod, all_or_none, list_of_names

GPT_OSS_MXFP4 = Fp4Scheme("blocks", "scales", 32)  # openai/gpt-oss
CT_MXFP4 = Fp4Scheme("weight_packed", "weight_scale", 32, unused=("input_global_scale",))
CT_NVFP4 = Fp4Scheme(
    "weight_packed", "weight_scale", 16, "weight_global_scale", divides=True, unused=("input_global_scale",)
)
MODELOPT_NVFP4 = Fp4Scheme("weight", "weight_scale", 16, "weight_scale_2", unused=("input_scale",))


@dataclass(frozen=True)
class Fp4Quant(QuantMethod):
    """ignored: modules that keep the model's dtype, including their submodules: names, patterns with `*`, or "re:"
        and a regular expression.
    only_experts: whether only experts are quantised.
    rounds_inputs: whether the checkpoint intends 4-bit activations.
    """

    scheme: Fp4Scheme
    ignored: tuple[str, ...]
    only_experts: bool = False
    rounds_inputs: bool = False

    def fallback(self, device: torch.device) -> str | None:
        if not self.rounds_inputs:
            return None
        return "activations stay in the model's type (weights alone have 4 bits here), which is more exact"

    def ignores(self, name: str) -> bool:
        return any(is_listed(entry, name) for entry in self.ignored)

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        if self.only_experts or all_or_none(names, self.ignores):
            return UnquantizedLinearMethod(shape)
        return PackedLinear(shape, self.scheme)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        if all_or_none(names, self.ignores):
            return UnquantizedExperts(shape)
        return PackedExperts(shape, self.scheme)


def read_mxfp4(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Read `quant_method: mxfp4`, as in gpt-oss: only experts are quantised. See
    `workers.quantization.table.QuantReader`."""
    return Fp4Quant(GPT_OSS_MXFP4, list_of_names(quantization, "modules_to_not_convert", source), only_experts=True)


def read_modelopt(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Read `quant_method: modelopt`. See `workers.quantization.table.QuantReader`."""
    inner = quantization.get("quantization")
    settings = inner if isinstance(inner, dict) else quantization
    algorithm = settings.get("quant_algo")
    in_fp8 = read_modelopt_fp8(settings, source)
    if in_fp8 is not None:
        return in_fp8
    if algorithm != "NVFP4":
        raise ValueError(
            f"{source}: quantization_config.quant_algo={algorithm!r} is not supported; only 'NVFP4', 'FP8' and "
            "'FP8_PER_CHANNEL_PER_TOKEN' are; use the checkpoint in bf16"
        )
    size = settings.get("group_size") or 16
    if size != 16:
        raise ValueError(f"{source}: quantization_config.group_size={size!r} is not supported; NVFP4 has 16")
    left = [list_of_names(settings, key, source) for key in ("ignore", "exclude_modules")]
    return Fp4Quant(MODELOPT_NVFP4, (*left[0], *left[1]), rounds_inputs=True)


def read_compressed_fp4(quantization: Mapping[str, Any], source: str) -> QuantMethod | None:
    """Read `quant_method: compressed-tensors` with 4-bit float weights; None for other weights."""
    given = quantization.get("config_groups")
    groups = [group for group in given.values() if isinstance(group, dict)] if isinstance(given, dict) else []
    weights = [group.get("weights") or {} for group in groups]
    if not any(each.get("type") == "float" and each.get("num_bits") == 4 for each in weights):
        return None
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise ValueError(
            f"{source}: quantization_config.config_groups: 4-bit floats must be one group of all Linear; "
            "use the checkpoint in bf16"
        )
    size = weights[0].get("group_size")
    schemes = {16: CT_NVFP4, 32: CT_MXFP4}
    if size not in schemes:
        raise ValueError(
            f"{source}: quantization_config: weights.group_size={size!r} is not supported for 4-bit floats; "
            "only 16 (NVFP4) and 32 (MXFP4) are; use the checkpoint in bf16"
        )
    if not weights[0].get("symmetric", True):
        raise ValueError(f"{source}: quantization_config: weights.symmetric=false is not supported for 4-bit floats")
    rounds = groups[0].get("input_activations") is not None
    return Fp4Quant(schemes[size], list_of_names(quantization, "ignore", source), rounds_inputs=rounds)
