"""The KV memory of one model on one rank, in pages that target and draft number alike."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.metadata import token_indices


@dataclass(frozen=True)
class LayerKV:
    """One layer's pages: k and v [num_pages + 1, page_size, kv_heads, head_dim]; page 0 takes padding's writes."""

    k: Tensor
    v: Tensor


class KVPool:
    """Keys and values of all layers: [layers, num_pages + 1, page_size, kv_heads, head_dim], two tensors.

    Invariant: a page belongs to the requests and the prefix cache that hold references to it
    (`attention.kv_cache.page_allocator`); this class only moves numbers.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.page_size = page_size
        self.num_pages = num_pages
        # Zeros, not empty: a masked NaN in a never-written position would still poison a weighted sum.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self._k_tokens = self.k.view(num_layers, -1, num_kv_heads, head_dim)
        self._v_tokens = self.v.view(num_layers, -1, num_kv_heads, head_dim)
        self._layers = [LayerKV(self.k[i], self.v[i]) for i in range(num_layers)]

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, keys and values."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    def layer(self, index: int) -> LayerKV:
        return self._layers[index]

    def store(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [rows, kv_heads, head_dim] at token indices slot_mapping [rows] int64 of one layer, in place.

        Rows that share an index (padding, on page 0) leave any one of their values.
        """
        self._k_tokens[layer].index_copy_(0, slot_mapping, k)
        self._v_tokens[layer].index_copy_(0, slot_mapping, v)

    def move_path(self, page_table: Tensor, length: Tensor, path: Tensor) -> None:
        """Copy, in all layers and in place, what stands path[b, j] positions behind length[b] to j positions behind it.

        page_table: [B, max_pages] int32. length: [B] int32. path: [B, D] int64, for instance the accepted nodes of a
        tree; whose trailing zeros leave copies of the first that nobody reads.
        """
        if path.is_cuda:
            from attention.kernels.move_path import move_path

            move_path(self.k, self.v, page_table, length, path)
            return
        start = length.long().unsqueeze(1)
        front = start + torch.arange(path.shape[1], device=path.device)
        source = token_indices(page_table, start + path, self.page_size)
        self.move(source.flatten(), token_indices(page_table, front, self.page_size).flatten())

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the tokens at indices source [n] int64 to target [n] in all layers, in place.

        All sources are read before any target is written, so the two may overlap.
        """
        self._k_tokens.index_copy_(1, target, self._k_tokens.index_select(1, source))
        self._v_tokens.index_copy_(1, target, self._v_tokens.index_select(1, source))
