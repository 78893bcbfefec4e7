"""The interface of KV layouts: how the layers of a model cache their KV.

A layout is a plain value. It defines the bytes of a token's KV in one layer, how a pass stores its rows, how the KV of
an accepted path moves to the front of its tree, and what a backend reads. `aerie.attention.kv_cache.pool` owns the
memory; all access to KV goes through it. Scheduler, slots and decoding strategies know only page numbers.
`docs/kv-layout.md` describes the layouts.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from aerie.kernels.kv.slot_mapping import move_path
from aerie.kernels.kv.stored_values import KVScales
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.rope.rope_store import Angles

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
        angles: of the rows.
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
