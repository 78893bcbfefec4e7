"""Sum of the ranks' parts in rank order, after a collective that only moved them."""

import torch
from torch import Tensor

from aerie.kernels.operation import Implementation, on_gpu, operation


def _check(parts: Tensor) -> None:
    assert parts.dim() == 2 and parts.is_contiguous() and parts.shape[0] > 0


@operation(
    Implementation("triton", "aerie.kernels.collectives.sum_in_order_triton:sum_in_order", on_gpu), contract=_check
)
def sum_in_order(parts: Tensor) -> Tensor:
    """Return the sum of the parts, added one after another in float32 and rounded once; wider types in their own.

    parts  [ranks, n], contiguous
    ->     [n], in the parts' dtype
    """
    is_narrow = parts.is_floating_point() and parts.itemsize < 4
    total = parts[0].to(torch.float32 if is_narrow else parts.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
