"""The largest logit of each row, and its column."""

import torch
from torch import Tensor

from aerie.kernels.operation import Implementation, on_gpu, operation

NOT_FINITE = -(1 << 40)  # column of a row whose largest logit is NaN or plus infinity


def _check(logits: Tensor, checked: bool = False) -> None:
    assert logits.dim() == 2 and logits.stride(1) == 1 and logits.is_floating_point()


@operation(Implementation("triton", "aerie.kernels.vocabulary.largest_triton:largest", on_gpu), contract=_check)
def largest(logits: Tensor, checked: bool = False) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit and its column, the smallest among equals.

    logits   [rows, size], any floating dtype, last stride 1
    checked  whether rows with NaN or plus infinity return column NOT_FINITE and a value that is not finite; else they
             return any column
    ->       [rows] float32; [rows] int64
    """
    value, column = logits.max(-1)
    return value.float(), finite_choice(value, column) if checked else column


def finite_choice(value: Tensor, column: Tensor) -> Tensor:
    """Return column [rows] int64, with NOT_FINITE where value [rows] is NaN or plus infinity."""
    return torch.where(value < float("inf"), column, NOT_FINITE)
