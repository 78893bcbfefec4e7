"""`aerie.kernels.lora.product` on CPUs: a product for each adapter that a row has, over its rows only."""

from torch import Tensor

from aerie.kernels.lora.product import LoraTables


def add_lora(y: Tensor, x: Tensor, tables: LoraTables, lora_indices: Tensor) -> Tensor:
    """Implement `aerie.kernels.lora.product.add_lora`: add up[index] (down[index] x) to each row's result, in place;
    return y."""
    rank = tables.max_rank
    for index in set(lora_indices.tolist()) - {-1}:
        rows = (lora_indices == index).nonzero().flatten()
        inner = x[rows].float() @ tables.down[index].float().T
        for part, (first, end) in enumerate(zip(tables.parts, tables.parts[1:], strict=False)):
            up = tables.up[index, first:end].float()
            sums = y[rows, first:end].float().addmm_(inner[:, part * rank : (part + 1) * rank], up.T)
            y[rows, first:end] = sums.to(y.dtype)
    return y
