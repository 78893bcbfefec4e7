"""`HostWeight`: the memory layout of all weights that `aerie.kernels.gemm.host_cpp` multiplies.

A weight of integers is code * scale + offset, with a scale and perhaps an offset for each output and group of inputs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16  # outputs; `products.h`
GROUP = 32  # inputs that share a scale, in weights that `stored_exactly` turns into integers
FLOAT32, BFLOAT16, INT8, INT4 = range(4)  # `Format` in products.h
_STEP_ROWS = 2048  # outputs that are converted at a time, to bound scratch memory


@dataclass(frozen=True)
class HostWeight:
    """A weight [outputs, inputs], padded to whole blocks of outputs.

    codes: [blocks, inputs, 16] float32, bfloat16 or int8; INT4: [blocks, inputs / 2, 16] uint8, with input 2 i in the
        lower half of a byte; codes are 8 less than the halves.
    scales, offsets: [blocks, inputs / group, 16] float32, or None.
    group: inputs that share a scale; `inputs` for floats.
    """

    codes: Tensor
    scales: Tensor | None
    offsets: Tensor | None
    outputs: int
    inputs: int
    group: int
    format: int

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.offsets) if tensor is not None)


def stored_exactly(weight: Tensor) -> HostWeight:
    """Return a float32 weight [outputs, inputs] in the smallest format that loses nothing: int4 or int8 in groups of 32
    for dequantised weights (ggml's Q4_1 and Q8_0), bfloat16 for a checkpoint of bfloat16, else float32. Only the
    offsets of int4 are rounded, to float32."""
    n, k = weight.shape
    halves = _as_halves(weight)
    if halves is not None:
        return packed(*halves, GROUP, 4)
    integers = _as_integers(weight)
    if integers is not None:
        return HostWeight(
            _blocks(integers[0]), _blocks(integers[1]), offsets=None, outputs=n, inputs=k, group=GROUP, format=INT8
        )
    parts = (weight[first : first + _STEP_ROWS] for first in range(0, n, _STEP_ROWS))
    if all(torch.equal(part.bfloat16().float(), part) for part in parts):
        return HostWeight(
            _blocks(weight, torch.bfloat16), None, offsets=None, outputs=n, inputs=k, group=k, format=BFLOAT16
        )
    return HostWeight(_blocks(weight), None, offsets=None, outputs=n, inputs=k, group=k, format=FLOAT32)


def packed(codes: Tensor, scales: Tensor, offsets: Tensor | None, group: int, bits: int) -> HostWeight:
    """Return a weight of integers.

    codes: [outputs, inputs] uint8; 0 to 15, or 0 to 255, and stand for 8 or 128 less.
    scales, offsets: [outputs, inputs / group]; offsets may be None.
    bits: 4 or 8.
    """
    n, k = codes.shape
    if bits == 8:
        stored = _blocks((codes ^ 128).view(torch.int8))
    else:
        both = _blocks(codes)
        stored = both[:, 0::2] | both[:, 1::2] << 4
    offsets = None if offsets is None else _blocks(offsets.float())
    return HostWeight(
        stored,
        _blocks(scales.float()),
        offsets=offsets,
        outputs=n,
        inputs=k,
        group=group,
        format=INT8 if bits == 8 else INT4,
    )


def _as_halves(weight: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return codes [outputs, inputs] uint8 of 4 bits, and scales and offsets [outputs, groups] for `packed`; or None.

    ggml's Q4_1 has float16 scales d and minima m, and the largest and the smallest number of a group have the codes 15
    and 0. So m and d follow from these two, and a number is d * code + m in float32, rounded twice.
    """
    n, k = weight.shape
    if k % GROUP:
        return None
    codes = torch.empty((n, k), dtype=torch.uint8)
    scales, offsets = (torch.empty((n, k // GROUP), dtype=torch.float32) for _ in range(2))
    for first in range(0, n, _STEP_ROWS):
        groups = weight[first : first + _STEP_ROWS].view(-1, k // GROUP, GROUP)
        low, high = groups.aminmax(dim=-1)
        scale = ((high - low) / 15.0).half().float()
        steps = (groups - low.unsqueeze(-1)) / scale.clamp_min(torch.finfo().tiny).unsqueeze(-1)
        near = steps.round().clamp(0, 15)
        if not torch.equal(near * scale.unsqueeze(-1) + low.unsqueeze(-1), groups):
            return None
        rows = slice(first, first + groups.shape[0])
        codes[rows], scales[rows] = near.view(-1, k).to(torch.uint8), scale
        offsets[rows] = low + 8.0 * scale  # `packed` stores codes less 8
    return codes, scales, offsets


def _as_integers(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return int8 codes [outputs, inputs] and float32 scales [outputs, groups] whose products are `weight`, or None."""
    n, k = weight.shape
    if k % GROUP:
        return None
    codes, scales = torch.empty((n, k), dtype=torch.int8), torch.empty((n, k // GROUP))
    for first in range(0, n, _STEP_ROWS):
        groups = weight[first : first + _STEP_ROWS].view(-1, k // GROUP, GROUP)
        scale = groups.abs().amax(-1) / 127.0
        near = torch.round(groups / scale.clamp_min(torch.finfo().tiny).unsqueeze(-1))
        if not torch.equal(near * scale.unsqueeze(-1), groups):
            return None
        rows = slice(first, first + groups.shape[0])
        codes[rows], scales[rows] = near.view(-1, k).to(torch.int8), scale
    return codes, scales


def _blocks(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return [blocks, columns, 16] of a matrix [outputs, columns], with outputs of zero added."""
    n, k = matrix.shape
    out = torch.zeros((-(-n // BLOCK), k, BLOCK), dtype=dtype or matrix.dtype)
    for first in range(0, n, _STEP_ROWS):
        part = matrix[first : first + _STEP_ROWS]
        part = F.pad(part, (0, 0, 0, -part.shape[0] % BLOCK)) if part.shape[0] % BLOCK else part
        out[first // BLOCK : (first + part.shape[0]) // BLOCK] = part.view(-1, BLOCK, k).transpose(1, 2)
    return out
