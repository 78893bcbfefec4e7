"""Rows in FP8: groups and whole rows, of zeros, tiny and huge numbers; alone and gated."""

from typing import Any

import torch

from aerie.kernels.fp8.product import fp8_rms_norm
from aerie.kernels.fp8.rows import GROUP, Fp8Inputs, dequantized_rows, quantize_rows
from tests.kernels.ops.case import TYPES, Case
from tests.kernels.ops.norm_cases import rows


def _rows(
    count: int, size: int, dtype: torch.dtype, by_group: bool, together: bool, gated: bool, device: torch.device
) -> tuple[Any, ...]:
    x = rows(count, size * (1 + gated), dtype=dtype, device=device)
    x[1 % count, :GROUP], x[2 % count], x[3 % count, 7] = 1e-20, 0.0, 3e4
    return x, by_group, together, gated


def _norm(
    count: int, size: int, dtype: torch.dtype, residual: bool, wanted: Fp8Inputs, device: torch.device
) -> tuple[Any, ...]:
    x, stream = (rows(count, size, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    return x, stream if residual else None, rows(size, dtype=dtype, device=device) + 1.0, 1e-5, wanted.empty(x)


CASES = (
    *(
        Case(
            fp8_rms_norm,
            f"{count}x{size}-{residual}-{wanted.by_group}-{wanted.plain}-{dtype}",
            lambda device, given=(count, size, dtype, residual, wanted): _norm(*given, device),
            tolerance=0.072,
            seen=lambda arguments, result: (
                dequantized_rows(result),
                result.scales,
                result.plain,
                *([arguments[1]] if arguments[1] is not None else []),
            ),
            slow=count > 5,
        )
        for count, size in ((5, 896), (1, 128), (130, 512))
        for dtype in TYPES
        for residual in (True, False)
        for wanted in (Fp8Inputs(True, 3, plain=True), Fp8Inputs(False, 128))
    ),
    *(
        Case(
            quantize_rows,
            f"{count}x{size}-{by_group}-{together}-{gated}-{dtype}",
            lambda device, given=(count, size, dtype, by_group, together, gated): _rows(*given, device),
            # which number of eight bits is nearest may change with the last bit of a quotient: by at most 32 of 448
            tolerance=0.072,
            seen=lambda arguments, result: (dequantized_rows(result), result.scales),
            slow=count > 5,
        )
        for count, size in ((5, 1408), (1, 128), (130, 512))
        for dtype in TYPES
        for by_group in (True, False)
        for together in (False, True)
        for gated in (False, True)
    ),
)
