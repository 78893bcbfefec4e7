"""`aerie.kernels.experts.adapted.product` on CPUs: a product for each pair of adapter and expert that occurs, over its
cells only."""

import torch
from torch import Tensor

from aerie.kernels.experts.adapted.product import ExpertBlocks, ExpertLoraTables


def add_expert_lora(
    y: Tensor,
    x: Tensor,
    tables: ExpertLoraTables,
    blocks: ExpertBlocks,
    lora_indices: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """Implement `aerie.kernels.experts.adapted.product.add_expert_lora`."""
    rank, expert = tables.max_rank, blocks.expert_of_cell()
    pair = torch.where(expert >= 0, blocks.pairs, 0).long()
    index = lora_indices[pair // blocks.slots]
    is_adapted = (index >= 0) & (expert >= 0) & (expert < tables.num_experts)
    groups = torch.where(is_adapted, index * tables.num_experts + expert, -1)
    for group in set(groups.tolist()) - {-1}:
        cells = (groups == group).nonzero().flatten()
        adapter, number = divmod(group, tables.num_experts)
        read = x[pair[cells] // blocks.slots] if weight is None else x[cells]
        written = cells if weight is None else pair[cells]
        factor = 1.0 if weight is None else weight.flatten()[written, None]
        inner = read.float() @ tables.down[adapter, number].float().T
        for part, (first, end) in enumerate(zip(tables.parts, tables.parts[1:], strict=False)):
            up = tables.up[adapter, number, first:end].float()
            added = inner[:, part * rank : (part + 1) * rank] @ up.T
            y[written, first:end] = (y[written, first:end].float() + added * factor).to(y.dtype)
    return y
