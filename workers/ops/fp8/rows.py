"""Rows in FP8: each number is stored divided by a scale, which its row or its group of 128 columns shares.

Products of FP8 weights read such rows. A scale is the largest magnitude over 448, the largest float8_e4m3fn number
(arXiv 2412.19437, section 3.3.2), so that nothing is clipped. A row's result depends on that row alone.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.ops.operation import Implementation, on_gpu, operation

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128  # columns of a row that share a scale
_SMALLEST = 1e-12  # least magnitude that a scale is computed from, so that rows of zeros stay zeros
_ALIGNED = 16  # rows; scales that lie by groups are padded to a multiple, so that Triton compiles one kernel for all


@dataclass(frozen=True)
class Fp8Rows:
    """values: [rows, size] float8_e4m3fn.
    scales: [rows, size / GROUP] float32 of groups, or [rows, 1] of whole rows; of any strides.
    plain: [rows, size], the same rows before rounding to FP8, where a caller asked for them.
    """

    values: Tensor
    scales: Tensor
    plain: Tensor | None = None

    @staticmethod
    def empty(rows: int, size: int, by_group: bool, rows_together: bool, device: torch.device) -> "Fp8Rows":
        """Uninitialised. rows_together: the scales of one group lie side by side, for products that read many rows at
        once; else those of one row."""
        assert not by_group or size % GROUP == 0
        groups = size // GROUP if by_group else 1
        shape = (groups, -(-rows // _ALIGNED) * _ALIGNED) if rows_together else (rows, groups)
        scales = torch.empty(shape, dtype=torch.float32, device=device)
        if rows_together:
            scales = scales[:, :rows].t()
        return Fp8Rows(torch.empty((rows, size), dtype=FP8, device=device), scales)


@dataclass(frozen=True)
class Fp8Inputs:
    """The form of FP8 in which a layer accepts its rows, for the operation that computes them.

    by_group: scales of groups of columns, else of whole rows.
    many: above this number of rows the scales of one group lie side by side.
    plain: whether the rows are needed in the model's type too.
    """

    by_group: bool
    many: int
    plain: bool = False

    def empty(self, x: Tensor) -> Fp8Rows:
        """Uninitialised rows, as many and as wide as those of x [rows, size]."""
        rows, size = x.shape
        out = Fp8Rows.empty(rows, size, self.by_group, rows > self.many, x.device)
        return Fp8Rows(out.values, out.scales, torch.empty_like(x)) if self.plain else out


@operation(Implementation("triton", "workers.ops.fp8.rows_triton:quantize_rows", on_gpu))
def quantize_rows(x: Tensor, by_group: bool, rows_together: bool = False, gated: bool = False) -> Fp8Rows:
    """x in FP8; with `gated`, silu(gate) * up in FP8.

    x              [rows, size], or with `gated` [rows, 2 * size]: gate, then up; 16 or 32 bits, last stride 1
    by_group       scales of groups, which divide `size`; else of whole rows
    rows_together  see `Fp8Rows.empty`
    """
    if gated:
        gate, up = x.chunk(2, dim=-1)
        x = F.silu(gate) * up
    out = Fp8Rows.empty(x.shape[0], x.shape[1], by_group, rows_together, x.device)
    groups = x.float().view(x.shape[0], -1, GROUP if by_group else x.shape[1])
    scales = groups.abs().amax(-1).clamp(min=_SMALLEST) / FP8_MAX
    out.scales.copy_(scales)
    out.values.copy_((groups / scales.unsqueeze(-1)).to(FP8).flatten(1))
    return out


def dequantized_rows(rows: Fp8Rows) -> Tensor:
    """[rows, size] float32: values times scales. For references and tests."""
    group = rows.values.shape[1] // rows.scales.shape[1]
    return rows.values.float() * rows.scales.repeat_interleave(group, 1)
