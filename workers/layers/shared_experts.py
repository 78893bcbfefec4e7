"""Appends the weights or scales of shared experts to those of the routed experts."""

import math

from torch import Tensor


def with_shared(experts: Tensor, shared: Tensor) -> Tensor:
    """Return [experts + shared, rows, columns]: `experts`, then `shared`. May reuse the memory of `experts`."""
    joined = with_room(experts, shared.shape[0])
    joined[experts.shape[0] :].copy_(shared)
    return joined


def with_room(experts: Tensor, num_shared: int) -> Tensor:
    """Return [experts + num_shared, rows, columns] that begins with `experts`, in the same memory if it is large
    enough. A new tensor after loading would waste a third of the weights' size by fragmentation (DeepSeek-V3)."""
    whole = (experts.shape[0] + num_shared, *experts.shape[1:])
    end = experts.storage_offset() + math.prod(whole)
    if experts.is_contiguous() and end * experts.itemsize <= experts.untyped_storage().nbytes():
        return experts.as_strided(whole, experts.stride())
    grown = experts.new_empty(whole)
    grown[: experts.shape[0]].copy_(experts)
    return grown


def shared_rows(mlp: Tensor, num_shared: int) -> Tensor:
    """Split the gate and up projections of the shared experts' MLP by expert.

    mlp: [num_shared * rows, columns], gate rows of all experts, then up rows.
    returns: [num_shared, rows, columns], gate, then up rows of each.
    """
    return mlp.view(2, num_shared, -1, mlp.shape[1]).transpose(0, 1).flatten(1, 2)


def shared_columns(mlp: Tensor, num_shared: int) -> Tensor:
    """Split the MLP's down projection by expert.

    mlp: [rows, num_shared * columns], or scales [rows, 1] of whole rows.
    """
    is_whole = mlp.shape[1] == 1
    each = mlp.unsqueeze(1).expand(-1, num_shared, -1) if is_whole else mlp.view(mlp.shape[0], num_shared, -1)
    return each.transpose(0, 1)
