"""Sizes of recurrent states per request. Plain values, known before anything is allocated."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from aerie.attention.config import CacheConfig
from aerie.attention.recurrent.sizes import StateSizes
from aerie.kernels.delta_rule.chunks import scratch_bytes
from aerie.kernels.delta_rule.tables import DeltaHeads, state_shapes


@dataclass(frozen=True)
class StateLayout:
    """The state of one layer of the gated delta rule on one rank. dtype: dtype of the rows; the state itself is
    float32."""

    heads: DeltaHeads
    dtype: torch.dtype

    def bytes_per_snapshot(self, state_dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of a state of `state_dtype` and its convolution history."""
        shapes = state_shapes(self.heads, 1, 1)
        return state_dtype.itemsize * math.prod(shapes["state"]) + self.dtype.itemsize * math.prod(shapes["conv"])

    def bytes_per_slot(self, sizes: StateSizes) -> int:
        """Return the bytes of a slot: its state and the rows of the last round."""
        shapes = state_shapes(self.heads, sizes.rows, sizes.path)
        rows = math.prod(shapes["pending"]) + math.prod(shapes["committed"])
        return self.bytes_per_snapshot() + self.dtype.itemsize * rows


@dataclass(frozen=True)
class StateGroup:
    """Layers with the same state layout. layers: their numbers in the model."""

    layers: tuple[int, ...]
    layout: StateLayout


def chunk_bytes(groups: Iterable[StateGroup], num_tokens: int) -> int:
    """Return the scratch bytes of a layer's GPU kernels for a prompt chunk; the maximum over layers."""
    return max((scratch_bytes(group.layout.heads, group.layout.dtype, num_tokens, 1) for group in groups), default=0)


def saved_dtype(cache: CacheConfig) -> torch.dtype:
    """Return the dtype in which snapshots keep recurrent states."""
    dtypes: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return dtypes[cache.state_snapshot_dtype]


def slot_bytes(groups: Iterable[StateGroup], sizes: StateSizes) -> int:
    """Bytes of one slot in all layers of `groups`, on this rank."""
    return sum(len(group.layers) * group.layout.bytes_per_slot(sizes) for group in groups)


def snapshot_bytes(groups: Iterable[StateGroup], state_dtype: torch.dtype) -> int:
    """Bytes of one snapshot in all layers of `groups` on this rank. state_dtype: of its states."""
    return sum(len(group.layers) * group.layout.bytes_per_snapshot(state_dtype) for group in groups)
