"""Announced tensors, and the bytes of each broadcast: vLLM's format of packed transfers (vLLM 0.33).
Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        *(torch.int64, torch.int32, torch.uint8, torch.bool),
    )
}
BUFFER_BYTES = 1 << 30  # vLLM's default


@dataclass(frozen=True)
class Announced:
    """A tensor that the trainer will send. name: its name in checkpoints."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def header(self) -> Tensor:
        """Return the tensor on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def announced(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[Announced, ...]:
    """Return the announced tensors. dtypes: such as "bfloat16" or "torch.bfloat16". Raises ValueError, naming the
    tensor."""
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"there are {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} shapes")
    entries = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        known = DTYPES.get(dtype.removeprefix("torch."))
        if known is None:
            raise ValueError(f"{name}: dtype {dtype!r} is not supported; there are {', '.join(DTYPES)}")
        if any(size < 0 for size in shape):
            raise ValueError(f"{name}: shape {tuple(shape)} is negative")
        entries.append(Announced(name, known, tuple(shape)))
    return tuple(entries)


def broadcasts(tensors: Iterable[Announced], packed: bool, buffer_bytes: int) -> Iterator[tuple[Announced, ...]]:
    """Yield the tensors of each broadcast, in their order. packed: tensors are added to a broadcast until its bytes
    exceed `buffer_bytes`; else each has a broadcast of its own."""
    chunk, size = list[Announced](), 0
    for tensor in tensors:
        chunk.append(tensor)
        size += tensor.num_bytes
        if not packed or size > buffer_bytes:
            yield tuple(chunk)
            chunk, size = [], 0
    if chunk:
        yield tuple(chunk)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as uint8 [bytes]."""
    return tensor.reshape(-1).view(torch.uint8)


def cut(buffer: Tensor, chunk: Sequence[Announced]) -> Iterator[tuple[Announced, Tensor]]:
    """Yield each tensor of a broadcast with its bytes, uint8 views of `buffer`."""
    start = 0
    for tensor in chunk:
        yield tensor, buffer[start : start + tensor.num_bytes]
        start += tensor.num_bytes
