"""Checkpoints of 4- and 8-bit integers, made of tiny ones by the formats' published packing.

compressed-tensors: its own packer. AutoAWQ (awq/modules/linear/gemm.py, `from_linear`) and AutoGPTQ and GPTQModel
(auto_gptq/nn_modules/qlinear/qlinear_cuda.py, `pack`; gptqmodel's `gptq_v2` does not subtract one): loops written from
their sources.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Quantised:
    """A matrix [N, K] as integers: weight = (codes - zeros) * scales. groups: [K] group of each input."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def dense(self) -> Tensor:
        zeros, scales = (each.float().index_select(1, self.groups) for each in (self.zeros, self.scales))
        return (self.codes.float() - zeros) * scales


def quantised(
    weight: Tensor,
    bits: int,
    group: int | None,
    symmetric: bool,
    scale_dtype: torch.dtype = torch.float16,
    order_seed: int | None = None,
) -> Quantised:
    """Round to the nearest. order_seed: of inputs that are put into groups at random."""
    n, k = weight.shape
    size = group or k
    groups = torch.arange(k) // size
    if order_seed is not None:
        groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(order_seed))]
    count = -(-k // size)
    low, high = torch.zeros(n, count), torch.zeros(n, count)
    for g in range(count):
        mine = weight[:, groups == g]
        low[:, g], high[:, g] = mine.amin(1).clamp(max=0), mine.amax(1).clamp(min=0)
    top = (1 << bits) - 1
    if symmetric:
        scales = torch.maximum(-low, high).clamp(min=1e-4) / ((top - 1) / 2)
        zeros = torch.full((n, count), (top + 1) // 2)
    else:
        scales = (high - low).clamp(min=1e-4) / top
        zeros = (-low / scales).round().clamp(0, top).long()
    scales = scales.to(scale_dtype)
    spread = [each.float().index_select(1, groups) for each in (scales, zeros)]
    codes = (weight / spread[0] + spread[1]).round().clamp(0, top).long()
    return Quantised(codes, scales, zeros, groups)


def _words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack along the last dimension, literally."""
    per = 32 // bits
    out = torch.zeros(*values.shape[:-1], -(-values.shape[-1] // per), dtype=torch.int64)
    for column in range(values.shape[-1]):
        word, place = divmod(column, per)
        shift = (order.index(place) if order else place) * bits
        out[..., word] |= values[..., column] << shift
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def awq_tensors(matrix: Quantised, bits: int) -> dict[str, Tensor]:
    assert bits == 4
    return {
        "qweight": _words(matrix.codes.t(), 4, AWQ_ORDER),
        "qzeros": _words(matrix.zeros.t(), 4, AWQ_ORDER),
        "scales": matrix.scales.t().contiguous(),
    }


def gptq_tensors(matrix: Quantised, bits: int, v2: bool = False) -> dict[str, Tensor]:
    stored = matrix.zeros if v2 else (matrix.zeros - 1) & ((1 << bits) - 1)
    return {
        "qweight": _words(matrix.codes, bits).t().contiguous(),
        "qzeros": _words(stored.t(), bits),
        "scales": matrix.scales.t().contiguous(),
        "g_idx": matrix.groups.to(torch.int32),
    }


def pack_quantized_tensors(matrix: Quantised, bits: int, symmetric: bool, ordered: bool) -> dict[str, Tensor]:
    """Return tensors packed by compressed-tensors itself."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    half = 1 << (bits - 1)
    tensors = {
        "weight_packed": pack_to_int32((matrix.codes - half).to(torch.int8), bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_to_int32((matrix.zeros - half).to(torch.int8), bits, packed_dim=0)
    if ordered:
        tensors["weight_g_idx"] = matrix.groups.to(torch.int32)
    return tensors


@dataclass(frozen=True)
class Recipe:
    """config: quantization_config. pack: the tensors of a matrix."""

    config: dict[str, Any]
    bits: int
    group: int | None
    symmetric: bool
    pack: Callable[[Quantised], dict[str, Tensor]]
    ordered: bool = False
    scale_dtype: torch.dtype = torch.float16

    def quantised(self, weight: Tensor, seed: int) -> Quantised:
        order = seed if self.ordered else None
        return quantised(weight, self.bits, self.group, self.symmetric, self.scale_dtype, order)

    def with_config(self, **changes: Any) -> "Recipe":
        return replace(self, config=self.config | changes)


def awq(group: int = 32, symmetric: bool = False, **changes: Any) -> Recipe:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": not symmetric, "version": "gemm"}
    return Recipe(config | changes, 4, group, symmetric, lambda matrix: awq_tensors(matrix, 4))


def gptq(
    bits: int = 4, group: int | None = 32, symmetric: bool = True, desc_act: bool = False, v2: bool = False
) -> Recipe:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": -1 if group is None else group,
        "desc_act": desc_act,
        "sym": symmetric,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    return Recipe(config, bits, group, symmetric, lambda matrix: gptq_tensors(matrix, bits, v2), desc_act)


def auto_round(packing: str = "auto_gptq", symmetric: bool = True) -> Recipe:
    base = awq(32, symmetric) if packing == "auto_awq" else gptq(symmetric=symmetric)
    config = {
        "quant_method": "auto-round",
        "packing_format": f"auto_round:{packing}",
        "bits": 4,
        "group_size": 32,
        "sym": symmetric,
        "data_type": "int",
        "autoround_version": "0.9.2",
    }

    def pack(matrix: Quantised) -> dict[str, Tensor]:
        return {kind: tensor for kind, tensor in base.pack(matrix).items() if kind != "g_idx"}

    return replace(base, config=config, pack=pack)


def pack_quantized(
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    ordered: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Recipe:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "actorder": "group" if ordered else None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }

    def pack(matrix: Quantised) -> dict[str, Tensor]:
        return pack_quantized_tensors(matrix, bits, symmetric, ordered)

    return Recipe(config | changes, bits, group, symmetric, pack, ordered, scale_dtype)


def int_quantized() -> Recipe:
    """W8A8: weights by compressed-tensors itself; activations with a scale per token are only declared."""
    from compressed_tensors.compressors import IntQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    whole = QuantizationConfig(config_groups={"group_0": scheme}, format="int-quantized", ignore=["lm_head"])

    def pack(matrix: Quantised) -> dict[str, Tensor]:
        given = {"weight": matrix.dense, "weight_scale": matrix.scales.float()}
        return IntQuantizationCompressor.compress(given, scheme)

    return Recipe(whole.model_dump(mode="json"), 8, None, True, pack, scale_dtype=torch.float32)


def is_linear(name: str) -> bool:
    """Whether published checkpoints quantise a tensor of a tiny model by default."""
    plain = ("eh_proj", "in_proj_a", "in_proj_b", "in_proj_ba", "embed_tokens", "lm_head", "fc.weight")
    return name.endswith(("_proj.weight", "_mqa.weight", "in_proj_qkv.weight", "in_proj_z.weight", "qkvz.weight")) and (
        not any(each in name for each in plain)
    )


def quantise(
    source: Path,
    folder: Path,
    recipe: Recipe,
    chosen: Callable[[str], Recipe | None] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Two checkpoints of one model: `folder` with integers, and folder / "plain" with what they mean.

    chosen: the recipe of a tensor, None for its 16 bits; by default `recipe` for all that `is_linear`.
    config: what quantization_config says instead of the recipe's.
    """
    tensors, plain = load_file(str(source / "model.safetensors")), {}
    for seed, (name, weight) in enumerate(sorted(tensors.copy().items())):
        plain[name] = weight
        mine = (recipe if is_linear(name) else None) if chosen is None else chosen(name)
        if mine is None:
            continue
        matrix = mine.quantised(weight, seed)
        plain[name] = matrix.dense
        module = name.removesuffix(".weight")
        del tensors[name]
        tensors |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in mine.pack(matrix).items()}
    settings = json.loads((source / "config.json").read_text())
    for path, kept, added in (
        (folder, tensors, {"quantization_config": dict(config or recipe.config)}),
        (folder / "plain", plain, {}),
    ):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(settings | added))
        save_file({n: t.contiguous() for n, t in kept.items()}, str(path / "model.safetensors"), {"format": "pt"})
    return folder
