"""KV layouts: how the layers of a model cache their KV. The interface and its layouts: rotated keys, and values, per
head; one row for all heads, equal on every rank (multi-head latent attention; DeepSeek-V2, arXiv 2405.04434, 2.1); the
experts that a layer's router chose for a token.

A layout is a plain value. It defines the bytes of a token's KV in one layer, how a pass stores its rows, how the KV of
an accepted path moves to the front of its tree, and what a backend reads. `aerie.attention.kv_cache.pool` owns the
memory; all access to KV goes through it. Scheduler, slots and decoding strategies know only page numbers.
`docs/kv-layout.md` describes the layouts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from aerie.kernels.kv.batches import LatentKV, LayerKV
from aerie.kernels.kv.slot_mapping import move_path
from aerie.kernels.kv.stored_values import FP8, KVScales, without_nan, write_rows
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.rope.rope_store import Angles, rope, rope_store, rotate_pairs

View = TypeVar("View")


@dataclass(frozen=True)
class PerToken:
    """One tensor of a layer: shape and dtype of a token's part. A pool stores it for all layers of a group as [layers,
    num_pages + 1, page_size, *shape]."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class KVLayout(ABC, Generic[View]):
    """The KV layout of a group of layers on one rank.

    View: type of the KV that a backend's `forward` gets for a layer.
    kind: name by which backends declare support, see `aerie.attention.registry.BackendFacts.layouts`.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def per_token(self) -> tuple[PerToken, ...]:
        """The tensors of a layer. Each has a row for every token of every page, so that the same page ids and token
        indices are valid for all."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token in one layer, on this rank."""
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in self.per_token)

    @abstractmethod
    def view(self, tensors: tuple[Tensor, ...], scales: KVScales) -> View:
        """Return a layer's view for backends, from its tensors [num_pages + 1, page_size, *shape]. Called once.

        scales: the layer's scales, for FP8.
        """

    @abstractmethod
    def store(
        self,
        view: View,
        q: Tensor,
        rows: tuple[Tensor, ...],
        angles: Angles,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotate q and the rows, and write the rows to the layer. Return rotated q; on a GPU without norms, q is
        rotated in place.

        q: [rows, q_heads, head_dim].
        rows: the layer's projections for the cache, [rows, ...] each; their number depends on the layout.
        angles: rotary angles of the rows.
        slot_mapping: [rows] int64 token indexes. If rows share one (padding, on page 0), any of them may be stored.
        norms: norms of q and the rows, applied before RoPE, for the layout of heads; None: none.
        """

    def rotate(self, q: Tensor, angles: Angles, norms: HeadNorms | None = None) -> Tensor:
        """Return rotated q, as `store` does, with the same arguments. Only for layouts whose layers may share KV."""
        raise NotImplementedError(f"layers over {self.kind} do not share KV")

    def move_path(self, tensors: tuple[Tensor, ...], page_table: Tensor, length: Tensor, path: Tensor) -> None:
        """`KVPool.move_path` for the tensors of all layers of a group."""
        move_path(tensors, page_table, length, path)


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same KV layout.

    layers: their numbers in the model.
    keeps_window: whether their KV is in window pages (`aerie.attention.kv_cache.window_pages`).
    """

    layers: tuple[int, ...]
    layout: KVLayout[Any]
    keeps_window: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token in all its layers, on this rank."""
        return len(self.layers) * self.layout.bytes_per_token


@dataclass(frozen=True)
class LatentLayout(KVLayout[LatentKV]):
    """The layout of MLA: a token's row is its latent and its rotated key, shared by all heads.

    latent: size of the compressed keys and values, which have no position.
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
        (row,), (cos, sin) = rows, angles.by_row()
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
    """The layout of keys and values per head.

    num_kv_heads: K/V heads of this rank.
    dtype: dtype of keys and values; FP8 is possible for models of any dtype.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    kind: ClassVar[str] = "heads"

    @property
    def per_token(self) -> tuple[PerToken, ...]:
        part = PerToken((self.num_kv_heads, self.head_dim), self.dtype)
        return (part, part)

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

    num_experts: number of experts of the layer.
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
