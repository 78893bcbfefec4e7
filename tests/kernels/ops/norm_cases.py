"""`aerie.kernels.norm.norm` and `aerie.kernels.norm.norm`: one row, odd widths, more rows than programs run at
once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.norm.norm import add_rms_norm, gelu_mul, rms_norm, sigmoid_mul, silu_mul
from tests.kernels.ops.case import TYPES, Case

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


def _float_weight(residual: bool) -> Callable[[torch.device], tuple[Any, ...]]:
    """A weight of float32 beside rows of bfloat16."""

    def arguments(device: torch.device) -> tuple[Any, ...]:
        *x, _, eps = _norm(5, 896, torch.bfloat16, residual)(device)
        return *x, rows(896, dtype=torch.float32, device=device, seed=2), eps

    return arguments


def _gated(
    count: int, heads: int, size: int, width: int, added: bool, dtype: torch.dtype
) -> Callable[[torch.device], tuple[Any, ...]]:
    """Gates that lie beside other numbers."""

    def arguments(device: torch.device) -> tuple[Any, ...]:
        x, more = (rows(count, heads, size, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
        gate = rows(count, heads, 3 + width, dtype=dtype, device=device, seed=2)[..., 3:]
        return x, gate, more if added else None

    return arguments


def _gates(count: int, size: int, dtype: torch.dtype) -> Callable[[torch.device], tuple[Any, ...]]:
    return lambda device: (rows(count, 2 * size, dtype=dtype, device=device),)


CASES = (
    *(
        Case(operation, f"float-weight-{residual}", _float_weight(residual), written=(1,) if residual else ())
        for operation, residual in ((rms_norm, False), (add_rms_norm, True))
    ),
    *(
        Case(
            sigmoid_mul,
            f"{count}x{heads}x{size}-{width}-{added}-{dtype}",
            _gated(count, heads, size, width, added, dtype),
        )
        for count, heads, size, width, added in ((5, 6, 256, 256, False), (1, 1, 2048, 1, True), (3, 2, 24, 24, True))
        for dtype in TYPES
    ),
) + tuple(
    case
    for count, size in SIZES
    for dtype in TYPES
    for name in (f"{count}x{size}-{str(dtype).removeprefix('torch.')}",)
    for case in (
        Case(rms_norm, name, _norm(count, size, dtype, residual=False), slow=count > 5),
        Case(add_rms_norm, name, _norm(count, size, dtype, residual=True), written=(1,), slow=count > 5),
        Case(silu_mul, name, _gates(count, size, dtype), slow=count > 5),
        Case(gelu_mul, name, _gates(count, size, dtype), slow=count > 5),
    )
)
