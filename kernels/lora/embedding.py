"""Adds LoRA adapters to the rows of an embedding table: y += B A[:, id], with the matrices of each row's adapter (arXiv
2106.09685, section 4.1, for a product with one-hot rows)."""

import torch
from torch import Tensor

from aerie.kernels.lora.product import RANK_STEP, LoraTables
from aerie.kernels.operation import Implementation, on_gpu, on_host, operation


def check_add_lora_embedding(y: Tensor, ids: Tensor, tables: LoraTables, lora_indices: Tensor) -> None:
    """Assert what kernels require; see `add_lora_embedding`."""
    (rows, outputs), (max_loras, _, rank) = y.shape, tables.up.shape
    assert ids.shape == (rows,) and ids.dtype == torch.int64 and ids.is_contiguous()
    assert lora_indices.shape == (rows,) and lora_indices.dtype == torch.int32 and lora_indices.is_contiguous()
    assert rank % RANK_STEP == 0 and tables.parts == (0, outputs) and tables.up.shape[1] == outputs
    assert tables.down.shape[:2] == (max_loras, rank) and tables.down.is_contiguous() and tables.up.is_contiguous()
    assert y.stride(1) == 1 and y.dtype == tables.down.dtype == tables.up.dtype


@operation(
    Implementation("triton", "aerie.kernels.lora.embedding_triton:add_lora_embedding", on_gpu),
    Implementation("host", "aerie.kernels.lora.embedding_host:add_lora_embedding", on_host),
    contract=check_add_lora_embedding,
)
def add_lora_embedding(y: Tensor, ids: Tensor, tables: LoraTables, lora_indices: Tensor) -> Tensor:
    """Add up[index] down[index][:, id] to each row, in place; return y.

    Sums are float32, and y is rounded once.

    y           [rows, hidden_size], written; last stride 1
    ids         [rows] int64 contiguous: columns of `down`; outside of them y is unchanged
    tables      y's dtype, one part; `down` has a column for each row of the table
    lora_indices  [rows] int32 contiguous: each row's adapter, by its index in the tables; -1: none, and y is unchanged
    """
    sums, inside = torch.zeros(y.shape, device=y.device), (ids >= 0) & (ids < tables.down.shape[2])
    for index in range(tables.max_loras):
        chosen = ((lora_indices == index) & inside).nonzero().flatten()
        sums[chosen] = tables.down[index][:, ids[chosen]].T.float() @ tables.up[index].float().T
    is_adapted = ((lora_indices >= 0) & inside)[:, None]
    return y.copy_(torch.where(is_adapted, y.float() + sums, y.float()))
