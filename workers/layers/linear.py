"""Tensor-parallel linear layers. Column-parallel: outputs are cut, nothing is communicated. Row-parallel: inputs are
cut, and the ranks' outputs are summed. How weights are kept and multiplied by is their `LinearMethod`'s."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from workers.distributed.tp_group import TPGroup, shard_size
from workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod, check_plain
from workers.layers.weighted import WeightedModule, WeightKey, check_shape
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.ops.gemm.workspace import GEMMOptions
from workers.span import Span


class LinearBase(WeightedModule):
    """y = x W^T + b. method: unquantised when the layer is made; another may be put in its place before it is filled.
    bias: [out_features] of this rank."""

    method: LinearMethod
    bias: nn.Parameter | None

    def __init__(self, shape: LinearShape, bias: bool, method: LinearMethod | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.out_features = shape.out_features
        self.method = method or UnquantizedLinearMethod(shape)
        self.bias = nn.Parameter(torch.empty(self.out_features), requires_grad=False) if bias else None

    def weight_keys(self) -> Iterator[WeightKey]:
        for part in self.shape.parts:
            for kind in self.method.kinds:
                yield WeightKey(kind, part.name)
            if self.bias is not None:
                yield WeightKey("bias", part.name)

    def load(self, key: WeightKey, full: Tensor) -> None:
        part = self.shape.part(key.part)
        if key.kind != "bias":
            self.method.load(key.kind, part, full)
            return
        assert self.bias is not None, "asked for a key that `weight_keys` does not have"
        check_plain(full)
        check_shape(full, (part.rows.total,))
        self.bias.data[part.offset : part.offset + part.rows.size].copy_(full[part.rows.first : part.rows.end])

    def fill_missing(self, key: WeightKey) -> bool:
        return key.kind != "bias" and self.method.fill_missing(key.kind, self.shape.part(key.part))

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.method.fill_dummy(generator)
        if self.bias is not None:
            self.bias.data.fill_(1.0)

    def finish(self, options: GEMMOptions) -> None:
        self.method.finish(options)


class ReplicatedLinear(LinearBase):
    """Whole on every rank."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(LinearShape.stacked([("", Span.whole(out_features))], Span.whole(in_features)), bias)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        return self.method.multiply(x, self.bias)


class ColumnParallelLinear(LinearBase):
    """One matrix of the checkpoint or several side by side ("merged"), each cut along its outputs.

    parts: this rank's rows of each, by its name; {"": rows} of a single one. Output: the parts side by side.
    """

    def __init__(self, in_features: int, parts: Mapping[str, Span], bias: bool = False) -> None:
        super().__init__(LinearShape.stacked(parts.items(), Span.whole(in_features)), bias)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        return self.method.multiply(x, self.bias)


class QKVParallelLinear(ColumnParallelLinear):
    """q_proj, k_proj and v_proj, cut by heads. num_heads, num_kv_heads: of the model; as attributes of this rank. With
    more ranks than KV heads, each of those is held by several ranks."""

    def __init__(
        self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, group: TPGroup, bias: bool
    ) -> None:
        q = rank_span(num_heads, group, "num_attention_heads")
        kv = Span(*kv_head_span(num_kv_heads, group), num_kv_heads)
        q_rows, kv_rows = q.times(head_dim), kv.times(head_dim)
        super().__init__(in_features, {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}, bias)
        self.num_heads, self.num_kv_heads = q.size, kv.size


class GateUpParallelLinear(ColumnParallelLinear):
    """silu(x W_gate^T) * (x W_up^T), cut along its outputs; of gate_proj and up_proj."""

    def __init__(self, in_features: int, out_features: int, group: TPGroup, what: str) -> None:
        span = rank_span(out_features, group, what)
        super().__init__(in_features, {"gate_proj": span, "up_proj": span})

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        out = self.for_product(x, None)
        assert isinstance(out, Tensor)
        return out

    def for_product(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None) -> Tensor | Fp8Rows:
        """The same in the form that the product after it takes, see `LinearMethod.multiply_gated`."""
        return self.method.multiply_gated(x, wanted)


class RowParallelLinear(LinearBase):
    """y = x W^T + b, W cut along its inputs; the ranks' partial results are summed. what: the config's name of
    in_features, for errors."""

    def __init__(self, in_features: int, out_features: int, group: TPGroup, what: str, bias: bool = False) -> None:
        columns = rank_span(in_features, group, what)
        super().__init__(LinearShape.stacked([("", Span.whole(out_features))], columns), bias)
        self.group = group

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        return self.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor | Fp8Rows) -> Tensor:
        """This rank's part of y, for whoever sums the parts at once (`RMSNorm.add`): it may lie in a buffer that the
        next row-parallel layer overwrites. The bias is in rank 0's part."""
        bias = self.bias if self.group.rank == 0 else None
        rows = (x if isinstance(x, Tensor) else x.values).shape[0]
        out = self.group.all_reduce_buffer(rows, self.out_features, self.method.dtype)
        return self.method.multiply(x, bias, out)


def rank_span(total: int, group: TPGroup, what: str) -> Span:
    """This rank's of `total` outputs or inputs; raises ValueError naming `what` if they do not divide."""
    size = shard_size(total, group.size, what)
    return Span(group.rank * size, (group.rank + 1) * size, total)


def kv_head_span(num_kv_heads: int, group: TPGroup) -> tuple[int, int]:
    """[first, end) of the KV heads this rank holds; with more ranks than heads each head is held by several ranks."""
    if num_kv_heads >= group.size:
        span = rank_span(num_kv_heads, group, "num_key_value_heads")
        return span.first, span.end
    if group.size % num_kv_heads:
        raise ValueError(
            f"tensor_parallel={group.size}: is no multiple of num_key_value_heads={num_kv_heads}; "
            f"try {num_kv_heads} or {2 * num_kv_heads}"
        )
    head = group.rank * num_kv_heads // group.size
    return head, head + 1


def finish_weights(model: nn.Module, deterministic: bool = False) -> None:
    """Finish every module of `model`, whose weights are final; what another model shares, and has finished, stays as it
    is. deterministic: on a GPU, a row's result must not depend on the others (weights of a 16-bit type, inputs a
    multiple of 128)."""
    modules = [module for module in model.modules() if isinstance(module, WeightedModule)]
    layers = [module for module in modules if isinstance(module, LinearBase)]
    options = GEMMOptions.of(
        [(layer.shape.out_features, layer.shape.in_features) for layer in layers],
        [module.workspace_size() for module in modules],
        layers[0].method.dtype,
        next(model.parameters()).device,
        deterministic,
    )
    for module in modules:
        if not module.finished:
            module.finish(options)
            module.finished = True
