"""Scales and codes of one matrix: searches the ranges, and compensates the error of each rounded column in later ones
(GPTQ: Frantar et al. 2023, algorithm 1); the library computes scales from ranges, rounds and packs. Also writes a
checkpoint's folder shard by shard under a temporary name, and renames it at the end."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from aerie.cluster.config import ConfigError
from aerie.deploy.quantize.schemes import Scheme
from aerie.workers.models.weights import INDEX

# Searched ranges of a group's codes, as shares of its largest magnitude. In practice the best share is never below 0.6.
SHRINKS = tuple(1.0 - step / 32 for step in range(14))
_SEARCHED = 1 << 19  # weights whose errors are computed at once: 2 MB, about the size of a core's cache
_PACKED = 1 << 21  # weights that are packed at once
_COMPENSATED = 1 << 24  # weights that are compensated at once; larger matrices are split by rows
_PER_MATRIX = ("weight_shape", "weight_global_scale")  # tensors without a dimension of rows
_DAMPING = 0.01  # share of the mean second moment that is added to all, as in the paper
_BLOCK = 128  # columns whose errors are applied to later ones at once


@dataclass(frozen=True)
class Scales:
    """The scales and zero points of one matrix.

    scale: [rows, groups] float32, rounded to the stored dtype.
    zero: [rows, groups] integers; None for symmetric codes.
    matrix: [1] float32 divisor of the scales (NVFP4); None without.
    """

    scale: Tensor
    zero: Tensor | None
    matrix: Tensor | None

    def rows(self, first: int, end: int) -> "Scales":
        zero = None if self.zero is None else self.zero[first:end]
        return Scales(self.scale[first:end], zero, self.matrix)


def find_scales(weight: Tensor, args: QuantizationArgs, largest: float, moments: Tensor | None = None) -> Scales:
    """Return the scales with the least squared error of each group's weights.

    weight: [rows, columns] of a floating dtype, which is the stored dtype of integer and FP8 scales.
    largest: largest magnitude in all matrices that share `Scales.matrix`, including this one.
    moments: [columns] float32 mean square of each input, the weights of the errors; None: equal weights.
    """
    matrix = None
    if args.strategy == "tensor_group":
        matrix = generate_gparam(torch.tensor(-largest), torch.tensor(largest))
    step = max(1, _SEARCHED // weight.shape[1])
    searched = [_search(rows, args, moments, matrix, weight.dtype) for rows in torch.split(weight, step)]
    zero = None if args.symmetric else torch.cat([zeros for _, zeros in searched])
    return Scales(torch.cat([scales for scales, _ in searched]), zero, matrix)


def _search(
    stored: Tensor, args: QuantizationArgs, moments: Tensor | None, matrix: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points of each group that minimize the squared error, among ranges narrowed by `SHRINKS`.

    stored: [outputs, inputs].
    moments: [inputs] mean squares of the inputs, as weights of the error; None: all equal.
    matrix: the whole matrix's scale; None for schemes without one.
    dtype: dtype of stored scales.
    """
    weight = stored.float()
    size = args.group_size or weight.shape[1]
    low, high = weight.view(len(weight), -1, size).aminmax(dim=2)
    least, best, best_zero = low.new_full(low.shape, torch.inf), low, low
    for shrink in SHRINKS:
        scale, zero = calculate_qparams(low * shrink, high * shrink, args, global_scale=matrix)
        if args.scale_dtype is None:
            scale = scale.to(dtype).float().clamp(min=torch.finfo(dtype).tiny)
        scales = Scales(scale, None if args.symmetric else zero, matrix)
        error = (rounded(weight, args, scales) - weight).square_()
        if moments is not None:
            error *= moments
        total = error.view(len(error), -1, size).sum(2)
        is_better = total < least
        least, best = torch.where(is_better, total, least), torch.where(is_better, scale, best)
        best_zero = torch.where(is_better, zero, best_zero.to(zero.dtype))
    return best, best_zero


def rounded(weight: Tensor, args: QuantizationArgs, scales: Scales) -> Tensor:
    """Round a float32 weight [rows, columns] to the nearest codes, and return their values in float32."""
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
    scale, zero = (None if part is None else part.t()[group] for part in (scales.scale, scales.zero))
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

    meant: [rows, columns] float32 values of the codes, or a weight to round.
    dtype: dtype of scales, if the format does not define one.
    """
    by_kind: dict[str, Tensor] = {"weight": meant, "weight_scale": scales.scale}
    if scales.zero is not None:
        by_kind["weight_zero_point"] = scales.zero
    if scales.matrix is not None:
        by_kind["weight_global_scale"] = scales.matrix
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    tensors: dict[str, Tensor] = compressor.compress(by_kind, scheme.scheme)
    if scheme.weights.scale_dtype is None:
        tensors["weight_scale"] = tensors["weight_scale"].to(dtype)
    return {kind: tensor.contiguous() for kind, tensor in tensors.items()}


def quantised(weight: Tensor, scheme: Scheme, largest: float, moments: Tensor | None) -> dict[str, Tensor]:
    """Return the packed tensors of a matrix [rows, columns].

    largest: see `find_scales`.
    moments: see `compensated`; None: unknown inputs.
    """
    diagonal = None if moments is None else moments.diagonal()
    size = _PACKED if moments is None else _COMPENSATED
    step = max(32, size // weight.shape[1] // 32 * 32)  # 32 rows are whole words of zero points
    parts = []
    for rows in torch.split(weight, step):
        scales = find_scales(rows, scheme.weights, largest, diagonal)
        meant = rows.float() if moments is None else compensated(rows, scheme.weights, scales, moments)
        parts.append(packed(meant, scheme, scales, weight.dtype))
    tensors = {kind: torch.cat([part[kind] for part in parts]) for kind in parts[0] if kind not in _PER_MATRIX}
    whole = {kind: tensor for kind, tensor in parts[0].items() if kind in _PER_MATRIX}
    if "weight_shape" in whole:
        whole["weight_shape"] = torch.tensor(weight.shape)
    return tensors | whole


_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@contextlib.contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `output` at the end of the context, or removed after an exception.
    Raises ConfigError if `output` exists."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: is there already; remove it, or name another folder")
    folder = output.with_name(f".{output.name}.unfinished")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        raise ConfigError(f"{folder}: is left of a run that was killed, or another one is writing; remove it") from None
    try:
        yield folder
        if output.is_dir():
            output.rmdir()
        folder.rename(output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class ShardWriter:
    """Collects tensors up to `max_bytes`, then writes them to a file.

    folder: has a config.json, whose permissions the files get.
    num_bytes: written so far.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._names: list[list[str]] = []
        self.num_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add a tensor. Raises ConfigError if a file cannot be written."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._waiting and self._waiting_bytes + size > self._max_bytes:
            self._flush()
        self._waiting.update(tensors)
        self._waiting_bytes += size

    def _flush(self) -> None:
        """Write the waiting tensors to the next file."""
        path = self._folder / f"{len(self._names)}.safetensors"
        try:
            save_file(self._waiting, str(path), {"format": "pt"})
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path}: cannot be written ({error}); free some space, or set --output elsewhere"
            ) from None
        shutil.copymode(self._folder / "config.json", path)  # safetensors makes it readable by its owner only
        self._names.append(list(self._waiting))
        self.num_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    def finish(self) -> None:
        """Write the remaining tensors, name the files, and write the index if there are several."""
        if self._waiting:
            self._flush()
        count = len(self._names)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._names):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
            (self._folder / f"{i}.safetensors").rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            content = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True))


def copy_others(source: Path, folder: Path, quantization: Mapping[str, Any]) -> None:
    """Copy the tokenizer, templates and other files, and write config.json with the quantization_config."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"quantization_config": dict(quantization)}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
