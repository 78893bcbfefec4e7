"""Log-probabilities of the most likely tokens of a whole vocabulary."""

import torch
from torch import Tensor

from aerie.kernels.operation import Implementation, on_gpu, operation


def _check(logits: Tensor, k: int) -> None:
    assert logits.dim() == 2 and logits.stride(1) == 1 and logits.is_floating_point() and k <= logits.shape[1]


@operation(Implementation("triton", "aerie.kernels.sampling.logprobs_triton:norms_and_top", on_gpu), contract=_check)
def norms_and_top(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp, the k largest logits in descending order, and their columns.

    logits  [rows, size], any floating dtype, last stride 1, size >= k
    ->      [rows] float32; [rows, k] float32; [rows, k] int64
    """
    logits = logits.float()
    return torch.logsumexp(logits, -1), *logits.topk(k, dim=-1)
