"""Tensor-parallel products. Column: outputs are cut, nothing is communicated. Row: inputs are cut, outputs summed."""

from collections.abc import Sequence

from torch import Tensor

from workers.distributed.tp_group import TPGroup, shard_size
from workers.layers.linear_method import Product


class ColumnLinear(Product):
    """Several products of one input as one: y = x W^T + b, where every part of W is cut along its outputs.

    parts: name -> this rank's rows [first, end) of the part's full outputs. Output: the parts side by side.
    """

    def __init__(self, in_features: int, parts: dict[str, tuple[int, int]], bias: bool) -> None:
        sizes = [end - first for first, end in parts.values()]
        super().__init__(in_features, sum(sizes), bias)
        self.parts = parts
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def load(self, part: str, kind: str, full: Tensor) -> None:
        """Copy this rank's rows of a full checkpoint tensor; kind is "weight" or "bias"."""
        target = self.weight if kind == "weight" else self.bias
        if target is None:
            raise ValueError(f"checkpoint has a bias for {part}, the model's config says it has none")
        offset = sum(self.sizes[: list(self.parts).index(part)])
        first, end = self.parts[part]
        check_shape(part, full, (full.shape[0], *target.shape[1:]))
        if full.shape[0] < end:
            raise ValueError(f"{part}.{kind}: checkpoint has {full.shape[0]} rows, the model needs at least {end}")
        target.data[offset : offset + end - first].copy_(full[first:end])


class GatedLinear(ColumnLinear):
    """silu(x W_gate^T) * (x W_up^T). parts: both, in this order."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply_gated(x)


class RowLinear(Product):
    """y = x W^T, W cut along its inputs; the ranks' partial results are summed."""

    def __init__(self, in_features: int, out_features: int, group: TPGroup, what: str, bias: bool = False) -> None:
        size = shard_size(in_features, group.size, what)
        super().__init__(size, out_features, bias)
        self.group = group
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of y, for whoever sums the parts at once (`RMSNorm.add`): it may lie in a buffer that the
        next product overwrites. The bias is in rank 0's part."""
        bias = self.bias if self.group.rank == 0 else None
        out = self.group.all_reduce_buffer(x.shape[0], self.weight.shape[0], x.dtype)
        return self.multiply(x, bias, out)

    def load(self, part: str, kind: str, full: Tensor) -> None:
        """Copy this rank's columns of a full checkpoint tensor."""
        if kind == "bias":
            if self.bias is None:
                raise ValueError(f"checkpoint has a bias for {part}, the model's config says it has none")
            self.bias.data.copy_(full)
            return
        check_shape(part, full, (self.weight.shape[0], self.size * self.group.size))
        first = self.group.rank * self.size
        self.weight.data.copy_(full[:, first : first + self.size])


def rank_span(total: int, group: TPGroup, what: str) -> tuple[int, int]:
    """[first, end) of `total` outputs for this rank; raises ValueError naming `what` if they do not divide."""
    size = shard_size(total, group.size, what)
    return group.rank * size, (group.rank + 1) * size


def kv_head_span(num_kv_heads: int, group: TPGroup) -> tuple[int, int]:
    """[first, end) of the KV heads this rank holds; with more ranks than heads each head is held by several ranks."""
    if num_kv_heads >= group.size:
        return rank_span(num_kv_heads, group, "num_key_value_heads")
    if group.size % num_kv_heads:
        raise ValueError(
            f"tensor_parallel={group.size}: is no multiple of num_key_value_heads={num_kv_heads}; "
            f"try {num_kv_heads} or {2 * num_kv_heads}"
        )
    head = group.rank * num_kv_heads // group.size
    return head, head + 1


def check_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError with both shapes if a checkpoint tensor is not of the shape that the config implies."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: checkpoint has shape {tuple(tensor.shape)}, config.json implies {tuple(shape)}")
