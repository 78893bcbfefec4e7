"""The input of an EAGLE-3 layer (arXiv 2503.01840): the concatenated norms of embedding and feature."""

import torch
from torch import Tensor

from aerie.kernels.norm.norm import rms_norm
from aerie.kernels.operation import Implementation, on_gpu, operation


def _check(ids: Tensor, table: Tensor, hidden: Tensor, table_weight: Tensor, hidden_weight: Tensor, eps: float) -> None:
    assert ids.shape == hidden.shape[:1] and ids.dtype == torch.int64 and ids.is_contiguous()
    for each in (table, hidden, table_weight, hidden_weight):
        assert each.shape[-1] == table.shape[1] and each.dtype == table.dtype and each.is_contiguous()


@operation(Implementation("triton", "aerie.kernels.norm.head_input_triton:head_input", on_gpu), contract=_check)
def head_input(
    ids: Tensor, table: Tensor, hidden: Tensor, table_weight: Tensor, hidden_weight: Tensor, eps: float
) -> Tensor:
    """Return RMSNorm(table[ids]) and RMSNorm(hidden), concatenated.

    ids            [rows] int64
    table          [vocabulary, size], the embedding, in the model's dtype
    hidden         [rows, size], as table
    table_weight   [size], as table
    hidden_weight  [size], as table
    ->             [rows, 2 * size], as table; all arguments are contiguous
    """
    inputs = (table[ids], table_weight), (hidden, hidden_weight)
    return torch.cat([rms_norm.reference(x, weight, eps) for x, weight in inputs], dim=-1)
