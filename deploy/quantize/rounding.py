"""Scales and codes of one matrix. The library computes scales from ranges, rounds and packs; here ranges are searched,
and the error of each rounded column is compensated by the later ones (GPTQ: Frantar et al. 2023, algorithm 1)."""

from dataclasses import dataclass

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from deploy.quantize.schemes import Scheme

# Shares of the largest magnitude of a group that its codes may reach. Below 0.6 the best error never lies in practice.
SHRINKS = tuple(1.0 - step / 32 for step in range(14))
_SEARCHED = 1 << 19  # weights whose errors are computed at once: 2 MB, near a core's cache
_PACKED = 1 << 21  # weights that are packed at once
_COMPENSATED = 1 << 24  # weights that are compensated at once; larger matrices are cut into rows
_OF_MATRIX = ("weight_shape", "weight_global_scale")  # tensors that do not count rows
_DAMPING = 0.01  # share of the mean second moment, added to all: the paper's choice
_BLOCK = 128  # columns whose errors are carried to the later ones at once


@dataclass(frozen=True)
class Scales:
    """scale: [rows, groups] as they are stored, in float32.
    zero: [rows, groups] integers; None if they are symmetric.
    matrix: float32 [1], by which scales are divided (NVFP4); None without.
    """

    scale: Tensor
    zero: Tensor | None
    matrix: Tensor | None

    def rows(self, first: int, end: int) -> "Scales":
        zero = None if self.zero is None else self.zero[first:end]
        return Scales(self.scale[first:end], zero, self.matrix)


def find_scales(weight: Tensor, args: QuantizationArgs, largest: float, moments: Tensor | None = None) -> Scales:
    """Return the scales with the least squared error of each group's weights.

    weight: [rows, columns] of a floating type, in which integer and FP8 scales are stored.
    largest: magnitude in this and all matrices that are multiplied together, which share `Scales.matrix`.
    moments: float32 [columns] mean square of each input, by which errors count; None: all alike.
    """
    matrix = None
    if args.strategy == "tensor_group":
        matrix = generate_gparam(torch.tensor(-largest), torch.tensor(largest))
    step = max(1, _SEARCHED // weight.shape[1])
    found = [_search(rows, args, moments, matrix, weight.dtype) for rows in torch.split(weight, step)]
    zero = None if args.symmetric else torch.cat([zeros for _, zeros in found])
    return Scales(torch.cat([scales for scales, _ in found]), zero, matrix)


def _search(
    stored: Tensor, args: QuantizationArgs, moments: Tensor | None, matrix: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    weight = stored.float()
    size = args.group_size or weight.shape[1]
    low, high = weight.view(len(weight), -1, size).aminmax(dim=2)
    least, best, best_zero = low.new_full(low.shape, torch.inf), low, low
    for shrink in SHRINKS:
        scale, zero = calculate_qparams(low * shrink, high * shrink, args, global_scale=matrix)
        if args.scale_dtype is None:
            scale = scale.to(dtype).float().clamp(min=torch.finfo(dtype).tiny)
        each = Scales(scale, None if args.symmetric else zero, matrix)
        error = (rounded(weight, args, each) - weight).square_()
        if moments is not None:
            error *= moments
        total = error.view(len(error), -1, size).sum(2)
        is_better = total < least
        least, best = torch.where(is_better, total, least), torch.where(is_better, scale, best)
        best_zero = torch.where(is_better, zero, best_zero.to(zero.dtype))
    return best, best_zero


def rounded(weight: Tensor, args: QuantizationArgs, scales: Scales) -> Tensor:
    """Return what the nearest codes of a float32 weight [rows, columns] mean, in float32."""
    result: Tensor = fake_quantize(weight, scales.scale, scales.zero, args, scales.matrix)
    return result


def compensated(weight: Tensor, args: QuantizationArgs, scales: Scales, moments: Tensor) -> Tensor:
    """Return rounded weights, float32 [rows, columns], whose rounding errors are compensated (GPTQ, arXiv 2210.17323).

    Columns are rounded in order of decreasing input; later columns compensate the error of each.

    moments: float32 [columns, columns], the mean of x x^T over inputs x. Not changed.
    """
    num_columns = weight.shape[1]
    diagonal = moments.diagonal()
    order = diagonal.argsort(descending=True)
    damped = moments[order][:, order].double()
    damped.diagonal().add_(_DAMPING * float(diagonal.mean()) + torch.finfo(torch.float32).tiny)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    group = order // (args.group_size or num_columns)
    by_column = args.model_copy(update={"strategy": "channel", "group_size": None})
    left = weight.float().t()[order]  # [columns, rows], so that a column is contiguous
    scale, zero = (None if each is None else each.t()[group] for each in (scales.scale, scales.zero))
    assert scale is not None
    meant = torch.empty_like(left)
    for first in range(0, num_columns, _BLOCK):
        end = min(first + _BLOCK, num_columns)
        errors = torch.empty_like(left[first:end])
        for column in range(first, end):
            mine = None if zero is None else zero[column].unsqueeze(1)
            one = rounded(left[column].unsqueeze(1), by_column, Scales(scale[column].unsqueeze(1), mine, scales.matrix))
            meant[column] = one.squeeze(1)
            torch.sub(left[column], meant[column], out=errors[column - first])
            errors[column - first].div_(upper[column, column])
            left[column + 1 : end].addr_(upper[column, column + 1 : end], errors[column - first], alpha=-1.0)
        left[end:].addmm_(upper[first:end, end:].t(), errors, alpha=-1.0)
    return torch.empty_like(meant).index_copy_(0, order, meant).t()


def packed(meant: Tensor, scheme: Scheme, scales: Scales, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a matrix as the library packs them, by the last components of names.

    meant: float32 [rows, columns] what the codes mean, or a weight that is to be rounded.
    dtype: of scales, where the format has not its own.
    """
    given: dict[str, Tensor] = {"weight": meant, "weight_scale": scales.scale}
    if scales.zero is not None:
        given["weight_zero_point"] = scales.zero
    if scales.matrix is not None:
        given["weight_global_scale"] = scales.matrix
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    tensors: dict[str, Tensor] = compressor.compress(given, scheme.scheme)
    if scheme.weights.scale_dtype is None:
        tensors["weight_scale"] = tensors["weight_scale"].to(dtype)
    return {kind: tensor.contiguous() for kind, tensor in tensors.items()}


def quantised(weight: Tensor, scheme: Scheme, largest: float, moments: Tensor | None) -> dict[str, Tensor]:
    """Return the packed tensors of a matrix [rows, columns].

    largest: see `find_scales`. moments: see `compensated`; None: inputs are not known.
    """
    diagonal = None if moments is None else moments.diagonal()
    size = _PACKED if moments is None else _COMPENSATED
    step = max(32, size // weight.shape[1] // 32 * 32)  # 32 rows are whole words of zero points
    found = []
    for rows in torch.split(weight, step):
        scales = find_scales(rows, scheme.weights, largest, diagonal)
        meant = rows.float() if moments is None else compensated(rows, scheme.weights, scales, moments)
        found.append(packed(meant, scheme, scales, weight.dtype))
    tensors = {kind: torch.cat([each[kind] for each in found]) for kind in found[0] if kind not in _OF_MATRIX}
    whole = {kind: tensor for kind, tensor in found[0].items() if kind in _OF_MATRIX}
    if "weight_shape" in whole:
        whole["weight_shape"] = torch.tensor(weight.shape)
    return tensors | whole
