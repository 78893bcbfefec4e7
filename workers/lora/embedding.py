"""`AdaptedEmbedding`, which adds the adapters' part to the rows of a target's embedding."""

import torch
from torch import Tensor

from aerie.kernels.lora.embedding import add_lora_embedding
from aerie.kernels.lora.product import LoraTables
from aerie.workers.lora.layers import AdapterRows


class AdaptedEmbedding:
    """An `aerie.workers.layers.vocab.EmbeddingAdapters` over tables."""

    def __init__(self, tables: LoraTables, rows: AdapterRows) -> None:
        self._tables = tables
        self._rows = rows

    def add(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return the rows with their adapters' part; outside of passes with adapters the same rows."""
        if not self._rows.is_active:
            return rows
        return add_lora_embedding(rows, ids, self._tables, self._rows.embedded_indices())

    def launch_kernels(self, num_rows: int) -> None:
        """Launch what a pass with adapters launches for `num_rows` rows."""
        up = self._tables.up
        rows = torch.zeros(num_rows, up.shape[1], dtype=up.dtype, device=up.device)
        with self._rows.without_adapters(num_rows):
            self.add(rows, torch.zeros(num_rows, dtype=torch.int64, device=up.device))
