"""`aerie.kernels.lora.embedding` on CPUs: a product for each adapter that a row has, over its rows only."""

from torch import Tensor

from aerie.kernels.lora.product import LoraTables


def add_lora_embedding(y: Tensor, ids: Tensor, tables: LoraTables, lora_indices: Tensor) -> Tensor:
    """Implement `aerie.kernels.lora.embedding.add_lora_embedding`: add up[index] down[index][:, id] to each row, in
    place; return y."""
    inside = (ids >= 0) & (ids < tables.down.shape[2])
    for index in set(lora_indices.tolist()) - {-1}:
        rows = ((lora_indices == index) & inside).nonzero().flatten()
        inner = tables.down[index].index_select(1, ids[rows]).T.float()
        y[rows] = y[rows].float().addmm_(inner, tables.up[index].float().T).to(y.dtype)
    return y
