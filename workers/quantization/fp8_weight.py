"""Common parts of FP8 weights: layout of scales, dequantisation, and kernel support."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aerie.kernels.capability import Capability
from aerie.kernels.kv.stored_values import FP8, FP8_MAX
from aerie.workers.layers.linear_method import Part
from aerie.workers.layers.weighted import WrongTensorError, check_shape

Block = tuple[int, int]
_SCALE_ROWS, _GROUP = 64, 128  # constants of the kernels: `aerie.kernels.fp8.gemm_triton`, `fp8.rows`
_DUMMY_DEVIATION = 32.0
DUMMY_SCALE = 0.02 / _DUMMY_DEVIATION


@dataclass(frozen=True)
class Fp8Scheme:
    """How a checkpoint scales FP8 weights.

    kind: the checkpoint's name for scales.
    block: rows and columns that share a scale; None for a scale per row.
    per_matrix: whether the checkpoint has one scale for all rows.
    unused: tensors that a checkpoint may have, without effect here.
    """

    kind: str
    block: Block | None
    per_matrix: bool = False
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.block is not None:
            return f"FP8 in blocks of {self.block[0]} x {self.block[1]}"
        return "FP8, a scale per matrix" if self.per_matrix else "FP8, a scale per output"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the names of a matrix's tensors."""
        return ("weight", self.kind, *self.unused)

    def scales_of(self, full: Tensor, part: Part) -> Tensor:
        """Return the checkpoint's scales of a matrix in the shape `num_scales`. Raises WrongTensorError."""
        rows, columns = self.num_scales(part)
        if self.per_matrix:
            if full.numel() != 1:
                raise WrongTensorError(f"has shape {tuple(full.shape)}, not one scale of the whole matrix")
            return full.reshape(1, 1).expand(rows, 1)
        if self.block is None and full.shape == (rows,):
            return full.unsqueeze(1)
        check_shape(full, (rows, columns))
        return full

    def block_of(self, part: Part) -> Block:
        return self.block or (1, part.columns.total)

    def num_scales(self, part: Part) -> tuple[int, int]:
        """Return the number of scales of the checkpoint's whole matrix, by rows and columns."""
        rows, columns = self.block_of(part)
        return -(-part.rows.total // rows), -(-part.columns.total // columns)


def dequantised(weight: Tensor, scales: Tensor, part: Part, block: Block, dtype: torch.dtype) -> Tensor:
    """Return this rank's share `weight` [rows, columns] of a part in `dtype`. scales: scales of the whole matrix."""
    rows = _scale_indices(part.rows.first, part.rows.end, block[0], scales)
    columns = _scale_indices(part.columns.first, part.columns.end, block[1], scales)
    return (weight.float() * scales.index_select(0, rows).index_select(1, columns)).to(dtype)


def kernel_scales(scales: list[Tensor], parts: tuple[Part, ...], scheme: Fp8Scheme) -> Tensor:
    """Return the scales of this rank's stacked parts in the kernels' layout (`aerie.kernels.fp8.tiles.Fp8Matrix`).

    scales: scales of each part's whole matrix; dimensions before the last two are kept.
    """
    mine = []
    for scale, part in zip(scales, parts, strict=True):
        block = scheme.block_of(part)
        step = 1 if scheme.block is None else _SCALE_ROWS
        rows = _scale_indices(part.rows.first, part.rows.end, block[0], scale, step)
        columns = _scale_indices(part.columns.first, part.columns.end, block[1], scale, _GROUP)
        mine.append(scale.index_select(-2, rows).index_select(-1, columns[: 1 if scheme.block is None else None]))
    return torch.cat(mine, -2).contiguous()


def _scale_indices(first: int, end: int, size: int, scales: Tensor, step: int = 1) -> Tensor:
    """Return the scale index of each of first, first + step, ... before `end`."""
    return torch.arange(first, end, step, device=scales.device) // size


def unreadable(parts: tuple[Part, ...], scheme: Fp8Scheme) -> str | None:
    """Return why the kernels do not support these stacked parts; None if they do."""
    columns = parts[0].columns
    if columns.size % _GROUP:
        return f"{columns.size} columns on a rank are no multiple of {_GROUP}"
    if scheme.block is None:
        return None
    if scheme.block[0] % _SCALE_ROWS or scheme.block[1] != _GROUP:
        return f"blocks of {scheme.block[0]} x {scheme.block[1]} are not of {_GROUP} columns"
    if columns.first % _GROUP or any(part.offset % _SCALE_ROWS or part.rows.first % _SCALE_ROWS for part in parts):
        return "ranks, or matrices that are multiplied together, cut blocks in two"
    return None


def fp8_fallback(device: torch.device) -> str | None:
    """See `QuantMethod.fallback`."""
    if Capability.of(device).multiplies_fp8:
        return None
    return "weights of FP8 are multiplied in the model's type (this device has no product of FP8)"


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def rows_of(weight: Tensor, part: Part) -> Tensor:
    """Return a part of one layer's or expert's weight [rows of all parts, columns]."""
    return weight.detach()[part.offset : part.offset + part.rows.size]


def checked(full: Tensor) -> Tensor:
    if full.dtype != FP8:
        raise WrongTensorError(f"is {full.dtype}, not {FP8}, which config.json's quantization_config implies")
    return full


def dummy_scale(fan_in: int) -> float:
    """Return the scale of dummy weights for which outputs are as large as inputs."""
    return float(fan_in**-0.5 / _DUMMY_DEVIATION)


def fill_dummy(weight: Tensor, generator: torch.Generator) -> None:
    """Fill weight [rows, columns] with normal numbers, through a bfloat16 copy."""
    values = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    weight.copy_(values.normal_(0.0, _DUMMY_DEVIATION, generator=generator).clamp_(-FP8_MAX, FP8_MAX))
