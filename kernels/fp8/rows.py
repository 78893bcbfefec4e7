"""FP8 rows, the inputs of GEMMs with FP8 weights: values are divided by a scale per row or per group of 128 columns.

A scale is the largest magnitude divided by 448, the largest float8_e4m3fn number (arXiv 2412.19437, section 3.3.2), so
nothing is clipped. A row's result depends on that row alone.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.kv.stored_values import FP8, FP8_MAX
from aerie.kernels.operation import Implementation, on_gpu, operation

GROUP = 128  # columns of a row that share a scale
SMALLEST = 1e-12  # minimum magnitude for a scale, which keeps rows of zeros zero
_ALIGNED = 16  # rows; scales stored by group are padded to a multiple of this, so that Triton compiles one kernel


@dataclass(frozen=True)
class Fp8Rows:
    """Rows in FP8, with scales.

    values: [rows, size] float8_e4m3fn.
    scales: float32 [rows, size / GROUP] per group, or [rows, 1] per row; any strides.
    plain: [rows, size] before quantisation, if requested.
    """

    values: Tensor
    scales: Tensor
    plain: Tensor | None = None

    @staticmethod
    def empty(rows: int, size: int, by_group: bool, rows_together: bool, device: torch.device) -> "Fp8Rows":
        """Return uninitialised rows.

        by_group: scales per group; else per row.
        rows_together: the scales of a group are contiguous, for large-batch GEMMs; else those of a row.
        """
        assert not by_group or size % GROUP == 0
        groups = size // GROUP if by_group else 1
        shape = (groups, -(-rows // _ALIGNED) * _ALIGNED) if rows_together else (rows, groups)
        scales = torch.empty(shape, dtype=torch.float32, device=device)
        if rows_together:
            scales = scales[:, :rows].t()
        return Fp8Rows(torch.empty((rows, size), dtype=FP8, device=device), scales)


@dataclass(frozen=True)
class Fp8Inputs:
    """The FP8 format of rows that a layer accepts.

    by_group: scales per group of columns; else per row.
    many: with more rows than this, the scales of a group are contiguous (see `rows_together`).
    plain: whether the layer also needs the rows in the model's dtype.
    """

    by_group: bool
    many: int
    plain: bool = False

    def check(self, x: Fp8Rows, size: int, many: int | None = None) -> None:
        """Assert that x has this format, and rows of `size` numbers.

        many: with more rows than this, scales may have any strides; None: `self.many`.
        """
        rows = x.values.shape[0]
        assert x.values.shape == (rows, size) and x.values.dtype == FP8 and x.values.is_contiguous()
        assert x.scales.shape == (rows, size // GROUP if self.by_group else 1) and x.scales.dtype == torch.float32
        assert rows > (self.many if many is None else many) or x.scales.is_contiguous(), "scales are contiguous"

    def empty(self, x: Tensor) -> Fp8Rows:
        """Return uninitialised rows of the shape of x [rows, size]."""
        rows, size = x.shape
        out = Fp8Rows.empty(rows, size, self.by_group, rows > self.many, x.device)
        return Fp8Rows(out.values, out.scales, torch.empty_like(x)) if self.plain else out


def _check(x: Tensor, by_group: bool, rows_together: bool = False, gated: bool = False) -> None:
    assert x.dim() == 2 and x.stride(1) == 1 and x.is_floating_point() and x.itemsize in (2, 4)
    assert not gated or x.shape[1] % 2 == 0


@operation(Implementation("triton", "aerie.kernels.fp8.rows_triton:quantize_rows", on_gpu), contract=_check)
def quantize_rows(x: Tensor, by_group: bool, rows_together: bool = False, gated: bool = False) -> Fp8Rows:
    """Return x in FP8; gated: silu(gate) * up in FP8.

    x              [rows, size], or gated [rows, 2 * size]: gate, then up; 16 or 32 bits, last stride 1
    by_group       scales per group of 128 columns, which divides `size`; else per row
    rows_together  see `Fp8Rows.empty`
    """
    if gated:
        gate, up = x.chunk(2, dim=-1)
        x = F.silu(gate) * up
    out = Fp8Rows.empty(x.shape[0], x.shape[1], by_group, rows_together, x.device)
    groups = x.float().view(x.shape[0], -1, GROUP if by_group else x.shape[1])
    scales = groups.abs().amax(-1).clamp(min=SMALLEST) / FP8_MAX
    out.scales.copy_(scales)
    out.values.copy_((groups / scales.unsqueeze(-1)).to(FP8).flatten(1))
    return out


def dequantized_rows(rows: Fp8Rows) -> Tensor:
    """Return values times scales, [rows, size] float32, for references and tests."""
    group = rows.values.shape[1] // rows.scales.shape[1]
    return rows.values.float() * rows.scales.repeat_interleave(group, 1)
