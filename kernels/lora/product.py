"""Adds LoRA adapters to the result of a linear layer: y += B (A x), with the matrices of each row's adapter (arXiv
2106.09685, section 4.1). `down` is A, `up` is B."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.operation import Implementation, on_gpu, on_host, operation

RANK_STEP = 16  # ranks of tables are multiples, for the shapes that tensor cores multiply
ROW_LIMITS = (64, 512)  # maximum rows of the kernels' small and middle tiles
# Numbers of rows that launch all variants of a layer's kernels, here and of products that add their adapters' part.
VARIANT_ROWS = (1, 17, 64, *(limit + 1 for limit in ROW_LIMITS))


@dataclass(frozen=True)
class LoraTables:
    """One layer's adapters on this rank. Their memory stays where it is: captured steps contain the addresses.

    down: [max_loras, num_parts * max_rank, in_features], contiguous; the rows of part p are p * max_rank and on.
    up: [max_loras, out_features, max_rank], contiguous, in down's dtype; the adapter's scale is contained.
    parts: num_parts + 1 ascending outputs: part p has the outputs parts[p] to parts[p + 1]. Parts are the matrices that
        a layer stacks, such as q, k and v. Outputs after the last are padding, without adapters.

    fixed: each row's sums are added in the same order, whatever the number of rows, for deterministic engines.

    max_rank is a multiple of RANK_STEP. Rows of `down` and columns of `up` beyond an adapter's rank are zero, as is
    everything of parts without an adapter.
    """

    down: Tensor
    up: Tensor
    parts: tuple[int, ...]
    fixed: bool = False

    @property
    def max_loras(self) -> int:
        """Number of adapters that the tables hold."""
        return self.up.shape[0]

    @property
    def max_rank(self) -> int:
        """Number of ranks of each adapter, zeros included."""
        return self.up.shape[2]


@dataclass(frozen=True)
class RowAdapters:
    """The adapters of a product's rows, for products that add them in their own launch.

    tables: the adapters of the product's layer.
    lora_indices: as for `add_lora`; written before a fence (`aerie.kernels.pdl`).
    counter: int32, 0, of this product only; written.
    """

    tables: LoraTables
    lora_indices: Tensor
    counter: Tensor


def check_add_lora(y: Tensor, x: Tensor, tables: LoraTables, lora_indices: Tensor) -> None:
    """Assert what kernels require; see `add_lora`."""
    (rows, outputs), inputs, (max_loras, _, rank) = y.shape, x.shape[1], tables.up.shape
    assert x.shape[0] == rows and lora_indices.shape == (rows,) and lora_indices.dtype == torch.int32
    assert tables.up.shape[1] == outputs and tables.parts[-1] <= outputs and tables.parts[0] == 0
    assert rank % RANK_STEP == 0 and list(tables.parts) == sorted(tables.parts)
    assert tables.down.shape == (max_loras, (len(tables.parts) - 1) * rank, inputs)
    assert tables.down.is_contiguous() and tables.up.is_contiguous() and lora_indices.is_contiguous()
    assert x.stride(1) == y.stride(1) == 1 and x.dtype == y.dtype == tables.down.dtype == tables.up.dtype


@operation(
    Implementation("triton", "aerie.kernels.lora.product_triton:add_lora", on_gpu),
    Implementation("host", "aerie.kernels.lora.product_host:add_lora", on_host),
    contract=check_add_lora,
)
def add_lora(y: Tensor, x: Tensor, tables: LoraTables, lora_indices: Tensor) -> Tensor:
    """Add up[index] (down[index] x) to each row's result, in place; return y.

    Sums are float32, and y is rounded once. Kernels may round down[index] x to x's dtype.

    y           [rows, out_features], written; last stride 1
    x           [rows, in_features], y's dtype; last stride 1
    tables      y's dtype
    lora_indices  [rows] int32 contiguous: each row's adapter, by its index in the tables; -1: none, and y is unchanged
    """
    rank, inputs, sums = tables.max_rank, x.float(), torch.zeros(y.shape, device=y.device)
    for index in range(tables.max_loras):
        inner = inputs @ tables.down[index].float().T
        inner = inner.where((lora_indices == index)[:, None], 0.0)
        for part, (first, end) in enumerate(zip(tables.parts, tables.parts[1:], strict=False)):
            up = tables.up[index, first:end].float()
            sums[:, first:end] += inner[:, part * rank : (part + 1) * rank] @ up.T
    return y.copy_(torch.where((lora_indices >= 0)[:, None], y.float() + sums, y.float()))
