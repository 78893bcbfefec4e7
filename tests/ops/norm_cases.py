"""`workers.ops.norm` and `workers.ops.activation`: one row, odd widths, more rows than programs run at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ops.case import TYPES, Case
from workers.ops.activation import silu_mul
from workers.ops.norm import add_rms_norm, rms_norm

SIZES = ((1, 4096), (5, 896), (130, 512), (3, 72))


def rows(*sizes: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(sum(sizes) + seed)
    return torch.randn(sizes, generator=generator).to(dtype).to(device)


def _norm(count: int, size: int, dtype: torch.dtype, residual: bool) -> Callable[[torch.device], tuple[Any, ...]]:
    def arguments(device: torch.device) -> tuple[Any, ...]:
        x = tuple(rows(count, size, dtype=dtype, device=device, seed=seed) for seed in range(1 + residual))
        return (*x, rows(size, dtype=dtype, device=device) + 1.0, 1e-5)

    return arguments


def _gates(count: int, size: int, dtype: torch.dtype) -> Callable[[torch.device], tuple[Any, ...]]:
    return lambda device: (rows(count, 2 * size, dtype=dtype, device=device),)


CASES = tuple(
    case
    for count, size in SIZES
    for dtype in TYPES
    for name in (f"{count}x{size}-{str(dtype).removeprefix('torch.')}",)
    for case in (
        Case(rms_norm, name, _norm(count, size, dtype, residual=False)),
        Case(add_rms_norm, name, _norm(count, size, dtype, residual=True), written=(1,)),
        Case(silu_mul, name, _gates(count, size, dtype)),
    )
)
