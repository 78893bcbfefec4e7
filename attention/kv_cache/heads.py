"""The layout of multi-head and grouped-query attention: keys, turned by their positions, and values, by KV heads."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attention.kv_cache.layout import KVLayout, PerToken
from attention.rotation import rotate
from attention.views import LayerKV


@dataclass(frozen=True)
class HeadsLayout(KVLayout[LayerKV]):
    """num_kv_heads: of this rank. dtype: of keys and values."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    kind: ClassVar[str] = "heads"

    @property
    def per_token(self) -> tuple[PerToken, ...]:
        each = PerToken((self.num_kv_heads, self.head_dim), self.dtype)
        return (each, each)

    def view(self, tensors: tuple[Tensor, ...]) -> LayerKV:
        return LayerKV(*tensors)

    def store(
        self,
        view: LayerKV,
        q: Tensor,
        rows: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        index: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """rows: k and v [rows, kv_heads, head_dim], not yet turned."""
        k, v = rows
        if q.is_cuda:
            from attention.ops.rope_store_triton import rope_store

            rope_store(q, k, v, cos, sin, index, view, slot_mapping)
            return q
        return store_reference(q, k, v, cos, sin, index, view, slot_mapping)

    def move_path(self, tensors: tuple[Tensor, ...], page_table: Tensor, length: Tensor, path: Tensor) -> None:
        if path.is_cuda:
            from attention.ops.move_path_triton import move_path

            k, v = tensors
            move_path(k, v, page_table, length, path)
        else:
            super().move_path(tensors, page_table, length, path)


def store_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, index: Tensor, kv: LayerKV, slot_mapping: Tensor
) -> Tensor:
    """What `attention.ops.rope_store_triton` does, in torch; q stays as it is, and is returned turned."""
    cos, sin = cos[index], sin[index]
    kv.k.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, rotate(k, cos, sin))
    kv.v.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)
    return rotate(q, cos, sin)
