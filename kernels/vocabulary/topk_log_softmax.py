"""The largest log-probabilities of each row of a vocabulary shard, and the sum that other shards need."""

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
