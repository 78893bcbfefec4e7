"""The KV memory of one model on one rank. Target and draft use the same page numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aerie.attention.kv_cache.layout import KVLayout, LayerGroup
from aerie.attention.kv_cache.releasable import Releasable, releasable
from aerie.kernels.capability import Capability
from aerie.kernels.kv.stored_values import KVScales
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.rope.rope_store import Angles


def bytes_per_page(groups: Iterable[LayerGroup], page_size: int, in_windows: bool = False) -> int:
    """Bytes of one page of `page_size` tokens in all layers of `groups`, on this rank. in_windows: of a window page;
    else of a page of the other layers."""
    return page_size * sum(group.bytes_per_token for group in groups if group.keeps_window == in_windows)


class KVPool:
    """The KV of all layers, in the tensors that each layer group's layout defines.

    A page belongs to the requests and the prefix cache that hold references to it
    (`aerie.attention.kv_cache.page_allocator`); this class only moves numbers.

    window_layers: layers whose KV is in window pages.
    window_of: [num_pages + 1] int32, the window page attached to each page, 0 for none; None without such layers. Its
        address is constant, because captured graphs read it.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_pages: int,
        page_size: int,
        device: torch.device,
        scales: Mapping[int, KVScales] | None = None,
        is_releasable: bool = False,
    ) -> None:
        """groups: no layer twice; layers without KV are in none.
        num_pages: without page 0, which receives the writes of padding rows.
        scales: scales of each layer, for FP8; 1 if not given.
        is_releasable: whether `release` may be called on a GPU.
        """
        self.groups = tuple(groups)
        self.scales = scales or {}
        self.page_size = page_size
        self.device = device
        self.tensors: tuple[tuple[Tensor, ...], ...] = ()
        self.window_layers = frozenset(layer for group in self.groups if group.keeps_window for layer in group.layers)
        self.window_of: Tensor | None = None
        self._layers: dict[int, tuple[KVLayout[Any], Any]] = {}
        self.is_releasable = is_releasable or Capability.of(device).shares_host_memory
        self._memories: list[Releasable] = []
        self.allocate(num_pages)

    def allocate(self, num_pages: int, num_window_pages: int = 1) -> None:
        """Allocate `num_pages` empty pages and `num_window_pages` empty window pages, replacing the present ones. Must
        be called before captured graphs hold addresses."""
        self.num_pages = num_pages
        self._memories.clear()
        self.tensors, self._layers, self.window_of = (), {}, None  # freed before the new ones are allocated
        if self.window_layers:
            self.window_of = torch.zeros(num_pages + 1, dtype=torch.int32, device=self.device)
        # Zeros, because a masked NaN in a position that was never written would make a weighted sum NaN.
        self.tensors = tuple(
            tuple(
                self._zeros((len(group.layers), count + 1, self.page_size, *part.shape), part.dtype)
                for part in group.layout.per_token
            )
            for group in self.groups
            for count in (num_window_pages if group.keeps_window else num_pages,)
        )
        self._layers = {
            layer: (
                group.layout,
                group.layout.view(tuple(tensor[i] for tensor in tensors), self.scales.get(layer, KVScales())),
            )
            for group, tensors in zip(self.groups, self.tensors, strict=True)
            for i, layer in enumerate(group.layers)
        }
        assert len(self._layers) == sum(len(group.layers) for group in self.groups)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self.is_releasable:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        memory = releasable(math.prod(shape) * dtype.itemsize, self.device)
        self._memories.append(memory)
        return memory.tensor.view(dtype).view(shape)

    def release(self) -> int:
        """Give the memory of all pages back, whose contents are lost, until `restore`. Return its bytes."""
        assert self.is_releasable, "the pool was not built to be released"
        for memory in self._memories:
            memory.release()
        return sum(memory.tensor.numel() for memory in self._memories)

    def restore(self) -> None:
        """Take the memory of all pages again, at the same addresses. They are empty. Raises RuntimeError if there is
        not enough memory; then it can be called again."""
        for memory in self._memories:
            memory.restore()

    def layer(self, index: int) -> Any:
        """Return a layer's view for backends; for K/V heads a `LayerKV`."""
        return self._layers[index][1]

    def store(
        self,
        layer: int,
        q: Tensor,
        rows: tuple[Tensor, ...],
        angles: Angles,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotate the rows of a pass by their positions, and store them as the layer's layout does: see
        `KVLayout.store`. Return rotated q."""
        layout, view = self._layers[layer]
        return layout.store(view, q, rows, angles, slot_mapping, norms)

    def rotate(self, layer: int, q: Tensor, angles: Angles, norms: HeadNorms | None = None) -> Tensor:
        """Return q rotated as `store` does, for a layer that shares an earlier layer's KV: see `KVLayout.rotate`."""
        return self._layers[layer][0].rotate(q, angles, norms)

    def clear(self, pages: Tensor, in_windows: bool = False) -> None:
        """Zero pages [n] int64 in all layers that have them. in_windows: they are window pages."""
        for group, tensors in zip(self.groups, self.tensors, strict=True):
            for tensor in tensors if group.keeps_window == in_windows else ():
                tensor.view(torch.uint8).index_fill_(1, pages, 0)  # torch cannot fill FP8

    def attach(self, pages: Tensor, window_pages: Tensor) -> None:
        """Attach window pages [n] int32 to pages [n] int64, each once."""
        assert self.window_of is not None, "a pool without window pages"
        self.window_of[pages] = window_pages

    def window_table(self, page_table: Tensor) -> Tensor:
        """Return the page table of layers with a window, [n, max_pages] int32: the window pages attached to the pages
        of `page_table` [n, max_pages] int32. One launch."""
        assert self.window_of is not None, "a pool without window pages"
        return self.window_of.index_select(0, page_table.flatten()).view(page_table.shape)

    def move_path(self, page_table: Tensor, length: Tensor, path: Tensor) -> None:
        """Copy in all layers, in place, positions length[b] + path[b, j] to length[b] + j.

        page_table: [B, max_pages] int32.
        length: [B] int32.
        path: [B, D] int64, for example the accepted nodes of a tree; trailing zeros leave unused copies.
        """
        window_table = self.window_table(page_table) if self.window_layers else page_table
        for group, tensors in zip(self.groups, self.tensors, strict=True):
            group.layout.move_path(tensors, window_table if group.keeps_window else page_table, length, path)
