"""How the weights of shared experts join those that rows are routed to. For tensors of weights and of their scales."""

import math

from torch import Tensor


def with_shared(experts: Tensor, shared: Tensor) -> Tensor:
    """[experts + shared ones, rows, columns]: `experts`, and after them `shared`. Weights, or their scales."""
    joined = with_room(experts, shared.shape[0])
    joined[experts.shape[0] :].copy_(shared)
    return joined


def with_room(experts: Tensor, num_shared: int) -> Tensor:
    """[experts + num_shared, rows, columns] whose first are `experts`, where they lie if there is room behind them.
    Tensors that grew once all layers are loaded would leave holes in memory, of DeepSeek-V3 a third of its weights."""
    whole = (experts.shape[0] + num_shared, *experts.shape[1:])
    end = experts.storage_offset() + math.prod(whole)
    if experts.is_contiguous() and end * experts.itemsize <= experts.untyped_storage().nbytes():
        return experts.as_strided(whole, experts.stride())
    grown = experts.new_empty(whole)
    grown[: experts.shape[0]].copy_(experts)
    return grown


def shared_rows(mlp: Tensor, num_shared: int) -> Tensor:
    """[num_shared, rows, columns], gate rows above up rows: the experts that together are `mlp`
    [num_shared * rows, columns], whose gate rows all stand above its up rows. Weights, or their scales."""
    return mlp.view(2, num_shared, -1, mlp.shape[1]).transpose(0, 1).flatten(1, 2)


def shared_columns(mlp: Tensor, num_shared: int) -> Tensor:
    """The same of down-projections: mlp [rows, num_shared * columns]; or [rows, 1] for scales of whole rows."""
    is_whole = mlp.shape[1] == 1
    each = mlp.unsqueeze(1).expand(-1, num_shared, -1) if is_whole else mlp.view(mlp.shape[0], num_shared, -1)
    return each.transpose(0, 1)
