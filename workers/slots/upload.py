"""Copies a step's arrays from the host to the device, in one copy. Used by `aerie.workers.runner.plan_batch`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aerie.kernels.capability import ALIGNED_BYTES, Capability
from aerie.kernels.to_device import to_device

Columns = Mapping[str, npt.NDArray[Any]]

_TORCH: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def upload(columns: Columns, device: torch.device) -> dict[str, Tensor]:
    """Copy arrays (int64, int32, float32 or bool, any shape) to `device`. Makes one asynchronous copy, because each
    copy through pinned memory takes tens of microseconds of the host, regardless of its size."""
    if not columns or Capability.of(device).shares_host_memory:
        return {name: torch.from_numpy(np.array(array)) for name, array in columns.items()}
    kinds: dict[np.dtype[Any], list[str]] = {}
    for name, array in columns.items():
        kinds.setdefault(array.dtype, []).append(name)
    host, ends = _packed(columns, kinds)
    sent: dict[str, Tensor] = {}
    regions = to_device(host, device).split(ends)  # type: ignore[no-untyped-call]
    for (kind, names), region in zip(kinds.items(), regions, strict=True):
        unit = columns[names[0]].itemsize
        sizes = [size for name in names for size in _size_and_padding(columns[name].nbytes, unit)]
        for name, piece in zip(names, region.view(_TORCH[kind]).split(sizes)[::2], strict=True):
            sent[name] = piece if columns[name].ndim == 1 else piece.view(columns[name].shape)
    return sent


def _packed(columns: Columns, kinds: Mapping[np.dtype[Any], list[str]]) -> tuple[Tensor, list[int]]:
    """Return all columns as one [n] uint8 tensor, grouped by dtype, and the number of bytes of each group."""
    parts: list[bytes] = []
    sizes = []
    for names in kinds.values():
        before = len(parts)
        for name in names:
            _, padding = _size_and_padding(columns[name].nbytes, 1)
            parts += (columns[name].tobytes(), bytes(padding))
        sizes.append(sum(map(len, parts[before:])))
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), sizes


def _size_and_padding(num_bytes: int, unit: int) -> tuple[int, int]:
    """Return an array's size, and the padding to the next multiple of the alignment, in units of `unit` bytes."""
    return num_bytes // unit, -num_bytes % ALIGNED_BYTES // unit
