"""Checkpoints of FP8, MXFP4 and NVFP4 weights: readers of quantization_config, and `FloatQuant`, one scheme for all
modules that the checkpoint does not exclude. Activations of 4-bit weights stay in the model's dtype, even if the
checkpoint would quantise them.

FP8: a scale per block (DeepSeek-V3, arXiv 2412.19437, section 3.3), per output, or per matrix (stored per output).
MXFP4: OCP Microscaling Formats 1.0; blocks of 32, scales of powers of two (e8m0). NVFP4: blocks of 16, scales in
float8_e4m3fn, and a float32 scale of the matrix.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.packed.weight import Code
from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, Part, UnquantizedLinearMethod
from aerie.workers.layers.weighted import WrongTensorError, check_shape
from aerie.workers.quantization.fp8_linear import Fp8Experts, Fp8Linear
from aerie.workers.quantization.fp8_weight import Block, Fp8Scheme, fp8_fallback
from aerie.workers.quantization.packed_experts import PackedExperts
from aerie.workers.quantization.packed_linear import MatrixCodes, PackedLinear, PackedScheme
from aerie.workers.quantization.quant_method import (
    QuantMethod,
    all_or_none,
    contains,
    is_listed,
    list_of_names,
    matches,
    only,
)

_E8M0_NAN = 255  # the byte that is NaN in E8M0 scales
_CODE_DEVIATION = 2.9  # standard deviation of uniformly distributed e2m1 codes


@dataclass(frozen=True)
class Fp4Scheme(PackedScheme):
    """The tensors of a matrix [rows, columns]; values are the last components of their names.

    codes: uint8, two inputs per byte, lower bits first: [rows, columns / 2], or blocks [rows, columns / 32, 16].
    scales: [rows, columns / group]: uint8 for e8m0, or float8_e4m3fn.
    group: 32, or 16.
    matrix_scale: float32, one number; "" for none.
    divides: whether weights are divided by `matrix_scale` instead of multiplied.
    unused: tensors needed only for 4-bit activations.
    """

    codes: str
    scales: str
    group: int
    matrix_scale: str = ""
    divides: bool = False
    unused: tuple[str, ...] = ()

    @property
    def code(self) -> Code:  # type: ignore[override]
        return "e2m1"

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.codes, self.scales, *((self.matrix_scale,) if self.matrix_scale else ()))

    @property
    def has_row_scale(self) -> bool:  # type: ignore[override]
        return bool(self.matrix_scale)

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.matrix_scale else torch.uint8

    def storage(self, part: Part) -> dict[str, Tensor]:
        if part.columns.total % self.group:
            raise ValueError(
                f"{part.name or 'a layer'}: {part.columns.total} inputs are not whole blocks of {self.group}; "
                "use the checkpoint in bf16"
            )
        rows, columns = part.rows.size, self.widened(part.columns).size
        stored = {
            self.codes: torch.empty(rows, columns // 2, dtype=torch.uint8),
            self.scales: torch.empty(rows, columns // self.group, dtype=self.scale_dtype),
        }
        if self.matrix_scale:
            stored[self.matrix_scale] = torch.empty(1, dtype=torch.float32)
        return stored

    def copy(self, kind: str, part: Part, full: Tensor, out: Tensor) -> None:
        if kind == self.matrix_scale:
            if full.numel() != 1 or full.dtype != torch.float32:
                raise WrongTensorError(f"is {full.dtype} {list(full.shape)}, not one float32")
            out.copy_(full.reshape(1))
            return
        wanted, step = (torch.uint8, 2) if kind == self.codes else (self.scale_dtype, self.group)
        if full.dtype != wanted:
            raise WrongTensorError(f"is {full.dtype}, not {wanted}, which config.json's quantization_config implies")
        full = full.flatten(1) if kind == self.codes and full.dim() == 3 else full
        check_shape(full, (part.rows.total, part.columns.total // step))
        columns = self.widened(part.columns)
        out.copy_(full[part.rows.first : part.rows.end, columns.first // step : columns.end // step])

    def read(self, stored: Mapping[str, Tensor]) -> MatrixCodes:
        pairs, scales = stored[self.codes], stored[self.scales]
        codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
        if not self.matrix_scale:
            return MatrixCodes(codes, _powers_of_two(scales))
        scale = stored[self.matrix_scale]
        row_scale = (1.0 / scale if self.divides else scale).expand(codes.shape[0])
        return MatrixCodes(codes, scales.to(torch.bfloat16), None, row_scale)

    def dummy(self, stored: Mapping[str, Tensor], fan_in: int, generator: torch.Generator) -> None:
        stored[self.codes].random_(0, 256, generator=generator)
        wanted = fan_in**-0.5 / _CODE_DEVIATION
        if self.matrix_scale:
            stored[self.scales].fill_(1.0)
            stored[self.matrix_scale].fill_(1.0 / wanted if self.divides else wanted)
        else:
            stored[self.scales].fill_(127 + round(torch.log2(torch.tensor(wanted)).item()))


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Convert e8m0 numbers to bfloat16, which is exact: the exponents are the same, except 2^-127, which is denormal.
    Raises ValueError for a NaN."""
    if bool((exponents == _E8M0_NAN).any()):
        raise ValueError("a scale of MXFP4 is NaN (255); download the checkpoint again")
    bits = torch.where(exponents == 0, 0x40, exponents.to(torch.int16) << 7)
    return bits.to(torch.int16).view(torch.bfloat16)


GPT_OSS_MXFP4 = Fp4Scheme("blocks", "scales", 32)  # openai/gpt-oss
CT_MXFP4 = Fp4Scheme("weight_packed", "weight_scale", 32, unused=("input_global_scale",))
CT_NVFP4 = Fp4Scheme(
    "weight_packed", "weight_scale", 16, "weight_global_scale", divides=True, unused=("input_global_scale",)
)
MODELOPT_NVFP4 = Fp4Scheme("weight", "weight_scale", 16, "weight_scale_2", unused=("input_scale",))
TENSOR = Fp8Scheme("weight_scale", None, per_matrix=True, unused=("input_scale",))
CHANNEL = Fp8Scheme("weight_scale", None, unused=("input_scale",))
PER_TOKEN = "inputs are rounded to FP8 with a scale per token, not per tensor, which is more exact"
_PLAIN_INPUTS = "activations stay in the model's type (weights alone have 4 bits here), which is more exact"
_UNQUANTISED = ("lm_head", "eh_proj", "shared_head.head")  # not listed in published checkpoints with blocks
# Values that compressed-tensors' quantization_config may have for a group's tensors.
_WEIGHTS = {"num_bits": (8,), "type": ("float",), "strategy": ("channel", "tensor"), "symmetric": (True,)}
_INPUTS = {"num_bits": (8,), "type": ("float",), "strategy": ("token", "tensor"), "symmetric": (True,)}
_REMEDY = "only FP8 with scales of channels or tensors and rounded inputs is; use the checkpoint in bf16"


def is_named(entry: str, name: str) -> bool:
    """Return whether an entry of a checkpoint's list names the module, or a module that contains it, by components of
    its name or by a pattern with `*`."""
    return contains(entry, name) or is_listed(entry, name)


@dataclass(frozen=True)
class FloatQuant(QuantMethod):
    """Every linear layer and expert has the scheme, except those that the checkpoint lists.

    ignored: entries of modules that keep the model's dtype.
    matches: (entry, name of a module) -> whether the entry names it.
    only_experts: whether only experts are quantised.
    inputs_note: how activations differ from what the checkpoint intends, for the log; None: not at all.
    """

    scheme: Fp4Scheme | Fp8Scheme
    ignored: tuple[str, ...] = ()
    matches: Callable[[str, str], bool] = is_named
    only_experts: bool = False
    inputs_note: str | None = None

    def ignores(self, name: str) -> bool:
        """Return whether a module of the checkpoint is not quantised."""
        return any(self.matches(entry, name) for entry in self.ignored)

    def fallback(self, device: torch.device) -> str | None:
        return (fp8_fallback(device) if isinstance(self.scheme, Fp8Scheme) else None) or self.inputs_note

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        if self.only_experts or all_or_none(names, self.ignores):
            return UnquantizedLinearMethod(shape)
        if isinstance(self.scheme, Fp8Scheme):
            return Fp8Linear(shape, self.scheme)
        return PackedLinear(shape, self.scheme)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        if all_or_none(names, self.ignores):
            return UnquantizedExperts(shape)
        if isinstance(self.scheme, Fp8Scheme):
            return Fp8Experts(shape, self.scheme)
        return PackedExperts(shape, self.scheme)


def block_scheme(block: Block) -> Fp8Scheme:
    """Return the scheme. block: rows and columns that share a scale."""
    return Fp8Scheme("weight_scale_inv", block)


def read_fp8(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Read `quant_method: fp8`, with or without `weight_block_size`. See
    `aerie.workers.quantization.table.QuantReader`."""
    block = quantization.get("weight_block_size")
    left = list_of_names(quantization, "modules_to_not_convert", source)
    if not block:
        only(quantization, source, "activation_scheme", "dynamic", "static")
        left = ("lm_head", *left, *list_of_names(quantization, "ignored_layers", source))
        is_static = quantization.get("activation_scheme") == "static"
        return FloatQuant(TENSOR, left, inputs_note=PER_TOKEN if is_static else None)
    only(quantization, source, "fmt", "e4m3")
    only(quantization, source, "activation_scheme", "dynamic")
    are_sizes = isinstance(block, list) and all(type(size) is int and size > 0 for size in block)
    if not are_sizes or len(block) != 2:
        raise ValueError(f"{source}: quantization_config.weight_block_size={block!r}: must be two sizes, as [128, 128]")
    return FloatQuant(block_scheme((block[0], block[1])), (*_UNQUANTISED, *left))


def read_mxfp4(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Read `quant_method: mxfp4`, as in gpt-oss: only experts are quantised. See
    `aerie.workers.quantization.table.QuantReader`."""
    left = list_of_names(quantization, "modules_to_not_convert", source)
    return FloatQuant(GPT_OSS_MXFP4, left, is_listed, only_experts=True)


def read_modelopt(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Read `quant_method: modelopt`. See `aerie.workers.quantization.table.QuantReader`."""
    inner = quantization.get("quantization")
    settings = inner if isinstance(inner, dict) else quantization
    algorithm = settings.get("quant_algo")
    left = (*list_of_names(settings, "ignore", source), *list_of_names(settings, "exclude_modules", source))
    if algorithm == "FP8":
        return FloatQuant(TENSOR, left, inputs_note=PER_TOKEN)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return FloatQuant(CHANNEL, left)
    if algorithm != "NVFP4":
        raise ValueError(
            f"{source}: quantization_config.quant_algo={algorithm!r} is not supported; only 'NVFP4', 'FP8' and "
            "'FP8_PER_CHANNEL_PER_TOKEN' are; use the checkpoint in bf16"
        )
    size = settings.get("group_size") or 16
    if size != 16:
        raise ValueError(f"{source}: quantization_config.group_size={size!r} is not supported; NVFP4 has 16")
    return FloatQuant(MODELOPT_NVFP4, left, is_listed, inputs_note=_PLAIN_INPUTS)


def read_compressed_fp4(quantization: Mapping[str, Any], source: str) -> QuantMethod | None:
    """Read `quant_method: compressed-tensors` with 4-bit float weights; None for other weights. source: the checkpoint,
    for errors."""
    declared = quantization.get("config_groups")
    groups = [group for group in declared.values() if isinstance(group, dict)] if isinstance(declared, dict) else []
    weights = [group.get("weights") or {} for group in groups]
    if not any(entry.get("type") == "float" and entry.get("num_bits") == 4 for entry in weights):
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
    ignored = list_of_names(quantization, "ignore", source)
    quantises_inputs = groups[0].get("input_activations") is not None
    inputs_note = _PLAIN_INPUTS if quantises_inputs else None
    return FloatQuant(schemes[size], ignored, is_listed, inputs_note=inputs_note)


def read_compressed_fp8(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Read compressed-tensors' `float-quantized`. See `aerie.workers.quantization.table.QuantReader`."""
    groups = quantization.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    if len(groups) != 1 or not isinstance(groups[0], dict) or groups[0].get("targets") != ["Linear"]:
        raise ValueError(f"{source}: quantization_config.config_groups: must be one group of all Linear; {_REMEDY}")
    for name, wanted in (("weights", _WEIGHTS), ("input_activations", _INPUTS)):
        part = groups[0].get(name)
        part = part if isinstance(part, dict) else {}
        for key, supported in wanted.items():
            if part.get(key) not in supported:
                raise ValueError(
                    f"{source}: quantization_config: {name}.{key}={part.get(key)!r} is not supported; {_REMEDY}"
                )
    scheme = TENSOR if groups[0]["weights"]["strategy"] == "tensor" else CHANNEL
    is_static = groups[0]["input_activations"]["strategy"] == "tensor"
    ignored = list_of_names(quantization, "ignore", source)
    return FloatQuant(scheme, ignored, matches, inputs_note=PER_TOKEN if is_static else None)
