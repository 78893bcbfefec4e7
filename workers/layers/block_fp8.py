"""Weights of eight bits with a scale for each block of rows and columns, as DeepSeek-V3 and Qwen3 publish them
(arXiv 2412.19437, section 3.3): `quant_method: fp8` with `weight_block_size`.

They are loaded as they are. There is no product of such weights here yet, so `finish` makes what they mean of them, in
the model's type; blocks that ranks cut in two are no matter therefore.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from workers.layers.experts import DenseExperts, ExpertsMethod, ExpertsShape
from workers.layers.gemm import GEMMOptions
from workers.layers.linear_method import DenseLinearMethod, LinearMethod, LinearShape, Part, UnquantizedLinearMethod
from workers.layers.quant_method import QuantMethod
from workers.layers.weighted import WrongTensorError, check_shape

FP8 = torch.float8_e4m3fn
KINDS = ("weight", "weight_scale_inv")
_UNQUANTISED = ("lm_head", "eh_proj", "shared_head.head")  # which no list of a published checkpoint names
_DUMMY_DEVIATION, _DUMMY_SCALE = 32.0, 0.02 / 32.0

Block = tuple[int, int]


def num_blocks(part: Part, block: Block) -> tuple[int, int]:
    """Of the checkpoint's whole matrix."""
    return -(-part.rows.total // block[0]), -(-part.columns.total // block[1])


def dequantised(weight: Tensor, scales: Tensor, part: Part, block: Block, dtype: torch.dtype) -> Tensor:
    """What this rank's share `weight` [rows, columns] of a part means, in `dtype`. scales: of the whole matrix."""

    def blocks(first: int, end: int, size: int) -> Tensor:
        return torch.arange(first, end, device=scales.device) // size

    rows = blocks(part.rows.first, part.rows.end, block[0])
    columns = blocks(part.columns.first, part.columns.end, block[1])
    return (weight.float() * scales.index_select(0, rows).index_select(1, columns)).to(dtype)


class BlockFp8Linear(DenseLinearMethod):
    """weight: [out_features, in_features] float8_e4m3fn, until it is finished. scales: of each part's whole matrix,
    float32."""

    kinds = KINDS

    def __init__(self, shape: LinearShape, block: Block) -> None:
        super().__init__(shape)
        assert not shape.padding, "a vocabulary head is left unquantised"
        self.block, self._dtype = block, torch.get_default_dtype()
        self.weight: nn.Parameter | None = _empty(shape.out_features, shape.in_features, dtype=FP8)
        self.scales = nn.ParameterList(_empty(*num_blocks(part, block), dtype=torch.float32) for part in shape.parts)
        self._dense: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def dense_weight(self) -> Tensor:
        assert self._dense is not None, "finish comes first"
        return self._dense

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        assert self.weight is not None, "is finished"
        if kind == "weight":
            _rows_of(self.weight, part).copy_(part.cut(_checked(full)))
        else:
            check_shape(full, num_blocks(part, self.block))
            self.scales[self.shape.parts.index(part)].data.copy_(full)

    def fill_dummy(self, generator: torch.Generator) -> None:
        assert self.weight is not None, "is finished"
        _fill_dummy(self.weight.data, generator)
        for scale in self.scales:
            scale.data.fill_(_DUMMY_SCALE)

    def finish(self, options: GEMMOptions) -> None:
        if self.weight is not None:
            dense = torch.empty(self.weight.shape, dtype=self._dtype, device=self.weight.device)
            for part, scale in zip(self.shape.parts, self.scales, strict=True):
                mine = _rows_of(self.weight, part)
                _rows_of(dense, part).copy_(dequantised(mine, scale.data, part, self.block, self._dtype))
            self.weight, self._dense = None, dense
        super().finish(options)


class BlockFp8Experts(DenseExperts):
    """weights: gate_up and down of all experts, float8_e4m3fn, until they are finished. scales: by matrix, of all
    experts, float32 [experts, blocks of rows, blocks of columns]."""

    kinds = KINDS

    def __init__(self, shape: ExpertsShape, block: Block) -> None:
        super().__init__(shape)
        self.block, self._dtype = block, torch.get_default_dtype()
        self.weights = nn.ParameterList(
            _empty(shape.num_experts, one.out_features, one.in_features, dtype=FP8)
            for one in (shape.gate_up, shape.down)
        )
        self.scales = nn.ParameterDict(
            {
                part.name: _empty(shape.num_experts, *num_blocks(part, block), dtype=torch.float32)
                for part in shape.parts
            }
        )
        self._dense: tuple[Tensor, Tensor] | None = None

    def dense_weights(self) -> tuple[Tensor, Tensor]:
        assert self._dense is not None, "finish comes first"
        return self._dense

    def load(self, kind: str, expert: int, part: Part, full: Tensor) -> None:
        if kind == "weight":
            mine = self.weights[0 if part in self.shape.gate_up.parts else 1]
            _rows_of(mine.data[expert], part).copy_(part.cut(_checked(full)))
        else:
            check_shape(full, num_blocks(part, self.block))
            self.scales[part.name].data[expert].copy_(full)

    def fill_dummy(self, generator: torch.Generator) -> None:
        for weights in self.weights:
            for expert in weights.data:
                _fill_dummy(expert, generator)
        for scale in self.scales.values():
            scale.data.fill_(_DUMMY_SCALE)

    def finish(self, options: GEMMOptions) -> None:
        if self._dense is None:
            gate_up, down = self.weights
            shape = self.shape
            self._dense = self._all_dequantised(gate_up, shape.gate_up), self._all_dequantised(down, shape.down)
            self.weights = nn.ParameterList()
        super().finish(options)

    def _all_dequantised(self, weights: Tensor, shape: LinearShape) -> Tensor:
        """Expert by expert: scales of all, as large as the weights, would take four times their memory."""
        dense = torch.empty(weights.shape, dtype=self._dtype, device=weights.device)
        for part in shape.parts:
            for expert in range(self.shape.num_experts):
                mine, scale = _rows_of(weights[expert], part), self.scales[part.name].data[expert]
                _rows_of(dense[expert], part).copy_(dequantised(mine, scale, part, self.block, self._dtype))
        return dense


@dataclass(frozen=True)
class BlockFp8(QuantMethod):
    """block: rows and columns that share a scale. ignored: modules of the checkpoint that are left in bf16, and all in
    them."""

    block: Block
    ignored: tuple[str, ...]

    fallback: ClassVar[str | None] = (
        "weights of FP8 are multiplied in the model's type (there is no product of FP8 yet)"
    )

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        left = [name for name in names if self._ignores(name)]
        if left and len(left) < len(names):
            raise ValueError(
                f"quantization_config: of {', '.join(names)}, which are multiplied together, only {', '.join(left)} "
                "are left unquantised; use the checkpoint in bf16"
            )
        return UnquantizedLinearMethod(shape) if left else BlockFp8Linear(shape, self.block)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        if any(self._ignores(name) for name in names):
            return super().experts_method(names, shape)
        return BlockFp8Experts(shape, self.block)

    def _ignores(self, name: str) -> bool:
        """Whether an entry of the list is the module, holds it, or is a part of its name."""
        return any(f".{entry}." in f".{name}." for entry in self.ignored)


def read_block_fp8(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """See `workers.layers.quantization.QuantReader`."""
    for key, only in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        value = quantization.get(key) or only
        if value != only:
            raise ValueError(f"{source}: quantization_config.{key}={value!r} is not supported; only {only!r} is")
    block = quantization.get("weight_block_size")
    if not block:
        raise ValueError(
            f"{source}: quantization_config has no weight_block_size; FP8 with other scales than those of blocks is "
            "not supported; use the checkpoint in bf16 or fp16"
        )
    rows, columns = (int(size) for size in block)
    return BlockFp8((rows, columns), (*_UNQUANTISED, *(quantization.get("modules_to_not_convert") or ())))


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _rows_of(weight: Tensor, part: Part) -> Tensor:
    """A part of one layer's or one expert's weight [rows of all parts, columns]."""
    return weight.detach()[part.offset : part.offset + part.rows.size]


def _checked(full: Tensor) -> Tensor:
    if full.dtype != FP8:
        raise WrongTensorError(f"is {full.dtype}, not {FP8}, which config.json's quantization_config tells")
    return full


def _fill_dummy(weight: Tensor, generator: torch.Generator) -> None:
    values = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    weight.copy_(values.normal_(0.0, _DUMMY_DEVIATION, generator=generator).clamp_(-448.0, 448.0))
