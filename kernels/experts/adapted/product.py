"""Adds LoRA adapters to the products of routed experts: y += B (A x), with the matrices of each row's adapter for each
of the row's experts (arXiv 2106.09685, section 4.1). `down` is A, `up` is B."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.lora.product import RANK_STEP
from aerie.kernels.operation import Implementation, on_gpu, on_host, operation


@dataclass(frozen=True)
class ExpertLoraTables:
    """The adapters of one product of a layer's experts on this rank. Their memory stays where it is: captured steps
    contain the addresses.

    down: [max_loras, experts, num_parts * max_rank, in_features], contiguous; the rows of part p are p * max_rank and
        on.
    up: [max_loras, experts, out_features, max_rank], contiguous, in down's dtype; the adapter's scale is contained.
    parts: as in `aerie.kernels.lora.product.LoraTables`: gate and up, or one part.

    Rows of `down` and columns of `up` beyond an adapter's rank are zero, as is everything of experts without an
    adapter.
    """

    down: Tensor
    up: Tensor
    parts: tuple[int, ...]

    @property
    def max_loras(self) -> int:
        """Number of adapters that the tables hold."""
        return self.up.shape[0]

    @property
    def num_experts(self) -> int:
        """Routed experts on this rank."""
        return self.up.shape[1]

    @property
    def max_rank(self) -> int:
        """Number of ranks of each adapter, zeros included."""
        return self.up.shape[3]


@dataclass(frozen=True)
class ExpertBlocks:
    """Pairs (row, slot) of a pass, sorted by expert into blocks of one expert each. A cell is an index in a block.

    pairs: [blocks * block_m] int32 pair of each cell, row * slots + slot; negative for unused cells after the last one
        of a block; undefined in blocks without an expert.
    experts: [blocks] int32 expert of each block on this rank; negative: an unused block.
    block_m: cells of a block.
    slots: experts of a row.
    """

    pairs: Tensor
    experts: Tensor
    block_m: int
    slots: int

    def expert_of_cell(self) -> Tensor:
        """Return [cells] int32: the expert of each cell, -1 for unused ones."""
        experts = self.experts.repeat_interleave(self.block_m, output_size=self.pairs.shape[0])
        return torch.where(self.pairs >= 0, experts, -1).clamp_min(-1)


@dataclass(frozen=True)
class ExpertAdapters:
    """The adapters of a pass over a layer's experts.

    gate_up, down: tables of the two products.
    lora_indices: [rows] int32 contiguous: each row's adapter, by its index in the tables; -1: none.
    """

    gate_up: ExpertLoraTables
    down: ExpertLoraTables
    lora_indices: Tensor


def blocks_by_expert(chosen: Tensor, num_experts: int, block_m: int) -> ExpertBlocks:
    """Sort the pairs of a pass by expert. Reads nothing on the host.

    chosen: [rows, slots], any integer dtype: experts; those outside 0 .. num_experts - 1 have no cell.
    """
    num_pairs, device = chosen.numel(), chosen.device
    flat = chosen.flatten().long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    experts, order = flat.sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=device), right=True)
    firsts = torch.cat((ends.new_zeros(1), ends[:-1]))
    blocks = (ends - firsts + block_m - 1) // block_m
    block_ends = blocks.cumsum(0)
    max_blocks = (num_pairs + min(num_experts, num_pairs) * (block_m - 1)) // block_m
    known = experts.clamp_max(num_experts - 1)
    cell = ((block_ends - blocks) * block_m - firsts)[known] + torch.arange(num_pairs, device=device)
    cell = torch.where(experts < num_experts, cell, max_blocks * block_m)
    pairs = torch.full((max_blocks * block_m + 1,), -1, dtype=torch.int32, device=device)
    pairs[cell] = order.int()
    of_block = torch.searchsorted(block_ends, torch.arange(max_blocks, device=device), right=True)
    of_block = torch.where(of_block < num_experts, of_block, -1).int()
    return ExpertBlocks(pairs[:-1], of_block, block_m, chosen.shape[1])


def check_add_expert_lora(
    y: Tensor,
    x: Tensor,
    tables: ExpertLoraTables,
    blocks: ExpertBlocks,
    lora_indices: Tensor,
    weight: Tensor | None = None,
) -> None:
    """Assert what kernels require; see `add_expert_lora`."""
    (max_loras, experts, outputs, rank), (cells,) = tables.up.shape, blocks.pairs.shape
    pairs = lora_indices.shape[0] * blocks.slots
    assert y.shape == (cells if weight is None else pairs, outputs)
    assert x.shape[0] == (lora_indices.shape[0] if weight is None else cells)
    assert rank % RANK_STEP == 0 and list(tables.parts) == sorted(tables.parts)
    assert tables.parts[0] == 0 and tables.parts[-1] == outputs
    assert tables.down.shape == (max_loras, experts, (len(tables.parts) - 1) * rank, x.shape[1])
    assert tables.down.is_contiguous() and tables.up.is_contiguous() and lora_indices.is_contiguous()
    assert x.stride(1) == y.stride(1) == 1 and x.dtype == y.dtype == tables.down.dtype == tables.up.dtype
    assert cells == blocks.experts.shape[0] * blocks.block_m
    assert blocks.pairs.dtype == blocks.experts.dtype == lora_indices.dtype == torch.int32
    assert blocks.pairs.is_contiguous() and blocks.experts.is_contiguous()
    if weight is not None:
        assert weight.numel() == pairs and weight.dtype == torch.float32 and weight.is_contiguous()


@operation(
    Implementation("triton", "aerie.kernels.experts.adapted.product_triton:add_expert_lora", on_gpu),
    Implementation("host", "aerie.kernels.experts.adapted.product_host:add_expert_lora", on_host),
    contract=check_add_expert_lora,
)
def add_expert_lora(
    y: Tensor,
    x: Tensor,
    tables: ExpertLoraTables,
    blocks: ExpertBlocks,
    lora_indices: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """Add up[index, expert] (down[index, expert] x) to the results of each pair whose row has an adapter, in place;
    return y.

    Sums are float32, and y is rounded once. Kernels may round down[index, expert] x to x's dtype. Other results are
    unchanged, and those of unused cells undefined.

    y           [cells, out_features], written: the first product of experts; last stride 1
    x           [rows, in_features], y's dtype: its inputs; last stride 1
    tables      y's dtype; experts beyond them have no adapters
    blocks      the rows' experts
    lora_indices  [rows] int32 contiguous: each row's adapter, by its index in the tables; -1: none
    weight      None. For the second product [rows, slots] float32 contiguous, a factor on what is added; then y is by
                pair, [rows * slots, out_features], and x by cell, [cells, in_features]
    """
    rank, cell_expert = tables.max_rank, blocks.expert_of_cell()
    pair = torch.where(cell_expert >= 0, blocks.pairs, 0).long()
    index = torch.where(cell_expert >= 0, lora_indices[pair // blocks.slots], -1)
    inputs = (x[pair // blocks.slots] if weight is None else x).float()
    sums = torch.zeros(pair.shape[0], y.shape[1], device=y.device)
    for adapter in range(tables.max_loras):
        for expert in range(tables.num_experts):
            inner = inputs @ tables.down[adapter, expert].float().T
            inner = inner.where(((index == adapter) & (cell_expert == expert))[:, None], 0.0)
            for part, (first, end) in enumerate(zip(tables.parts, tables.parts[1:], strict=False)):
                up = tables.up[adapter, expert, first:end].float()
                sums[:, first:end] += inner[:, part * rank : (part + 1) * rank] @ up.T
    adapted = (index >= 0) & (cell_expert < tables.num_experts)
    if weight is None:
        return y.copy_(torch.where(adapted[:, None], y.float() + sums, y.float()))
    chosen = pair[adapted]
    y[chosen] = (y[chosen].float() + sums[adapted] * weight.flatten()[chosen, None]).to(y.dtype)
    return y
