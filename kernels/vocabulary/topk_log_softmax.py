"""The largest logit of each row of a vocabulary shard, its largest log-probabilities, and the sum that other shards
need."""

import torch
from torch import Tensor

from aerie.kernels.operation import Implementation, on_gpu, operation

MAX_K = 64  # the kernel sorts the best tokens of each part in registers


def _check(logits: Tensor, k: int) -> None:
    assert logits.dim() == 2 and logits.stride(1) == 1 and logits.is_floating_point() and 1 <= k <= logits.shape[1]


@operation(
    Implementation(
        "triton",
        "aerie.kernels.vocabulary.topk_log_softmax_triton:topk_log_softmax",
        on_gpu,
        serves=lambda logits, k: k <= MAX_K,
        limits=f"k up to {MAX_K}",
    ),
    contract=_check,
)
def topk_log_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest log-probabilities, best first, their columns, and logsumexp.

    logits  [rows, size], any floating dtype, last stride 1, size >= k
    ->      [rows, k] float32; [rows, k] int64; [rows] float32

    A row of minus infinity (a shard that is all padding) gives minus infinity, never NaN. The kernel returns the
    smallest column first among equal logits, so that all ranks grow the same tree.
    """
    norm = torch.logsumexp(logits.float(), -1)
    value, column = logits.float().topk(k, -1)
    return value - norm.masked_fill(norm == float("-inf"), 0.0).unsqueeze(-1), column, norm


NOT_FINITE = -(1 << 40)  # column of a row whose largest logit is NaN or plus infinity


def _check_largest(logits: Tensor, checked: bool = False) -> None:
    assert logits.dim() == 2 and logits.stride(1) == 1 and logits.is_floating_point()


@operation(
    Implementation("triton", "aerie.kernels.vocabulary.topk_log_softmax_triton:largest", on_gpu),
    contract=_check_largest,
)
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
