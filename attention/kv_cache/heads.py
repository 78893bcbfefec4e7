"""The layout of multi-head and grouped-query attention: rotated keys, and values, per KV head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aerie.attention.kv_cache.layout import KVLayout, PerToken
from aerie.kernels.kv.fp8 import FP8, KVScales
from aerie.kernels.kv.views import LayerKV
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.rope.rope_store import rope, rope_store
from aerie.kernels.rope.rotation import Angles


@dataclass(frozen=True)
class HeadsLayout(KVLayout[LayerKV]):
    """num_kv_heads: K/V heads of this rank.
    dtype: dtype of keys and values; FP8 is possible for models of any dtype.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    kind: ClassVar[str] = "heads"

    @property
    def per_token(self) -> tuple[PerToken, ...]:
        each = PerToken((self.num_kv_heads, self.head_dim), self.dtype)
        return (each, each)

    def view(self, tensors: tuple[Tensor, ...], scales: KVScales) -> LayerKV:
        k, v = tensors
        return LayerKV(k, v, scales.k, scales.v) if self.dtype == FP8 else LayerKV(k, v)

    def store(
        self,
        view: LayerKV,
        q: Tensor,
        rows: tuple[Tensor, ...],
        angles: Angles,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """rows: k and v [rows, kv_heads, head_dim], before norms and RoPE."""
        k, v = rows
        return rope_store(q, k, v, angles, view, slot_mapping, norms)

    def rotate(self, q: Tensor, angles: Angles, norms: HeadNorms | None = None) -> Tensor:
        return rope(q, angles, norms)
