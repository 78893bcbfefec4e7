"""`aerie.kernels.norm.norm`: one row, odd widths, rows of the same token."""

import torch

from aerie.kernels.norm.norm import head_input
from tests.kernels.ops.case import TYPES, Case
from tests.kernels.ops.norm_cases import rows


def _case(count: int, size: int, dtype: torch.dtype) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        ids = torch.randint(0, 70, (count,), generator=torch.Generator().manual_seed(size)).to(device)
        table, hidden = (rows(n, size, dtype=dtype, device=device) for n in (70, count))
        weights = (rows(size, dtype=dtype, device=device, seed=seed) + 1.0 for seed in range(2))
        return ids, table, hidden, *weights, 1e-5

    return Case(head_input, f"{count}x{size}-{str(dtype).removeprefix('torch.')}", arguments)


CASES = tuple(_case(count, size, dtype) for count, size in ((1, 4096), (5, 896), (33, 72)) for dtype in TYPES)
