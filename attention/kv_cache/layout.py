"""How the layers of a model keep their KV: the interface of a layout.

A layout is a plain value. It says what a token's KV takes in one layer, how the rows of a pass get in, how the KV of an
accepted path gets to the front of its tree, and what a backend reads. `attention.kv_cache.pool` holds the memory and
asks the layout; whoever else touches KV goes through the pool. The scheduler counts pages, slots hold page tables,
strategies name rows and paths: none of them knows what is in a page. `docs/kv-layout.md` goes through the layouts that
are to come: latent rows, FP8 with scales, sliding windows.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from attention.ops.move_path import move_path

View = TypeVar("View")


@dataclass(frozen=True)
class PerToken:
    """One tensor of a layer: the shape of a token's part of it, and its type. A pool keeps it for all layers of a group
    as [layers, num_pages + 1, page_size, *shape]."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class KVLayout(ABC, Generic[View]):
    """How layers that are alike keep the KV of a token, on one rank.

    View: what `forward` of a backend gets of a layer.
    kind: by which backends say what they read, see `attention.registry.BackendFacts.layouts`.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def per_token(self) -> tuple[PerToken, ...]:
        """The tensors of a layer. All have a row for every token of every page, so that page ids and token indices mean
        the same in each of them."""

    @property
    def bytes_per_token(self) -> int:
        """In one layer, on this rank."""
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in self.per_token)

    @abstractmethod
    def view(self, tensors: tuple[Tensor, ...]) -> View:
        """A layer as backends see it, of its own tensors [num_pages + 1, page_size, *shape]. Made once."""

    @abstractmethod
    def store(
        self,
        view: View,
        q: Tensor,
        rows: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        index: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Turn q and what is kept by their rows' angles, and write what is kept into the layer, in place.

        q: [rows, q_heads, head_dim]; returned turned, on a GPU in place.
        rows: what the layer's projections made for the cache, [rows, ...] each; their number is the layout's.
        cos, sin: [any, rotated dimensions / 2] float32; index: [rows] int64, each row's line in them.
        slot_mapping: [rows] int64, token indices. Rows that share one (padding, on page 0) leave any one of their
            values.
        """

    def move_path(self, tensors: tuple[Tensor, ...], page_table: Tensor, length: Tensor, path: Tensor) -> None:
        """`KVPool.move_path` for the tensors of all layers of a group."""
        move_path(tensors, page_table, length, path)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep their KV alike. layers: their numbers in the model."""

    layers: tuple[int, ...]
    layout: KVLayout[Any]

    @property
    def bytes_per_token(self) -> int:
        """In all its layers, on this rank."""
        return len(self.layers) * self.layout.bytes_per_token
