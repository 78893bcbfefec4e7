"""`LatentLayout`: one row for all heads, equal on every rank, for multi-head latent attention (DeepSeek-V2, arXiv
2405.04434, section 2.1).

`ExpertIds`: the experts that a layer's router chose for a token.

The layout of multi-head and grouped-query attention: rotated keys, and values, per KV head."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aerie.attention.kv_cache.layout import KVLayout, LayerGroup, PerToken
from aerie.kernels.kv.batches import LatentKV, LayerKV
from aerie.kernels.kv.stored_values import FP8, KVScales, without_nan, write_rows
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.rope.rope_store import Angles, rope, rope_store, rotate_pairs


@dataclass(frozen=True)
class LatentLayout(KVLayout[LatentKV]):
    """latent: size of the compressed keys and values, which have no position.
    rotated: size of the rotated part.
    dtype: dtype of both; FP8 is possible for models of any dtype.
    """

    latent: int
    rotated: int
    dtype: torch.dtype

    kind: ClassVar[str] = "latent rows"

    @property
    def per_token(self) -> tuple[PerToken, ...]:
        return (PerToken((self.latent + self.rotated,), self.dtype),)

    def view(self, tensors: tuple[Tensor, ...], scales: KVScales) -> LatentKV:
        return LatentKV(tensors[0], self.latent, scales.k if self.dtype == FP8 else 1.0)

    def store(
        self,
        view: LatentKV,
        q: Tensor,
        rows: tuple[Tensor, ...],
        angles: Angles,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """rows: [rows, latent + rotated], before RoPE.
        q: [rows, q_heads, latent + rotated]; not changed.
        On GPUs `aerie.kernels.latent.latents_triton` does this, together with a layer's norms.
        """
        assert norms is None, "latent rows have no heads"
        (row,), (cos, sin) = rows, angles.of_rows()
        rotated = self._rotated(row.unsqueeze(1), cos, sin).squeeze(1)
        keys, latents = without_nan(rotated[:, self.latent :], rotated[:, : self.latent])
        write_rows(view.rows, slot_mapping, torch.cat((latents, keys), dim=-1), view.scale)
        return self._rotated(q, cos, sin)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the last part of x [rows, heads, latent + rotated]."""
        return torch.cat((x[..., : self.latent], rotate_pairs(x[..., self.latent :], cos, sin)), dim=-1)


def has_latent_rows(groups: Iterable[LayerGroup]) -> bool:
    """Whether a model's layers store latent rows instead of keys and values per head."""
    return any(isinstance(group.layout, LatentLayout) for group in groups)


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


@dataclass(frozen=True)
class ExpertIds(KVLayout[Tensor]):
    """The routed experts of each token in a layer, cached as its KV is: pages that requests share, paths that are
    accepted, and preempted requests need nothing else. Written by `aerie.workers.layers.moe`; attention has no part in
    it.

    num_experts: of the layer.
    per_row: routed experts of a token.
    """

    num_experts: int
    per_row: int

    kind: ClassVar[str] = "expert ids"

    @property
    def per_token(self) -> tuple[PerToken, ...]:
        return (PerToken((self.per_row,), torch.uint8 if self.num_experts <= 256 else torch.int16),)

    def view(self, tensors: tuple[Tensor, ...], scales: KVScales) -> Tensor:
        """Return [num_pages + 1, page_size, per_row]."""
        return tensors[0]

    def store(
        self,
        view: Tensor,
        q: Tensor,
        rows: tuple[Tensor, ...],
        angles: Angles,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        raise NotImplementedError("no attention layer has expert ids")
