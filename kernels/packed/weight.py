"""`PackedWeight`: the memory layout of all 4- and 8-bit weights. `pack` builds it once at load.

    weight[n, k] = (code[n, k] - zero[n, k / group]) * scale[n, k / group] * row_scale[n]

Kernels load codes directly into the registers of tensor-core operands. A tile of 64 outputs and 64 inputs is 512 (int8:
1024) words, of which each lane of a warp reads 16 bytes at a time. They are the lane's part of the first operand of
four m16n8k16 products with 16 outputs (int8: two). The order of inputs in these four is arbitrary, if rows have the
same order. So a lane has two groups of 8 adjacent inputs, and reads 16 bytes of a row at a time.

With lane = 4 g + t, outputs n = 64 J + 16 i + 8 h + g, and inputs k = 64 C + 32 s + 8 t + 4 r + 2 u + p:

    int4, e2m1   codes[J, C, i, g, t, 2 s + r], 4 bits at 16 p + 8 u + 4 h
    int8         codes[J, C, i, s, g, t, 2 r + u], 8 bits at 16 p + 8 h
    scales, zeros[J, group, g, i, h]: 8 per lane, 16 bytes

Outputs and inputs are padded to multiples of 64 with codes and scales of zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Code = Literal["int4", "int8", "e2m1"]

TILE = 64  # outputs, and inputs, of a tile of codes
BITS: dict[Code, int] = {"int4": 4, "int8": 8, "e2m1": 4}
SYMMETRIC_ZERO: dict[Code, int] = {"int4": 8, "int8": 128, "e2m1": 0}
SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, table 4; bit 3 is the sign
_MAX_SCRATCH_VALUES = 1 << 24  # codes packed or dequantised at once


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out_features, in_features], or one per expert: then every tensor has a leading dimension for experts.

    codes: int32, in the order above.
    scales: bfloat16, float16 or float32 as given to `pack`, in the order above.
    zeros: int16, in the order of scales; None: 8 for int4, 128 for int8, 0 for e2m1.
    row_scale: float32 [out_features], multiplies an output's sum; or None.
    group: inputs that share a scale and a zero.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    row_scale: Tensor | None
    out_features: int
    in_features: int
    group: int
    code: Code

    @property
    def num_experts(self) -> int | None:
        """None for the weight of a linear layer."""
        return None if self.scales.dim() == 5 else self.scales.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight that a product reads."""
        tensors = (self.codes, self.scales, self.zeros, self.row_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def expert(self, index: int) -> "PackedWeight":
        """Return one expert's weight, a view."""
        zeros = None if self.zeros is None else self.zeros[index]
        row_scale = None if self.row_scale is None else self.row_scale[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], zeros=zeros, row_scale=row_scale)


def pack(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, row_scale: Tensor | None, group: int, code: Code
) -> PackedWeight:
    """Build a weight on the device of its codes, without loss.

    codes: [N, K] or [experts, N, K] uint8: int4 0 to 15, int8 0 to 255, e2m1 the 4 bits as stored.
    scales: [.., N, K / group] bfloat16, float16 or float32, stored in this dtype. e8m0 scales (MXFP4) and e4m3 scales
        (NVFP4) are exact in bfloat16.
    zeros: [.., N, K / group] of any dtype, whole numbers in the range of the codes; None: symmetric; None for e2m1.
    row_scale: [.., N] float32, for example NVFP4's scale per tensor; or None.
    group: a divisor of K and a multiple of 32, K itself (a scale per output), or 16 for e2m1.

    Raises ValueError naming the argument.
    """
    *experts, n, k = codes.shape
    _check(codes, scales, zeros, row_scale, group, code)
    if experts:
        weights = empty(
            n, k, group, code, codes.device, scales.dtype, zeros is not None, row_scale is not None, *experts
        )
        for index in range(experts[0]):
            each = weights.expert(index)
            _fill(each, codes[index], scales[index], None if zeros is None else zeros[index])
            if each.row_scale is not None and row_scale is not None:
                each.row_scale.copy_(row_scale[index])
        return weights
    weight = empty(n, k, group, code, codes.device, scales.dtype, zeros is not None, row_scale is not None)
    _fill(weight, codes, scales, zeros)
    if weight.row_scale is not None and row_scale is not None:
        weight.row_scale.copy_(row_scale)
    return weight


def empty(
    n: int,
    k: int,
    group: int,
    code: Code,
    device: torch.device,
    scale_dtype: torch.dtype,
    has_zeros: bool,
    has_row_scale: bool,
    *experts: int,
) -> PackedWeight:
    """Return an uninitialised weight [*experts, n, k]."""
    tiles, chunks = -(-n // TILE), -(-k // TILE)
    words = (4, 8, 4, 4) if BITS[code] == 4 else (4, 2, 8, 4, 4)
    scales = torch.empty((*experts, tiles, -(-chunks * TILE // group), 8, 4, 2), dtype=scale_dtype, device=device)
    return PackedWeight(
        torch.empty((*experts, tiles, chunks, *words), dtype=torch.int32, device=device),
        scales,
        torch.empty_like(scales, dtype=torch.int16) if has_zeros else None,
        torch.empty((*experts, n), dtype=torch.float32, device=device) if has_row_scale else None,
        n,
        k,
        group,
        code,
    )


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return [out_features, in_features] of `dtype`, with a leading dimension if there are experts.

    Computed in float32 and rounded once; float32 results are exact with 16-bit scales and no `row_scale`.
    """
    n, k, count = weight.out_features, weight.in_features, weight.num_experts
    if count is not None:
        out = torch.empty((count, n, k), dtype=dtype, device=weight.codes.device)
        for index in range(count):
            out[index].copy_(dequantize(weight.expert(index), dtype))
        return out
    out = torch.empty((n, k), dtype=dtype, device=weight.codes.device)
    for tiles, rows in _slices(n, k):
        values = _values(_unpacked(weight.codes[tiles], weight.code), weight)
        groups = _plain(weight.scales[tiles].float())
        if weight.code != "e2m1":
            zeros = weight.zeros
            values -= SYMMETRIC_ZERO[weight.code] if zeros is None else _spread(_plain(zeros[tiles].float()), weight)
        values *= _spread(groups, weight)
        values = values[: out[rows].shape[0], :k]
        out[rows].copy_(values if weight.row_scale is None else values * weight.row_scale[rows, None])
    return out


def plain_codes(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments codes, scales and zeros of `pack`; for a linear layer."""
    n, k, groups = weight.out_features, weight.in_features, -(-weight.in_features // weight.group)
    codes = torch.cat([_unpacked(weight.codes[tiles], weight.code).to(torch.uint8) for tiles, _ in _slices(n, k)])
    scales, zeros = (None if each is None else _plain(each)[:n, :groups] for each in (weight.scales, weight.zeros))
    assert scales is not None
    return codes[:n, :k], scales, zeros


def without_memory(weight: PackedWeight) -> PackedWeight:
    """Return the sizes of a weight whose numbers are elsewhere, with tensors on the meta device."""
    zeros = None if weight.zeros is None else weight.zeros.to("meta")
    row_scale = None if weight.row_scale is None else weight.row_scale.to("meta")
    codes, scales = weight.codes.to("meta"), weight.scales.to("meta")
    return replace(weight, codes=codes, scales=scales, zeros=zeros, row_scale=row_scale)


def _check(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, row_scale: Tensor | None, group: int, code: Code
) -> None:
    if code not in BITS:
        raise ValueError(f"code={code!r}: must be one of {', '.join(BITS)}")
    if codes.dtype != torch.uint8 or codes.dim() not in (2, 3):
        raise ValueError(f"codes: {codes.dtype} {list(codes.shape)}: must be uint8 [N, K] or [experts, N, K]")
    *leading, k = codes.shape
    if group < 1 or k % group or not (group == k or group % 32 == 0 or (group == 16 and code == "e2m1")):
        raise ValueError(f"group={group}: must divide K={k} and be a multiple of 32, K, or 16 for e2m1")
    if scales.dtype not in SCALE_TYPES or scales.shape != (*leading, k // group):
        raise ValueError(
            f"scales: {scales.dtype} {list(scales.shape)}: must be 16- or 32-bit floats {[*leading, k // group]}"
        )
    if zeros is not None and (code == "e2m1" or zeros.shape != scales.shape):
        raise ValueError(f"zeros: {list(zeros.shape)}: must have the scales' shape, and be None for e2m1")
    if row_scale is not None and row_scale.shape != tuple(leading):
        raise ValueError(f"row_scale: {list(row_scale.shape)}: must be {leading}")


def _slices(n: int, k: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of tiles, and of the outputs in them, that bound scratch memory."""
    step = max(1, _MAX_SCRATCH_VALUES // (k * TILE))
    for first in range(0, -(-n // TILE), step):
        yield slice(first, first + step), slice(first * TILE, min(n, (first + step) * TILE))


def _fill(weight: PackedWeight, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
    for tiles, rows in _slices(*codes.shape):
        weight.codes[tiles].copy_(_packed(codes[rows], weight.code))
        weight.scales[tiles].copy_(_by_lane(scales[rows], weight.scales.shape[1]))
        if weight.zeros is not None and zeros is not None:
            weight.zeros[tiles].copy_(_by_lane(zeros[rows], weight.scales.shape[1]))


def _padded(values: Tensor, columns: int) -> Tensor:
    """Pad [rows, columns] with zeros to full tiles of outputs and `columns`."""
    rows = -(-values.shape[0] // TILE) * TILE
    if values.shape == (rows, columns):
        return values
    out = values.new_zeros((rows, columns))
    out[: values.shape[0], : values.shape[1]].copy_(values)
    return out


def _packed(codes: Tensor, code: Code) -> Tensor:
    """Return the words of codes [rows, K] uint8."""
    codes = _padded(codes, -(-codes.shape[1] // TILE) * TILE)
    tiles, chunks = codes.shape[0] // TILE, codes.shape[1] // TILE
    # J i h g C s t r u p
    parts = codes.view(tiles, 4, 2, 8, chunks, 2, 4, 2, 2, 2)
    four = BITS[code] == 4
    words = torch.zeros((), dtype=torch.int32, device=codes.device)
    for p in range(2):
        for h in range(2):
            for u in range(2) if four else (None,):
                shift = 16 * p + (8 * h if u is None else 8 * u + 4 * h)
                cell = parts[:, :, h, ..., p] if u is None else parts[:, :, h, ..., u, p]
                words = words | (cell.to(torch.int32) << shift)
    # J i g C s t r (u)
    if four:
        return words.permute(0, 3, 1, 2, 5, 4, 6).reshape(tiles, chunks, 4, 8, 4, 4)
    return words.permute(0, 3, 1, 4, 2, 5, 6, 7).reshape(tiles, chunks, 4, 2, 8, 4, 4)


def _unpacked(words: Tensor, code: Code) -> Tensor:
    """Return codes [rows, K] int32 of the words of whole tiles."""
    tiles, chunks = words.shape[:2]
    out = torch.empty((tiles, 4, 2, 8, chunks, 2, 4, 2, 2, 2), dtype=torch.int32, device=words.device)
    if BITS[code] == 4:
        words = words.view(tiles, chunks, 4, 8, 4, 2, 2).permute(0, 2, 3, 1, 5, 4, 6)
        for p, u, h in ((p, u, h) for p in range(2) for u in range(2) for h in range(2)):
            out[:, :, h, ..., u, p] = (words >> (16 * p + 8 * u + 4 * h)) & 15
    else:
        words = words.view(tiles, chunks, 4, 2, 8, 4, 2, 2).permute(0, 2, 4, 1, 3, 5, 6, 7)
        for p, h in ((p, h) for p in range(2) for h in range(2)):
            out[:, :, h, ..., p] = (words >> (16 * p + 8 * h)) & 255
    return out.view(tiles * TILE, chunks * TILE)


def _values(codes: Tensor, weight: PackedWeight) -> Tensor:
    """Return the numbers of codes, float32."""
    if weight.code != "e2m1":
        return codes.float()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)
    return table[codes]


def _by_lane(groups: Tensor, num_groups: int) -> Tensor:
    """Return scales or zeros [rows, groups] in the order of lanes."""
    groups = _padded(groups, num_groups)
    # J i h g G
    return groups.view(-1, 4, 2, 8, num_groups).permute(0, 4, 3, 1, 2)


def _plain(by_lane: Tensor) -> Tensor:
    """Undo `_by_lane`: [rows, groups]."""
    return by_lane.permute(0, 3, 4, 2, 1).reshape(-1, by_lane.shape[1])


def _spread(groups: Tensor, weight: PackedWeight) -> Tensor:
    """Repeat [rows, groups] to [rows, padded inputs]."""
    columns = -(-weight.in_features // TILE) * TILE
    return groups.repeat_interleave(weight.group, 1)[:, :columns]
