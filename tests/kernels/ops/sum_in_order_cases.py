"""`aerie.kernels.collectives.all_reduce`: terms whose sum depends on the order, and odd lengths."""

from collections.abc import Callable
from typing import Any

import torch

from aerie.kernels.collectives.all_reduce import sum_in_order
from tests.kernels.ops.case import Case


def _parts(ranks: int, n: int, dtype: torch.dtype) -> Callable[[torch.device], tuple[Any, ...]]:
    """2^24, 1, -2^24 and others in turn, so that float32 sums depend on the order."""

    def arguments(device: torch.device) -> tuple[Any, ...]:
        terms = torch.tensor([2.0**24, 1.0, -(2.0**24), 3.0, 1.0])
        return (terms[(torch.arange(ranks)[:, None] + torch.arange(n)) % 5].to(device, dtype),)

    return arguments


CASES = tuple(
    Case(sum_in_order, f"{ranks}-{n}-{str(dtype)[6:]}", _parts(ranks, n, dtype), exact=dtype == torch.float32)
    for ranks, n in ((1, 5), (2, 2048), (3, 2049), (4, 1), (8, 4100))
    for dtype in (torch.bfloat16, torch.float32)
)
