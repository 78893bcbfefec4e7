"""Sizes of what recurrent layers keep of a request. Plain values, known before anything is allocated."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from attention.ops.delta_rule.tables import DeltaHeads, state_shapes
from attention.recurrent.sizes import StateSizes


@dataclass(frozen=True)
class StateLayout:
    """The state of one layer of the gated delta rule on one rank. dtype: of the rows; the state itself is float32."""

    heads: DeltaHeads
    dtype: torch.dtype

    @property
    def bytes_per_snapshot(self) -> int:
        """State and convolution history, after any number of tokens."""
        shapes = state_shapes(self.heads, 1, 1)
        return 4 * math.prod(shapes["state"]) + self.dtype.itemsize * math.prod(shapes["conv"])

    def bytes_per_slot(self, sizes: StateSizes) -> int:
        """The same, and the rows of the last round."""
        shapes = state_shapes(self.heads, sizes.rows, sizes.path)
        rows = math.prod(shapes["pending"]) + math.prod(shapes["committed"])
        return self.bytes_per_snapshot + self.dtype.itemsize * rows


@dataclass(frozen=True)
class StateGroup:
    """Layers that keep their state alike. layers: their numbers in the model."""

    layers: tuple[int, ...]
    layout: StateLayout


def slot_bytes(groups: Iterable[StateGroup], sizes: StateSizes) -> int:
    """Bytes of one slot in all layers of `groups`, on this rank."""
    return sum(len(group.layers) * group.layout.bytes_per_slot(sizes) for group in groups)


def snapshot_bytes(groups: Iterable[StateGroup]) -> int:
    """Bytes of one snapshot in all layers of `groups`, on this rank."""
    return sum(len(group.layers) * group.layout.bytes_per_snapshot for group in groups)
