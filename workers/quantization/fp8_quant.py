"""FP8 checkpoints, with a scale per block of rows and columns (DeepSeek-V3, Qwen; arXiv 2412.19437, section 3.3), per
output, or per matrix (treated as one per output). Inputs are quantised with a scale per group or token, even if the
checkpoint has a scale per tensor for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod
from workers.quantization.fp8_experts import Fp8Experts
from workers.quantization.fp8_linear import Fp8Linear
from workers.quantization.fp8_weight import Block, Fp8Scheme, fp8_fallback
from workers.quantization.module_lists import contains, is_listed, matches, only
from workers.quantization.quant_method import QuantMethod, all_or_none, list_of_names

UNUSED = ("input_scale",)
TENSOR = Fp8Scheme("weight_scale", None, per_matrix=True, unused=UNUSED)
CHANNEL = Fp8Scheme("weight_scale", None, unused=UNUSED)
PER_TOKEN = "inputs are rounded to FP8 with a scale per token, not per tensor, which is more exact"
_UNQUANTISED = ("lm_head", "eh_proj", "shared_head.head")  # not listed in published checkpoints with blocks
# Values that compressed-tensors' quantization_config may have for a group's tensors.
_WEIGHTS = {"num_bits": (8,), "type": ("float",), "strategy": ("channel", "tensor"), "symmetric": (True,)}
_INPUTS = {"num_bits": (8,), "type": ("float",), "strategy": ("token", "tensor"), "symmetric": (True,)}
_REMEDY = "only FP8 with scales of channels or tensors and rounded inputs is; use the checkpoint in bf16"


@dataclass(frozen=True)
class Fp8Quant(QuantMethod):
    """Every linear layer is FP8, except those that the checkpoint names.

    scheme: the layout of scales.
    ignored: modules that stay in bf16, including their submodules: components of names, or patterns with `*`.
    whole_names: whether entries of `ignored` are whole names, or "re:" and a regular expression (compressed-tensors).
    per_tensor_inputs: whether the checkpoint intends a scale per tensor for inputs.
    """

    scheme: Fp8Scheme
    ignored: tuple[str, ...] = ()
    whole_names: bool = False
    per_tensor_inputs: bool = False

    def ignores(self, name: str) -> bool:
        """Return whether a module of the checkpoint is not quantised."""
        if self.whole_names:
            return any(matches(entry, name) for entry in self.ignored)
        return any(contains(entry, name) or is_listed(entry, name) for entry in self.ignored)

    def fallback(self, device: torch.device) -> str | None:
        return fp8_fallback(device) or (PER_TOKEN if self.per_tensor_inputs else None)

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        if all_or_none(names, self.ignores):
            return UnquantizedLinearMethod(shape)
        return Fp8Linear(shape, self.scheme)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        if all_or_none(names, self.ignores):
            return UnquantizedExperts(shape)
        return Fp8Experts(shape, self.scheme)


def block_scheme(block: Block) -> Fp8Scheme:
    """Return the scheme. block: rows and columns that share a scale."""
    return Fp8Scheme("weight_scale_inv", block)


def read_fp8(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Read `quant_method: fp8`, with or without `weight_block_size`. See `workers.quantization.table.QuantReader`."""
    block = quantization.get("weight_block_size")
    left = list_of_names(quantization, "modules_to_not_convert", source)
    if not block:
        only(quantization, source, "activation_scheme", "dynamic", "static")
        left = ("lm_head", *left, *list_of_names(quantization, "ignored_layers", source))
        return Fp8Quant(TENSOR, left, per_tensor_inputs=quantization.get("activation_scheme") == "static")
    only(quantization, source, "fmt", "e4m3")
    only(quantization, source, "activation_scheme", "dynamic")
    are_sizes = isinstance(block, list) and all(type(size) is int and size > 0 for size in block)
    if not are_sizes or len(block) != 2:
        raise ValueError(f"{source}: quantization_config.weight_block_size={block!r}: must be two sizes, as [128, 128]")
    return Fp8Quant(block_scheme((block[0], block[1])), (*_UNQUANTISED, *left))


def read_modelopt_fp8(settings: Mapping[str, Any], source: str) -> QuantMethod | None:
    """Read modelopt's FP8 `quant_algo`; None for another one."""
    algorithm = settings.get("quant_algo")
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return None
    left = [list_of_names(settings, key, source) for key in ("ignore", "exclude_modules")]
    is_tensor = algorithm == "FP8"
    return Fp8Quant(TENSOR if is_tensor else CHANNEL, (*left[0], *left[1]), per_tensor_inputs=is_tensor)


def read_compressed_fp8(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Read compressed-tensors' `float-quantized`. See `workers.quantization.table.QuantReader`."""
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
    is_static = groups[0]["input_activations"]["strategy"] == "tensor"
    return Fp8Quant(scheme, list_of_names(quantization, "ignore", source), True, is_static)
